"""The whole road of a PyTorch custom operation, C++ first.

``import identity_conv`` compiles and loads the operator library on first import. The command line
marks its process before it gets here (see ``entry``), and then the library waits for the first name
that needs it; so it does where ``identity_conv.testing`` is what is imported, which checks operators
of anyone.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from . import testing
    from .building import CompileError
    from .diagnosis import doctor
    from .errors import (
        DamagedPackageError,
        ExecutionError,
        HostError,
        InputError,
        LibraryConflictError,
        LibraryNotLoadedError,
        NoSampleError,
        NotAPackageError,
        PackageError,
        PackageFormatError,
        PackageNotFoundError,
        VerificationError,
    )
    from .extension import Extension
    from .model import IdentityConvCustomClass, IdentityConvCustomOp, IdentityModel, keep_in_state_dict
    from .ops import identity_conv
    from .package import Package, compile_package, inspect_package, load_package
    from .program import export
    from .toolchain import BuildError, ToolchainError

__version__ = "0.1.0"

_HOMES = {
    "BuildError": "toolchain",
    "CompileError": "building",
    "DamagedPackageError": "errors",
    "ExecutionError": "errors",
    "Extension": "extension",
    "HostError": "errors",
    "IdentityConvCustomClass": "model",
    "IdentityConvCustomOp": "model",
    "IdentityModel": "model",
    "InputError": "errors",
    "LibraryConflictError": "errors",
    "LibraryNotLoadedError": "errors",
    "NoSampleError": "errors",
    "NotAPackageError": "errors",
    "Package": "package",
    "PackageError": "errors",
    "PackageFormatError": "errors",
    "PackageNotFoundError": "errors",
    "ToolchainError": "toolchain",
    "VerificationError": "errors",
    "compile_package": "package",
    "doctor": "diagnosis",
    "export": "program",
    "identity_conv": "ops",
    "inspect_package": "package",
    "keep_in_state_dict": "model",
    "load_package": "package",
}

__all__ = [
    "BuildError",
    "CompileError",
    "DamagedPackageError",
    "ExecutionError",
    "Extension",
    "HostError",
    "IdentityConvCustomClass",
    "IdentityConvCustomOp",
    "IdentityModel",
    "InputError",
    "LibraryConflictError",
    "LibraryNotLoadedError",
    "NoSampleError",
    "NotAPackageError",
    "Package",
    "PackageError",
    "PackageFormatError",
    "PackageNotFoundError",
    "ToolchainError",
    "VerificationError",
    "compile_package",
    "doctor",
    "export",
    "identity_conv",
    "inspect_package",
    "keep_in_state_dict",
    "load_package",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module(".testing", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_command() -> bool:
    """Whether this process is the command line, which decides itself when to build."""
    # While -m looks for its module, argv[0] is "-m": a script's own arguments don't count.
    looking = sys.argv[:1] == ["-m"] and any(
        flag == "-m" and module == __name__ for flag, module in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )
    return "_identity_conv_entry" in sys.modules or looking


def _is_for(module: str) -> bool:
    """Whether this package is imported as the parent of `module`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Python imports a parent from within the import of its child, and tells it by nothing else.
        if frame.f_globals.get("__name__") == "importlib._bootstrap" and frame.f_code.co_name == "_find_and_load":
            name = frame.f_locals["name"]
            if name == module or name.startswith(f"{module}."):
                return True
        frame = frame.f_back
    return False


def _load_library() -> None:
    """Builds the operator library if need be, and loads it.

    An error says what to do, and where in here it was raised only to ``logging``, at level DEBUG.
    """
    from . import toolchain

    try:
        toolchain.check_torch()
        importlib.import_module(".ops", __name__)
    except toolchain.BuildError as error:
        import logging

        from .diagnosis import findings

        logging.getLogger(__name__).debug("the library can't be loaded", exc_info=True)
        for finding in findings(probes=False):
            if finding.verdict != "ok":
                error.add_note(str(finding))
        error.add_note("`identity-conv doctor` looks further")
        raise error.with_traceback(None) from None


if _is_for(f"{__name__}.testing"):
    from . import deferred

    deferred.load_at_first_use("my_ops", _load_library)
elif not _is_command():
    _load_library()
