"""What identity_conv builds for itself: the operator library, the runtime's binding, the program."""

from __future__ import annotations

from pathlib import Path

from . import settings
from .building import Target


def operators() -> Target:
    """The worked example's library, ``libidentity_conv_ops.so``."""
    return Target("library", "identity_conv_ops", sorted((settings.source_dir() / "ops").glob("*.c*")), bundled=True)


def binding() -> Target:
    """The Python module that holds packages."""
    return Target("module", "identity_conv_runtime", _runtime_sources("python_binding.cpp"), bundled=True)


def program() -> Target:
    """``identity-conv-run``, which needs no Python."""
    # Packages need libtorch in the process and have no path to it.
    sources = _runtime_sources("main.cpp", "tensor_file.cpp")
    return Target("program", "identity_conv_run", sources, ldflags=("-Wl,--no-as-needed",), bundled=True)


def _runtime_sources(*of_its_own: str) -> list[Path]:
    """The runtime and the files that make it a Python module or a program."""
    folder = settings.source_dir() / "runtime"
    others = {folder / name for name in ("main.cpp", "tensor_file.cpp", "python_binding.cpp")}
    return [*sorted(set(folder.glob("*.cpp")) - others), *(folder / name for name in of_its_own)]
