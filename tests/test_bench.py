"""identity-conv bench: what is compared, what is recorded, what is drawn."""

from __future__ import annotations

import json
import re
import subprocess
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support_build import CONSOLE_SCRIPT, ROOT, run_python

from identity_conv import bench, cli


def turns(ours: list[float], baseline: list[float]) -> bench.Comparison:
    pairs = len(ours) - 1  # and one to warm up
    return bench.compare("this", "that", iter(ours).__next__, iter(baseline).__next__, pairs=pairs)


def test_a_ratio_is_ours_by_the_baseline() -> None:
    compared = turns([9.0] + [2.0] * 8, [9.0] + [4.0] * 8)
    assert (compared.ratio, compared.ours_us, compared.baseline_us) == (0.5, 2e6, 4e6)
    assert compared.verdict == "faster"
    assert turns([9.0] + [4.0] * 8, [9.0] + [2.0] * 8).verdict == "slower"


def test_a_difference_within_the_spread_is_noise() -> None:
    assert turns([1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.1, 0.9], [1.0] * 8).verdict == "noise"


@pytest.mark.parametrize(("bytes_moved", "calls"), [(1 << 30, 1), (8000, 200)])
def test_a_timer_tells_the_seconds_of_one_call(bytes_moved: int, calls: int) -> None:
    made: list[float] = []
    timed = bench.timer(lambda: made.append(time.sleep(0.002)), "cpu", bytes_moved)
    assert not made
    assert 0.002 <= timed() < 0.1
    assert len(made) == calls


def test_which_goes_first_alternates() -> None:
    order: list[str] = []
    bench.compare("a", "b", lambda: order.append("a") or 1.0, lambda: order.append("b") or 1.0, pairs=4)
    assert "".join(order[2:]) == "abbaabba"


def test_what_is_cold_each_time_is_not_warmed() -> None:
    order: list[str] = []
    ours, baseline = (lambda: order.append("a") or 1.0), (lambda: order.append("b") or 1.0)
    bench.compare("a", "b", ours, baseline, pairs=2, warm_up=False)
    assert "".join(order) == "abba"


def test_what_was_measured_is_told_where_bench_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(suite: str) -> Iterator[bench.Comparison]:
        yield turns([9.0] + [2.0] * 8, [9.0] + [4.0] * 8)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    done = CliRunner().invoke(cli.command, ["bench", "operator", "--json"])
    assert done.exit_code == 1
    assert [each["ratio"] for each in json.loads(done.stdout)["comparisons"]] == [0.5]
    assert done.stderr.strip().endswith("Aborted!")


def test_what_is_printed_says_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [bench.Comparison("call 1", "another", 1.26, 2.52, 0.5, 0.4, 0.6, 1.234)]
    monkeypatch.setattr(bench, "run", lambda suite: iter(measured))
    done = CliRunner().invoke(cli.command, ["bench", "operator"])
    assert (done.exit_code, done.stderr) == (0, "")
    machine, head, row = done.stdout.splitlines()
    of, _, columns, _, line = bench.table(bench.record(measured)).splitlines()
    assert machine == of
    shown = dict(zip(re.split("  +", head.strip()), re.split("  +", row.strip()), strict=True))
    wanted = dict(zip(columns.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert shown == wanted | {"baseline µs": "2.5", "verdict": "faster"}


def test_a_record_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from identity_conv import plots

    rows = [
        bench.Comparison(f"cpu dense {size} B", baseline, 1.0 + size / 1e3, 2.0 + size / 1e3, 0.5, 0.4, 0.6)
        for size in (1, 1024, 1 << 20)
        for baseline in ("torch.ops.aten.clone", "a copy into given memory")
    ]
    rows.append(bench.Comparison("a call & its <name>", "another", 1.0, 2.0, 0.5, 0.4, 0.6))
    plots.check(tmp_path / "plots")
    written = plots.save(bench.record(rows), tmp_path / "plots")
    assert [file.name for file in written] == ["bandwidth_cpu.svg", "times.svg"]
    for file in written:
        assert xml.etree.ElementTree.parse(file).getroot().tag.endswith("svg")


def test_the_picture_of_times_says_which_bars_are_ours() -> None:
    pytest.importorskip("matplotlib")
    from identity_conv import plots

    rows = [bench.Comparison(f"call {time}", "another", time, 10 * time, 0.1, 0.1, 0.1) for time in (1.0, 2.0)]
    figure = plots.times(bench.record(rows)["comparisons"])
    (axes,), (legend,) = figure.axes, figure.legends
    widths = {}
    for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=True):
        bars = (bar for bar in axes.patches if bar.get_facecolor() == patch.get_facecolor())
        widths[text.get_text()] = [bar.get_width() for bar in bars]
    assert widths == {"ours": [1.0, 2.0], "what stands beside it": [10.0, 20.0]}


def test_the_files_of_pictures_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = [bench.Comparison("a call", "another", 1.0, 2.0, 0.5, 0.4, 0.6)]
    monkeypatch.setattr(bench, "run", lambda suite: iter(measured))
    done = CliRunner().invoke(cli.command, ["bench", "operator", "--plot", str(tmp_path / "plots")])
    assert (done.exit_code, done.stderr) == (0, f"identity_conv: wrote {tmp_path}/plots/times.svg\n")
    assert (tmp_path / "plots" / "times.svg").is_file()


def test_ranks_take_a_port_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", start)
    assert list(bench.run("scaling")) == []
    assert "--standalone" in started[0]


def test_without_matplotlib_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
    )
    path = f"{tmp_path}:{ROOT}:{ROOT / 'identity_conv' / 'entry'}"
    done = run_python(*CONSOLE_SCRIPT, "bench", "operator", "--plot", tmp_path / "plots", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--plot needs matplotlib" in done.stderr


def test_a_folder_for_plots_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plots").touch()
    done = run_python(*CONSOLE_SCRIPT, "bench", "operator", "--plot", tmp_path / "plots")
    assert (done.returncode, done.stdout) == (2, "")
