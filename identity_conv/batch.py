"""A package over a folder of inputs: by one process, or by all ranks of a torchrun, on one host or many.

Nothing divides the work beforehand. A rank takes the next file that is neither done nor taken, so a slow one holds
nobody up, and what a killed one had taken is taken again. A file is taken by a lock that the system drops with its
holder, and done once its output stands under its own name.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .package import Package, inspect_package, load_package

_LOCKS = ".taken"
_WAIT_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """What one process did.

    Attributes:
        done: the files that it ran.
        by_others: those that other ranks or an earlier run did.
        seconds: from the loaded package to the last output.
        device: where it ran.
    """

    done: int
    by_others: int
    seconds: float
    device: str

    def __str__(self) -> str:
        rate = f", {self.done / self.seconds:.1f} a second" if self.done else ""
        others = f"; {self.by_others} done before or by others" if self.by_others else ""
        return f"{self.done} done on {self.device} in {self.seconds:.1f} s{rate}{others}"


def run(
    package: str | os.PathLike[str],
    inputs: str | os.PathLike[str],
    outputs: str | os.PathLike[str],
    *,
    device: str | None = None,
) -> Outcome:
    """Runs the package on every ``.pt`` file of a folder and writes an output of the same name for each.

    It may be started again after any end: what is done stays done. Started by torchrun, each rank works on its own
    GPU. Ranks on several hosts share both folders, on a file system whose locks hold among hosts (NFS 4, Lustre with
    ``flock``).

    Args:
        package: the ``model.pt2``.
        inputs: a folder of files as ``torch.save`` writes them: a tensor, a list or tuple of the model's
            positional arguments, or a dict of those that the export had by keyword. Or one such file.
        outputs: the folder that the outputs go to; it is made if need be.
        device: where to run, as :func:`identity_conv.load_package` takes it; by default the rank's GPU for a package
            compiled for CUDA.

    Raises:
        FileNotFoundError: `inputs` isn't there, or holds no ``.pt`` file.
        ValueError: `outputs` is the folder of the inputs; or, after all others are done, inputs that can't be read
            or that the package refuses: the sentence counts them and names the first.
        PackageError: the package can't be loaded here.

    Example::

        >>> print(run("model.pt2", "inputs", "outputs"))
        1000 done on cpu in 2.1 s, 476.2 a second
    """
    given, target = Path(inputs), Path(outputs)
    files = sorted(given.glob("*.pt")) if given.is_dir() else [given]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"run: inputs must be a .pt file or a folder of them, got {str(given)!r}")
    if target.resolve() == files[0].parent.resolve():
        raise ValueError(f"run: outputs must be another folder than that of the inputs, got {str(target)!r}")
    loaded = load_package(package, device=device or _gpu_of_this_rank(package))
    target.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    own, refused = 0, []
    for file in _taken(files, target):
        try:
            _write(target / file.name, _call(loaded, file))
            own += 1
        except ValueError as error:
            refused.append(error)
    if refused:
        raise ValueError(f"run: {len(refused)} of {len(files)} inputs failed, the first: {refused[0]}")
    return Outcome(own, len(files) - own, time.monotonic() - start, str(loaded.device))


def _gpu_of_this_rank(package: str | os.PathLike[str]) -> str | None:
    """The GPU of this rank, where torchrun has started it and the package is for one."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or not torch.cuda.is_available():
        return None
    host = (inspect_package(package)["manifest"] or {}).get("host", {})
    return f"cuda:{int(rank) % torch.cuda.device_count()}" if host.get("device") == "cuda" else None


def _taken(files: list[Path], outputs: Path) -> Iterator[Path]:
    """The files that this process takes, one at a time, until every other is done or was tried here."""
    from filelock import FileLock, Timeout

    left = [file for file in files if not (outputs / file.name).exists()]
    # Ranks that start at different places seldom want the same file.
    random.shuffle(left)
    locks = outputs / _LOCKS
    while left:
        held_by_others = []
        for file in left:
            locks.mkdir(exist_ok=True)
            lock = FileLock(locks / f"{file.name}.lock")
            try:
                with lock.acquire(timeout=0):
                    if not (outputs / file.name).exists():
                        yield file
                    if (outputs / file.name).exists():  # which whoever locks the removed file finds
                        Path(lock.lock_file).unlink(missing_ok=True)
            except Timeout:
                held_by_others.append(file)
        left = [file for file in held_by_others if not (outputs / file.name).exists()]
        if left:
            time.sleep(_WAIT_S)
    with suppress(OSError):  # it isn't empty, or is gone
        locks.rmdir()


def _call(package: Package, file: Path) -> Any:
    try:
        arguments = torch.load(file, map_location=package.device, weights_only=True)
        if isinstance(arguments, dict):
            return package(**arguments)
        return package(*(arguments if isinstance(arguments, list | tuple) else (arguments,)))
    except Exception as error:  # whatever a file may hold
        raise ValueError(f"{file}: {error}") from error


def _write(path: Path, output: Any) -> None:
    unfinished = path.with_name(f".{path.name}.new")  # whoever holds the file's lock may write it
    with unfinished.open("wb") as stream:
        torch.save(output, stream)
    unfinished.replace(path)
