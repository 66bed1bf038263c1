"""The main job: the worked example, the whole road, compared at every step."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import progress


@dataclass
class Step:
    """One line of the table: what was done, how long it took, and whether its result was the input."""

    name: str
    seconds: float
    equal: bool | None


class Road:
    """Runs steps, times each and keeps what it found."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def take(self, name: str, work: Callable[[], Any], *, equal: Callable[[Any], bool] | None = None) -> Any:
        progress.step(f"{name} ...")
        start = time.monotonic()
        result = work()
        seconds = time.monotonic() - start
        self.steps.append(Step(name, seconds, equal(result) if equal else None))
        return result


def run(out: Path) -> bool:
    """Takes the road and prints the steps; True if every compared result equals the input."""
    console = Console()
    road = Road()
    torch = road.take("import torch", lambda: __import__("torch"))
    package = road.take("build and load the operator library", _load)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = package.IdentityModel(channels=3).to(device).eval()
    x = torch.randn(2, 3, 8, 8, device=device)
    tolerance = 0.0 if device == "cpu" else 1e-2  # TF32 in the native convolutions

    def matches(y: Any) -> bool:
        return y.shape == x.shape and bool((y.to(device) - x).abs().max() <= tolerance)

    with torch.no_grad():
        road.take(f"run the model on {device}", lambda: model(x), equal=matches)
        batch = torch.export.Dim("batch", max=1024)
        program = road.take("export", lambda: package.export(model, (x,), dynamic_shapes=({0: batch},)))
    console.print(str(program.graph).strip(), markup=False, highlight=False, soft_wrap=True)
    road.take(f"compile to {out}", lambda: package.compile_package(program, out))

    from . import targets

    road.take("build the runtime's Python binding", lambda: targets.binding().build())
    loaded = road.take("load the package in Python", lambda: package.load_package(out))
    road.take("run the package in Python", lambda: loaded(x), equal=matches)
    executable = road.take("build identity-conv-run", lambda: targets.program().build())
    road.take(
        "run it without Python",
        lambda: _run_without_python(torch, executable, out, x),
        equal=matches,
    )
    console.print(_table(road.steps))
    return all(step.equal is not False for step in road.steps)


def _load() -> Any:
    import identity_conv
    from identity_conv import ops  # noqa: F401  builds and loads

    return identity_conv


def _run_without_python(torch: Any, executable: Path, package: Path, x: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "x.pt", Path(folder) / "y.pt"
        torch.save(x.cpu(), given)
        command: list[str | Path] = [executable, package, "--verify", "--input", given, "--output", result]
        done = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"{executable.name} ended with status {done.returncode}")
        return torch.load(result)


def _table(steps: list[Step]) -> Table:
    table = Table("step", "seconds", "result")
    for step in steps:
        verdict = "" if step.equal is None else f"equal: {'yes' if step.equal else 'NO'}"
        table.add_row(step.name, f"{step.seconds:.2f}", verdict)
    return table
