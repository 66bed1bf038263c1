"""Pictures of a record of ``identity-conv bench``. They need matplotlib, which the extra ``notebooks`` brings."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = {"ours": "#1b9e77", "baseline": "#7570b3", "roof": "0.85"}


def check(folder: Path) -> None:
    """Finds out before minutes of measuring whether :func:`save` can draw into `folder`, and makes it.

    Raises:
        ImportError: matplotlib isn't installed.
        OSError: the folder can't be made.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which isn't installed: pip install matplotlib")
    folder.mkdir(parents=True, exist_ok=True)


def save(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws `record`, as :func:`identity_conv.bench.record` makes it, into SVG files of `folder`, which is there.

    Returns:
        The files: the bandwidth of each device over the size of a dense tensor, and the times of everything else.

    Raises:
        ImportError: matplotlib isn't installed.
        OSError: the folder can't be written to.
    """
    figures = {f"bandwidth_{device}": bandwidth(record, device) for device in ("cpu", "cuda")}
    figures["times"] = times([each for each in record["comparisons"] if _bytes_of(each) is None])
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1])
    return written


def bandwidth(record: Mapping[str, Any], device: str) -> Any:
    """Draws GB/s, read and written, over the bytes of a dense tensor: the operator, clone, and a bare copy as the roof.

    Returns:
        A matplotlib figure, or None where the record has no such row of `device`.
    """
    rows = [each for each in record["comparisons"] if each["name"].startswith(f"{device} ") and _bytes_of(each)]
    clones = [each for each in rows if each["baseline"].endswith("clone")]
    copies = [each for each in rows if each not in clones]
    if not clones:
        return None
    figure, axes = _figure(4)

    def line(rows: Sequence[Mapping[str, Any]], time: str) -> tuple[list[int], list[float]]:
        sizes = [2 * (_bytes_of(each) or 0) for each in rows]
        return sizes, [size / each[time] / 1e3 for size, each in zip(sizes, rows, strict=True)]

    if copies:
        axes.fill_between(*line(copies, "baseline_us"), color=_COLORS["roof"], label="roof: a bare copy")
    axes.plot(*line(clones, "baseline_us"), "s--", color=_COLORS["baseline"], label="torch.ops.aten.clone")
    axes.plot(*line(clones, "ours_us"), "o-", color=_COLORS["ours"], label="my_ops.identity_conv_op")
    axes.set(xscale="log", yscale="log", xlabel="bytes read and written", ylabel="GB/s")
    axes.set_title(", ".join(f"{name} {fact}" for name, fact in record["machine"].items()), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def times(comparisons: Sequence[Mapping[str, Any]]) -> Any:
    """Draws each comparison as two bars of microseconds, with the ratio and its interval beside them.

    Returns:
        A matplotlib figure, or None where there is no comparison.
    """
    if not comparisons:
        return None
    figure, axes = _figure(1 + 0.5 * len(comparisons))
    places = range(len(comparisons))
    for who, side, label in (("ours", -0.2, "ours"), ("baseline", 0.2, "what stands beside it")):
        widths = [each[f"{who}_us"] for each in comparisons]
        axes.barh([place + side for place in places], widths, 0.4, color=_COLORS[who], label=label)
    for place, each in enumerate(comparisons):
        longest = max(each["ours_us"], each["baseline_us"])
        interval = f" {each['ratio']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
        axes.text(longest, place, interval, va="center", fontsize="small")
    names = [f"{each['name']}\nbeside {each['baseline']}" for each in comparisons]
    axes.set_yticks(places, names, fontsize="small")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="µs, and the ratio to what stands beside it")
    axes.margins(x=0.3)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)  # inside it would hide a ratio
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _figure(height: float) -> tuple[Any, Any]:
    # Not pyplot: it would take over a notebook's, or want a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots()


def _bytes_of(row: Mapping[str, Any]) -> int | None:
    """The size of a dense tensor of bytes, such as ``cpu dense 4096 B``, or None for any other row."""
    words = row["name"].split()
    return int(words[2]) if len(words) == 4 and words[1] == "dense" and words[3] == "B" else None
