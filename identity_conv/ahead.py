"""Building ahead of time: everything that a process would build on first use."""

from __future__ import annotations

from pathlib import Path

from . import installation, targets


def build(prefix: Path | None) -> list[Path]:
    """Builds the operator library, the runtime's Python binding and the program.

    Args:
        prefix: where the files and the headers are laid down; None leaves them in the cache.

    Returns:
        The files, where they are to be used.

    Raises:
        BuildError: something can't be built.
    """
    wanted = [targets.operators(), targets.binding(), targets.program()]
    files = [(target.kind, target.build(use_prefix=False)) for target in wanted]
    return installation.install(prefix.absolute(), files) if prefix else [path for _, path in files]
