"""What a package is refused for: one exception for each kind, of which all are :class:`PackageError`.

The C++ runtime raises them (``identity_conv/package.h``), with the sentence that it gives in C++ too.
"""

from __future__ import annotations


class PackageError(RuntimeError):
    """A package, or an input of one, was refused, or its model failed.

    Attributes:
        kind: why, in a word or two, such as ``"host"``; each subclass has its own.
    """

    kind = ""


class PackageNotFoundError(PackageError, FileNotFoundError):
    """There is no file at the path."""

    kind = "not found"


class NotAPackageError(PackageError):
    """The file is foreign, or another kind of torch archive."""

    kind = "not a package"


class DamagedPackageError(PackageError):
    """The file was a package, and isn't whole or isn't the same any more."""

    kind = "damaged"


class PackageFormatError(PackageError):
    """The manifest has a format that this version doesn't know."""

    kind = "format"


class HostError(PackageError):
    """This machine, or this torch, lacks what the package needs."""

    kind = "host"


class LibraryNotLoadedError(PackageError):
    """An operator or a class of the package is not registered."""

    kind = "library not loaded"


class LibraryConflictError(PackageError):
    """The process has registered something else under the package's names."""

    kind = "library conflict"


class InputError(PackageError):
    """The inputs are not those that the package was compiled for."""

    kind = "input"


class ExecutionError(PackageError):
    """The model was given right inputs and failed."""

    kind = "execution"


class NoSampleError(PackageError):
    """The package carries no example to be verified by."""

    kind = "no sample"


class VerificationError(PackageError):
    """The recorded example gives another result here."""

    kind = "verification"


#: In the order of the C++ ``PackageError::Kind``.
BY_KIND = (
    PackageNotFoundError,
    NotAPackageError,
    DamagedPackageError,
    PackageFormatError,
    HostError,
    LibraryNotLoadedError,
    LibraryConflictError,
    InputError,
    ExecutionError,
    NoSampleError,
    VerificationError,
)
