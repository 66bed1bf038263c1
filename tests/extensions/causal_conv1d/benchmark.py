"""The convolution beside a copy of the same bytes and beside torch: eager, and on a GPU compiled.

\b
    python tests/extensions/causal_conv1d/benchmark.py cuda --json record.json

How it is timed is identity_conv.bench's: pairs by turns, and on a GPU an empty L2 before each run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config

from identity_conv import Extension, bench

SOURCES = Path(__file__).parent
WIDTH = 4
#: What is convolved, and (N, C, L): small, middle, large.
SIZES = {
    "cpu": (torch.float32, [(1, 64, 1024), (2, 256, 2048), (2, 512, 4096)]),
    "cuda": (torch.bfloat16, [(1, 512, 2048), (4, 2048, 4096), (8, 4096, 8192)]),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PAIRS = 15


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What one writes with torch's operators."""
    return F.silu(F.conv1d(x, weight.unsqueeze(1), padding=WIDTH - 1, groups=x.shape[1])[..., : x.shape[2]])


def check(name: str, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Holds results against those of a wider dtype, before they are timed.

    Raises:
        RuntimeError: one is further off than its dtype explains.
    """
    for index, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        error = float((mine - right).abs().max())
        if not error <= TOLERANCE[mine.dtype] * (1 + float(right.abs().max())):
            raise RuntimeError(f"benchmark: {name}: output {index} is off by {error}")


def comparisons(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> Iterator[bench.Comparison]:
    """Forward and backward, of rows and of channels-last, each beside every baseline."""
    ops = Extension("causal_conv1d", sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.cu")])).load().ops
    weight = torch.randn(shape[1], WIDTH, dtype=dtype, device=device)
    for layout in ("rows", "channels-last"):
        functions = {"torch eager": eager}
        if device == "cuda":
            torch.compiler.reset()  # after eight compilations of one function torch goes on without
            functions["torch.compile"] = torch.compile(eager)
        x, dy = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        if layout == "channels-last":
            x, dy = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (x, dy))

        def gradients(function: Any, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
            leaves = [each.detach().requires_grad_() for each in (x, weight)]
            return partial(torch.autograd.grad, function(*leaves), leaves, dy, retain_graph=True)

        # So that the backward of a compiled graph, which is compiled as late as its first run, may be run again.
        # Seen in torch 2.11, 2.13 and 2.14.
        with functorch_config.patch(donated_buffer=False):
            backwards = {name: gradients(function, x, weight, dy) for name, function in functions.items()}
            for each in backwards.values():
                each()
        exact = [each.to(torch.float64 if device == "cpu" else torch.float32) for each in (x, weight, dy)]

        name = f"{device} forward {layout} {shape}"
        ours = partial(ops.forward, x, weight, silu=True)
        check(name, ours()[:1], [eager(*exact[:2])])
        forwards = {each: partial(function, x, weight) for each, function in functions.items()}
        yield from _beside(name, ours, {"a copy of x": x.clone} | forwards, device, 2 * x.nbytes)

        name = f"{device} backward {layout} {shape}"
        ours = partial(ops.backward, dy, None, x, weight, None, None, True)
        check(name, ours()[:2], gradients(eager, *exact)())
        larger = x.new_zeros(3 * x.numel() // 2)
        yield from _beside(name, ours, {"a copy of 1.5 x": larger.clone} | backwards, device, 3 * x.nbytes)


def _beside(
    name: str, ours: Callable[[], Any], baselines: dict[str, Callable[[], Any]], device: str, bytes_moved: int
) -> Iterator[bench.Comparison]:
    for other, baseline in baselines.items():
        timers = (bench.timer(call, device, bytes_moved) for call in (ours, baseline))
        yield bench.compare(name, other, *timers, pairs=PAIRS, bytes_moved=bytes_moved)


@click.command(help=__doc__)
@click.argument("device", type=click.Choice(list(SIZES)), default="cpu")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the record there too.")
def main(device: str, file: Path | None) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("device must be one that torch sees, got cuda, and it sees no GPU")
    dtype, shapes = SIZES[device]
    found = []
    for shape in shapes:
        for each in comparisons(device, dtype, shape):
            found.append(each)
            click.echo(f"{each.name}: {each.ratio:.3f} of {each.baseline}", err=True)
    record = bench.record(found)
    click.echo(bench.table(record))
    if file:
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
