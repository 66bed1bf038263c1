"""What identity_conv builds for itself: the operator library, the runtime's binding, the program, parts of packages."""

from __future__ import annotations

from collections.abc import Sequence

from . import settings, toolchain
from .building import Kind, Target


def operators() -> Target:
    """The worked example's library, ``libidentity_conv_ops.so``."""
    return Target("library", "identity_conv_ops", sorted((settings.source_dir() / "ops").glob("*.c*")), bundled=True)


def binding() -> Target:
    """The Python module that holds packages."""
    return _with_runtime("module", "identity_conv_runtime", "python_binding.cpp")


def program() -> Target:
    """``identity-conv-run``, which needs no Python."""
    # Packages need libtorch in the process and have no path to it.
    return _with_runtime("program", "identity_conv_run", "main.cpp", "tensor_file.cpp", ldflags=("-Wl,--no-as-needed",))


def regex() -> Target:
    """What every package would compile of std::regex."""
    return Target("archive", "identity_conv_regex", [settings.source_dir() / "aotinductor" / "regex.cpp"], bundled=True)


def _with_runtime(kind: Kind, name: str, *sources: str, ldflags: Sequence[str] = ()) -> Target:
    """The files that make the runtime a Python module or a program."""
    folder = settings.source_dir() / "runtime"
    not_runtime = {folder / file for file in ("main.cpp", "tensor_file.cpp", "python_binding.cpp")}
    # Without the toolkit it runs packages for CUDA all the same, but for CUDA graphs.
    cuda = None if toolchain.find_nvcc() else False
    runtime = sorted(set(folder.glob("*.cpp")) - not_runtime)
    archive = Target("archive", "identity_conv_runtime", runtime, cuda=cuda, bundled=True)
    mine = [folder / file for file in sources]
    return Target(kind, name, mine, ldflags=ldflags, cuda=cuda, bundled=True, archive=archive)
