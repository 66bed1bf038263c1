"""Building ahead of time: everything that a process would build on first use."""

from __future__ import annotations

import os
from pathlib import Path

from . import prefix as installation
from . import settings, targets


def build(prefix: Path | None) -> list[Path]:
    """Builds the operator library, the runtime's Python binding and the program.

    Args:
        prefix: where the files and the headers are laid down; None leaves them in the cache.

    Returns:
        The files, where they are to be used.

    Raises:
        BuildError: something can't be built.
    """
    # Built, not found in the prefix that the environment may name.
    os.environ.pop(settings.PREFIX.name, None)
    extensions = [targets.operators(), targets.binding(), targets.program()]
    files = [(extension.kind, extension.build()) for extension in extensions]
    return installation.install(prefix.absolute(), files) if prefix else [path for _, path in files]
