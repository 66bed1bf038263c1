"""What long work says while it runs, on stderr: notes, and on a terminal its steps and a bar."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def building(
    name: str,
    sources: list[Path],
    units: int,
    folder: Path,
    compiler: str,
    archs: str | None,
    last_seconds: float | None,
) -> Iterator[None]:
    """Announces a build of `sources` in `folder`, shows how many of its `units` are done, and says the time it took.

    How long it will take is known only of one that this machine has built before, in `last_seconds`.
    """
    device = f"CPU and CUDA {archs}" if archs else "CPU"
    took = "once" if last_seconds is None else f"{last_seconds:.1f} s last time"
    say(f"compiling {name} for {device} with {compiler}: {', '.join(source.name for source in sources)}; {took}")
    start = time.monotonic()
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(units, folder, done), daemon=True)
    if sys.stderr is not None and sys.stderr.isatty():
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if watcher.is_alive():
            watcher.join()
    say(f"built {name} in {time.monotonic() - start:.1f} s")


@contextmanager
def counting(what: str, total: Callable[[], int], *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar over `total` pieces of work, on a terminal alone; call what it gives after each."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total())
        yield lambda: progress.advance(task)


def _watch(units: int, folder: Path, done: threading.Event) -> None:
    """A bar over the object files, which appear as their compilers finish, and the library."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=units + 1)
        while not done.wait(0.2):
            finished = sum(1 for _ in folder.glob("*.o"))
            progress.update(task, completed=finished, description="linking" if finished == units else "compiling")


def step(text: str) -> None:
    """Prints, on a terminal alone, what long work is at."""
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(OSError, ValueError):
            print(f"identity-conv: {text}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Prints a note of this package on stderr."""
    with suppress(OSError, ValueError):  # a note must not end what it is about
        print(f"identity_conv: {text}", file=sys.stderr, flush=True)
