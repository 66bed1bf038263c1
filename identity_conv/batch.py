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

from . import cache, progress
from .package import Package, inspect_package, load_package
from .wording import counted

_LOCKS = ".taken"
_NOTE = ".package"
_WAIT_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """What one process did.

    Attributes:
        done: how many files it ran.
        by_others: how many other ranks or an earlier run did.
        failed: of each file that failed here, the reason.
        seconds: from the loaded package to the last output.
        device: where it ran.
    """

    done: int
    by_others: int
    failed: dict[str, str]
    seconds: float
    device: str

    @property
    def total(self) -> int:
        """How many files there are."""
        return self.done + self.by_others + len(self.failed)

    def __str__(self) -> str:
        rate = f", {self.done / self.seconds:.1f} a second" if self.done else ""
        others = f"; {self.by_others} done before or by others" if self.by_others else ""
        return f"{self.done} done on {self.device} in {self.seconds:.1f} s{rate}{others}"


class FailedInputsError(ValueError):
    """Inputs failed, after all others were done.

    Attributes:
        outcome: what was done, and why each of them failed.
    """

    def __init__(self, outcome: Outcome):
        super().__init__(
            f"run: {len(outcome.failed)} of {counted(outcome.total, 'input')} failed, each for its reason above"
        )
        self.outcome = outcome


def run(
    package: str | os.PathLike[str],
    inputs: str | os.PathLike[str],
    outputs: str | os.PathLike[str],
    *,
    device: str | None = None,
) -> Outcome:
    """Runs the package on every ``.pt`` file of a folder and writes an output of the same name for each.

    It may be started again after any end: what is done stays done, and an input that has changed since is run again.
    Started by torchrun, each rank works on its own
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
        ValueError: `outputs` is the folder of the inputs, or has outputs of another package.
        FailedInputsError: there are inputs that can't be read or that the package refuses. All others are done by
            then, and each of these has been named on stderr.
        PackageError: the package can't be loaded here.

    Example::

        >>> print(run("model.pt2", "inputs", "outputs"))
        1000 done on cpu in 2.1 s, 476.2 a second
    """
    given, target = Path(inputs), Path(outputs)
    files = sorted(given.glob("*.pt")) if given.is_dir() else [given]
    if not given.exists() or not files:
        why = f"the folder {str(given)!r} has none" if given.exists() else f"there is no {str(given)!r}"
        raise FileNotFoundError(f"run: inputs must be a .pt file or a folder of them, and {why}")
    if target.resolve() == files[0].parent.resolve():
        raise ValueError(f"run: outputs must be another folder than that of the inputs, got {str(target)!r}")
    loaded = load_package(package, device=device or _gpu_of_this_rank(package))
    target.mkdir(parents=True, exist_ok=True)
    _be_of(target, package)
    start = time.monotonic()
    own, failed = 0, {}
    # Ranks of a torchrun share a terminal, where their bars would write over each other.
    alone = "RANK" not in os.environ
    bar = progress.counting("inputs", lambda: sum(not _is_done(file, target) for file in files), shown=alone)
    with bar as one_more:
        for file in _taken(files, target):
            try:
                _write(target / file.name, _call(loaded, file))
                own += 1
            except ValueError as error:
                progress.say(f"{file}: {error}")
                failed[str(file)] = str(error)
            one_more()
    by_others = len(files) - own - len(failed)
    outcome = Outcome(own, by_others, failed, time.monotonic() - start, str(loaded.device))
    if failed:
        raise FailedInputsError(outcome)
    return outcome


def _gpu_of_this_rank(package: str | os.PathLike[str]) -> str | None:
    """The GPU of this rank, where torchrun has started it and the package is for one."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or not torch.cuda.is_available():
        return None
    host = (inspect_package(package)["manifest"] or {}).get("host", {})
    return f"cuda:{int(rank) % torch.cuda.device_count()}" if host.get("device") == "cuda" else None


def _be_of(outputs: Path, package: str | os.PathLike[str]) -> None:
    """Notes in the folder which package its outputs are of."""
    digest = cache.file_digest(Path(package))
    note = outputs / _NOTE
    if not note.exists():
        unfinished = outputs / f"{_NOTE}.{os.getpid()}.new"
        unfinished.write_text(digest)
        with suppress(FileExistsError):
            os.link(unfinished, note)  # whoever is first: all others then read it
        unfinished.unlink()
    if note.read_text() != digest:
        raise ValueError(
            f"run: outputs must be a folder for this package's outputs, and {str(outputs)!r} has another's"
        )


def _is_done(file: Path, outputs: Path) -> bool:
    """Whether the output is there, and no older than the input."""
    try:
        return (outputs / file.name).stat().st_mtime_ns >= file.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _taken(files: list[Path], outputs: Path) -> Iterator[Path]:
    """The files that this process takes, one at a time, until every other is done or was tried here."""
    from filelock import FileLock, Timeout

    left = [file for file in files if not _is_done(file, outputs)]
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
                    if not _is_done(file, outputs):
                        yield file
            except Timeout:
                held_by_others.append(file)
        left = [file for file in held_by_others if not _is_done(file, outputs)]
        if left:
            time.sleep(_WAIT_S)
    # Also those that a killed process left. Whoever locks a removed file still finds the output.
    for file in files:
        if _is_done(file, outputs):
            (locks / f"{file.name}.lock").unlink(missing_ok=True)
    with suppress(OSError):  # it isn't empty, or is gone
        locks.rmdir()


def _call(package: Package, file: Path) -> Any:
    try:
        arguments = torch.load(file, map_location=package.device, weights_only=True)
    except Exception as error:  # whatever a file may hold
        raise ValueError("it is no file of tensors as torch.save writes it") from error
    try:
        if isinstance(arguments, dict):
            return package(**arguments)
        return package(*(arguments if isinstance(arguments, list | tuple) else (arguments,)))
    except Exception as error:  # whatever the model may raise
        raise ValueError(f"{error or type(error).__name__}") from error


def _write(path: Path, output: Any) -> None:
    unfinished = path.with_name(f".{path.name}.new")  # whoever holds the file's lock may write it
    with unfinished.open("wb") as stream:
        torch.save(output, stream)
    unfinished.replace(path)
