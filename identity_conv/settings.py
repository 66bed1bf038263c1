"""Every environment variable that is honoured, and every folder that follows from them."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name, the kind of value, its default and what it means."""

    name: str
    kind: str
    default: str
    meaning: str

    def value(self) -> str | None:
        """The variable's text, or None where it is unset or empty."""
        return os.environ.get(self.name) or None

    def folder(self) -> Path | None:
        """The folder that the variable names, or None where it is unset or empty.

        Raises:
            ValueError: it starts with the home of a user who isn't known here.
        """
        text = self.value()
        return _expand(text, self.name) if text else None


def _expand(text: str, name: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{name} must name a folder, got {text!r}, whose home isn't known") from error


CACHE_DIR = Setting(
    "IDENTITY_CONV_CACHE_DIR",
    "folder",
    "~/.cache/identity_conv",
    "where builds live",
)
PREFIX = Setting(
    "IDENTITY_CONV_PREFIX",
    "folder",
    "unset",
    "a folder laid down by `identity-conv build --prefix`: import uses what is there and never compiles",
)
CUDA_ARCH_LIST = Setting(
    "TORCH_CUDA_ARCH_LIST",
    "list",
    "the GPUs of this machine",
    "CUDA architectures to compile for, as torch reads it; with a CUDA torch it brings CUDA in without a GPU",
)
MAX_JOBS = Setting("MAX_JOBS", "number", "by cores and memory", "compilers that run at once")
CUDA_HOME = Setting("CUDA_HOME", "folder", "around nvcc on PATH, else /usr/local/cuda", "the CUDA toolkit")
CXX = Setting("CXX", "program", "c++, else g++", "the C++ compiler")
CC = Setting("CC", "program", "the C++ compiler", "the host compiler that nvcc is given")

XDG_CACHE_HOME = Setting("XDG_CACHE_HOME", "folder", "~/.cache", "where the default cache lies")
TMPDIR = Setting("TMPDIR", "folder", "/tmp", "where the files of a loaded package lie")
CHECK_INPUTS = Setting(
    "AOTI_RUNTIME_CHECK_INPUTS",
    "0 or 1",
    "1 for a package without a manifest",
    "torch's own checks of a package's inputs, beside the manifest's",
)

ALL = (CACHE_DIR, PREFIX, CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME, CXX, CC, XDG_CACHE_HOME, TMPDIR, CHECK_INPUTS)


def cache_dir() -> Path:
    """The folder that holds builds; it need not exist yet."""
    return CACHE_DIR.folder() or (XDG_CACHE_HOME.folder() or _expand(XDG_CACHE_HOME.default, "HOME")) / "identity_conv"


def make_private(folder: Path) -> None:
    """Makes a folder of the cache and those above it that are missing, each for its owner alone.

    The mode that mkdir is given counts only for the last folder it makes.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def write_at_once(file: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes a file of the cache, which nobody sees half written: under another name first."""
    descriptor, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(descriptor, "w") as stream:
            stream.write(text)
        os.chmod(unfinished, mode)
        os.replace(unfinished, file)
    except BaseException:
        os.unlink(unfinished)
        raise


def prefix() -> Path | None:
    """The folder of a finished installation, where one is asked for."""
    return PREFIX.folder()


def source_dir() -> Path:
    """The C++ and CUDA sources: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "src"
    return inside if inside.is_dir() else package.parent / "src"
