"""Building ahead of time: everything that a process would build on first use."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import installation, targets
from .building import nothing_is_built
from .extension import Extension


def build(prefix: Path | None, extensions: Iterable[str] = ()) -> list[Path]:
    """Builds the operator library, the runtime's Python binding, the program, and authors' extensions.

    Args:
        prefix: where the files and the headers are laid down; None leaves them in the cache.
        extensions: more of them, as ``module:name``.

    Returns:
        The files, where they are to be used.

    Raises:
        BuildError: something can't be built.
        ValueError: one of `extensions` isn't to be found.
    """
    wanted = [targets.operators(), targets.binding(), targets.program()]
    wanted += [] if prefix else [targets.regex()]  # for compiling packages, which a prefix doesn't
    wanted += [find_extension(name)._target for name in extensions]
    built = [
        installation.Built(target.kind, target.build(use_prefix=False), target.sources_digest()) for target in wanted
    ]
    return installation.install(prefix.absolute(), built) if prefix else [file.path for file in built]


def look_at_extension(name: str) -> Extension:
    """As :func:`find_extension`, and builds nothing that the module would build as it is imported.

    A module that can't go on without is imported as far as it comes.
    """
    with nothing_is_built():
        return find_extension(name, as_far_as_it_comes=True)


def find_extension(name: str, *, as_far_as_it_comes: bool = False) -> Extension:
    """The extension at ``module:name``, with the working folder first on the module path.

    Args:
        as_far_as_it_comes: also of a module that can't be imported to its end.

    Raises:
        ValueError: there is no such module, it can't be imported, or has no Extension of that name.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"an extension is named MODULE:EXTENSION, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        names = vars(importlib.import_module(module_name))
    except Exception as error:  # whatever an author's module runs into
        names = _names_until(error, module_name) if as_far_as_it_comes else {}
        if attribute not in names:
            raise ValueError(f"{name}: {module_name} can't be imported ({type(error).__name__}: {error})") from error
    found = names.get(attribute)
    if not isinstance(found, Extension):
        others = [each for each, value in names.items() if isinstance(value, Extension)]
        raise ValueError(
            f"{name}: {module_name} has no Extension named {attribute}, but {', '.join(others) or 'none at all'}"
        )
    return found


def _names_until(error: Exception, module: str) -> dict[str, Any]:
    """What the module has defined until its import ended with `error`."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame.f_globals for frame in frames if frame.f_globals.get("__name__") == module), {})
