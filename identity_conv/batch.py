"""A package over a folder of inputs: by one process, or by all ranks of a torchrun, on one host or many.

Nothing divides the work beforehand. A rank takes the next file that is neither done nor taken, so a slow one holds
nobody up, and what a killed one had taken is taken again. A file is taken by a lock that the system drops with its
holder, and done once its output stands under its own name.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import progress
from .package import Package, load_package

_LOCKS = ".taken"
_WAIT_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """What one rank did: files of its own, files that other ranks or an earlier run had done, seconds."""

    done: int
    by_others: int
    seconds: float

    def __str__(self) -> str:
        rate = f", {self.done / self.seconds:.1f} a second" if self.done else ""
        return f"{self.done} done in {self.seconds:.1f} s{rate}; {self.by_others} done before or by other ranks"


def run(package: str | os.PathLike[str], inputs: Path, outputs: Path, *, device: str | None = None) -> Outcome:
    """Runs the package on every ``.pt`` file of a folder and writes an output of the same name for each.

    It may be started again after any end: what is done stays done. Started by torchrun, each rank works on its own
    GPU. Ranks on several hosts share both folders, on a file system whose locks hold among hosts (NFS 4, Lustre with
    ``flock``).

    Args:
        package: the ``model.pt2``.
        inputs: a folder of files as ``torch.save`` writes them, each a tensor or a list or tuple of the model's
            arguments; or one such file.
        outputs: the folder that the outputs go to; it is made if need be.
        device: where to run, as :func:`identity_conv.load_package` takes it; by default the rank's GPU for a package
            compiled for CUDA.

    Raises:
        FileNotFoundError: `inputs` isn't there, or holds no ``.pt`` file.
        ValueError: inputs can't be read, or the package refuses them, after all others are done; the sentence
            names the first.
        PackageError: the package can't be loaded here.
    """
    files = sorted(inputs.glob("*.pt")) if inputs.is_dir() else [inputs]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"run: inputs must be a .pt file or a folder of them, got {str(inputs)!r}")
    if outputs.resolve() == (inputs if inputs.is_dir() else inputs.parent).resolve():
        raise ValueError(f"run: outputs must be another folder than that of the inputs, got {str(outputs)!r}")
    (outputs / _LOCKS).mkdir(parents=True, exist_ok=True)
    loaded = load_package(package, device=device or _own_gpu(package))
    start = time.monotonic()
    own, refused = 0, []
    for file in _taken(files, outputs):
        try:
            _write(outputs / file.name, _call(loaded, file))
            own += 1
        except ValueError as error:
            refused.append(error)
    if refused:
        raise ValueError(f"{len(refused)} of {len(files)} inputs failed, the first: {refused[0]}")
    shutil.rmtree(outputs / _LOCKS, ignore_errors=True)
    return Outcome(own, len(files) - own, time.monotonic() - start)


def _own_gpu(package: str | os.PathLike[str]) -> str | None:
    """The GPU of this rank, where torchrun has started it and the package is for one."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or not torch.cuda.is_available():
        return None
    with Package(package) as looked_at:
        return f"cuda:{int(rank) % torch.cuda.device_count()}" if looked_at.device.type == "cuda" else None


def _taken(files: list[Path], outputs: Path) -> Iterator[Path]:
    """The files that this process takes, one at a time, until every output is there."""
    from filelock import FileLock, Timeout

    left = [file for file in files if not (outputs / file.name).exists()]
    # Ranks that start at different places seldom want the same file.
    random.shuffle(left)
    while left:
        held_by_others = []
        for file in left:
            lock = FileLock(outputs / _LOCKS / f"{file.name}.lock")
            try:
                with lock.acquire(timeout=0):
                    if not (outputs / file.name).exists():
                        yield file
            except Timeout:
                held_by_others.append(file)
        left = held_by_others
        if left:
            time.sleep(_WAIT_S)
            left = [file for file in left if not (outputs / file.name).exists()]


def _call(package: Package, file: Path) -> Any:
    try:
        arguments = torch.load(file, map_location=package.device, weights_only=True)
        if isinstance(arguments, torch.Tensor):
            arguments = (arguments,)
        return package(*arguments)
    except Exception as error:  # whatever a file may hold
        raise ValueError(f"run: {file}: {error}") from error


def _write(path: Path, output: Any) -> None:
    unfinished = path.with_name(f".{path.name}.new")  # whoever holds the file's lock may write it
    with unfinished.open("wb") as stream:
        torch.save(output, stream)
    unfinished.replace(path)


def main(package: Path, inputs: Path, outputs: Path, device: str | None) -> None:
    """What the command does: runs, and says what this rank did."""
    outcome = run(package, inputs, outputs, device=device)
    rank = os.environ.get("RANK")
    progress.say(f"{outcome}" if rank is None else f"rank {rank}: {outcome}")
