"""What identity_conv builds for itself: the operator library, the runtime's binding, the program."""

from __future__ import annotations

from pathlib import Path

from . import settings
from .extension import Extension


def operators() -> Extension:
    """The worked example's library, ``libidentity_conv_ops.so``."""
    return Extension("identity_conv_ops", sorted((settings.source_dir() / "ops").glob("*.c*")))


def binding() -> Extension:
    """The Python module that holds packages."""
    return Extension._of_kind("module", "identity_conv_runtime", _runtime_sources("python_binding.cpp"))


def program() -> Extension:
    """``identity-conv-run``, which needs no Python."""
    # Packages need libtorch in the process and have no path to it.
    return Extension._of_kind(
        "program", "identity_conv_run", _runtime_sources("main.cpp"), ldflags=("-Wl,--no-as-needed",)
    )


def _runtime_sources(last: str) -> list[Path]:
    """The runtime and the one file that makes it a Python module or a program."""
    folder = settings.source_dir() / "runtime"
    shared = sorted(set(folder.glob("*.cpp")) - {folder / "main.cpp", folder / "python_binding.cpp"})
    return [*shared, folder / last]
