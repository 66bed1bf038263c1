"""Building ahead of time: everything that a process would build on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from . import installation, targets
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


def find_extension(name: str) -> Extension:
    """The extension at ``module:name``, with the working folder first on the module path.

    Raises:
        ValueError: there is no such module, it can't be imported, or has no Extension of that name.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"an extension is named MODULE:EXTENSION, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever an author's module runs into
        raise ValueError(f"{name}: {module_name} can't be imported ({type(error).__name__}: {error})") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Extension):
        raise ValueError(f"{name}: {module_name} has no Extension named {attribute}, got {type(found).__name__}")
    return found
