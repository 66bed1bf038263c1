"""From sources to a file: what it is made from → key → folder → lock → compile, each once."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from . import cache, installation, progress, settings, toolchain
from .inputs import Inputs
from .toolchain import BuildError, ToolchainError

Kind = Literal["library", "program", "module", "archive"]

CFLAGS = ("-O3", "-fopenmp", "-fvisibility=hidden", "-fno-gnu-unique", "-ffunction-sections", "-fdata-sections")
CUDA_CFLAGS = ("-O3",)
# --as-needed, before any library, drops the ones torch names for all and we don't use: libtorch_python.
LDFLAGS = ("-Wl,--as-needed", "-Wl,--gc-sections", "-Wl,-z,now")

# How often a build is begun again because a file was edited while it ran.
_EDITS = 5

# torch's build reads the environment of the process and remembers names: one at a time.
_build_lock = threading.Lock()


def _unlock_in_child() -> None:
    """A forked child has the lock as it was held, and none of the threads that would let it go."""
    global _build_lock
    _build_lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)


class CompileError(BuildError):
    """A source doesn't compile or link; the message has the first error.

    Attributes:
        log: the file with the full output of the build.
    """

    def __init__(self, message: str, log: Path):
        super().__init__(message)
        self.log = log


class NotBuilt(BuildError):
    """It isn't built yet, within :func:`nothing_is_built`."""


_builds_nothing = False


@contextmanager
def nothing_is_built() -> Iterator[None]:
    """Within it a build that isn't finished is :class:`NotBuilt`: for looking at an author's module."""
    global _builds_nothing
    before, _builds_nothing = _builds_nothing, True
    try:
        yield
    finally:
        _builds_nothing = before


@dataclass
class Target:
    """One file to build: a library of operators, a program, a Python module, or an archive that these link.

    The flags come after this package's own. `bundled` says that it is part of identity_conv: then a
    prefix must have it. `archive` is compiled once for all that link it. An archive's own sources are compiled
    together, so that each header is read once a compiler: what two of them keep to themselves has two names.
    """

    kind: Kind
    name: str
    sources: Sequence[Path]
    include_dirs: Sequence[Path] = ()
    cflags: Sequence[str] = ()
    cuda_cflags: Sequence[str] = ()
    ldflags: Sequence[str] = ()
    cuda: bool | None = None
    archs: str | None = None
    bundled: bool = False
    archive: Target | None = None
    _all_include_dirs: list[Path] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._all_include_dirs = [*self.include_dirs, settings.source_dir() / "include"]

    def _inputs(self, archs: str | None = None) -> Inputs:
        archs = archs or self._cuda_archs()
        flags = [*self.cflags, *self.ldflags, *(self.cuda_cflags if archs else ())]
        return Inputs(self._sources(archs), self._all_include_dirs, flags)

    @property
    def file_name(self) -> str:
        """The name of what the build makes."""
        return {
            "library": f"lib{self.name}.so",
            "module": f"{self.name}.so",
            "archive": f"lib{self.name}.a",
            "program": self.name.replace("_", "-"),
        }[self.kind]

    def parts(self) -> dict[str, str]:
        """What the file is made from, each part by name: the key is their digest.

        Raises:
            ToolchainError: CUDA is asked for and can't be had.
        """
        archs = self._cuda_archs()
        parts = {
            "cache format": cache.FORMAT,
            "name": self.file_name,
            **toolchain.torch_facts(),
            "platform": toolchain.platform(),
            "flags": " ".join([*CFLAGS, *self.cflags, *LDFLAGS, *self.ldflags]),
        }
        if self.kind == "module":
            parts["Python"] = sys.implementation.cache_tag
        if self.kind == "program":
            parts["torch folder"] = str(toolchain.torch_folder())  # where it finds libtorch by itself
        if archs:
            import torch

            parts["CUDA"] = str(torch.version.cuda)
            parts["CUDA architectures"] = archs
            parts["CUDA flags"] = " ".join([*CUDA_CFLAGS, *self.cuda_cflags])
        parts |= self._inputs(archs).digests()
        if cxx := toolchain.find_cxx():
            parts["C++ compiler"] = toolchain.compiler_identity(cxx)
        if archs and (nvcc := toolchain.find_nvcc()):
            host = toolchain.find_cc() or cxx
            parts["nvcc"] = f"{os.path.realpath(nvcc)} {toolchain.nvcc_version(nvcc)}"
            parts["nvcc's host compiler"] = toolchain.compiler_identity(host) if host else "none"
        return parts

    def build(self, *, use_prefix: bool = True) -> Path:
        """Builds what isn't built yet and returns the file.

        Args:
            use_prefix: take it from the folder that IDENTITY_CONV_PREFIX names, where that is set.

        Raises:
            ToolchainError: the machine lacks a compiler, ninja or nvcc, or has one that is too old.
            CompileError: a source doesn't compile.
            BuildError: the cache, the prefix or this torch can't be used.
        """
        toolchain.check_torch()
        prefix = settings.prefix()
        if use_prefix and prefix:
            if found := installation.find(prefix, self.file_name, self.kind, self.sources_digest()):
                return found
            if self.bundled:
                raise installation.lacks(prefix, self.file_name)
        parts = self.parts()
        if found := self.find(parts):
            return found
        if _builds_nothing:
            raise NotBuilt(f"{self.file_name} isn't built, and nothing is built only to look")
        archives = [self.archive.build(use_prefix=False)] if self.archive else []
        # What was compiled is what the key says, or a file was edited meanwhile. One that was edited twice may look
        # as it did: the time of its last change, which nobody can set, doesn't.
        before: dict[Path, int] = {}
        for _ in range(_EDITS):
            before |= _changed_at(self._inputs().files())
            folder = cache.folder_of(self.name, parts)
            with _build_lock, cache.lock(folder):
                if found := self.find(parts):
                    return found
                begin = time.monotonic()
                built = self._build_in(folder, parts, archives)
                seconds = time.monotonic() - begin
                after = _changed_at(self._read(folder).union(*(self._read(path.parent) for path in archives)))
                started = cache.started(folder)
                edited = [path for path, time_ns in after.items() if not before.get(path, started) >= time_ns]
                if (now := self.parts()) == parts and not edited:
                    return cache.finish(folder, built.name, self._others(after), seconds)
                parts, before = now, after
        names = ", ".join(map(str, edited)) or "its sources"
        raise BuildError(f"{self.file_name} can't be built: {names} changed while it was compiled, {_EDITS} times")

    def sources_digest(self) -> str:
        """A digest of the sources, CUDA's too whether or not they join here, and of the flags.

        It is what a prefix is asked about: built on a machine with compilers and a GPU, used on one without.
        """
        flags = {"flags": self.cflags, "CUDA flags": self.cuda_cflags, "linker's flags": self.ldflags}
        joined = {name: " ".join(given) for name, given in flags.items()}
        return cache.digest({**joined, **self._inputs(archs="any").digests()})

    def find(self, parts: dict[str, str]) -> Path | None:
        """The finished build from `parts`, or None."""
        lacking = toolchain.find_cxx() is None or ("CUDA" in parts and "nvcc" not in parts)
        return cache.find(self.name, self.file_name, parts, located=self._inputs().located, lacking=lacking)

    def _cuda_archs(self) -> str | None:
        """What the CUDA sources are compiled for, or None where they stay out."""
        if self.cuda is False or not any(map(_is_cuda, self._all_sources())):
            return None
        archs = toolchain.cuda_architectures(self.archs)
        if self.cuda and not archs:
            raise ToolchainError(f"{self.name} asks for CUDA (cuda=True), and {toolchain.why_no_cuda()}")
        return archs

    def _sources(self, archs: str | None) -> list[Path]:
        return [source for source in self._all_sources() if archs or not _is_cuda(source)]

    def _all_sources(self) -> list[Path]:
        return [*self.sources, *(self.archive.sources if self.archive else ())]

    def _read(self, folder: Path) -> set[Path]:
        """Files of the project that the build in `folder` has read: by the key, and by what compilers wrote down."""
        inputs = self._inputs()
        # ninja has read it from them (``-MD``): indented, below each object. What lies here was made from the rest.
        ninja = toolchain.ninja_dir() / "ninja"
        listed = subprocess.run([ninja, "-C", folder, "-t", "deps"], capture_output=True, check=True)
        found = {folder / os.fsdecode(line.strip()) for line in listed.stdout.splitlines() if line.startswith(b"    ")}
        not_ours = toolchain.folders()
        found = {path for path in found if path.is_file() and inputs.is_ours(path, not_ours) and path.parent != folder}
        return found | set(inputs.files())

    def _others(self, read: Iterable[Path]) -> dict[str, Path]:
        """What of `read` the key doesn't know, by its place."""
        inputs = self._inputs()
        return {inputs.place(path): path for path in set(read) - set(inputs.files())}

    def _build_in(self, folder: Path, parts: dict[str, str], archives: list[Path]) -> Path:
        archs = self._cuda_archs()
        if archs and toolchain.find_nvcc() is None:
            raise ToolchainError(
                f"{self.name} has CUDA sources and no nvcc was found: install the CUDA toolkit, set CUDA_HOME to it, "
                "or hide the GPU (CUDA_VISIBLE_DEVICES='') for a build for the CPU alone"
            )
        sources = [source for source in self._sources(archs) if source in self.sources]
        if not sources:
            raise ToolchainError(
                f"{self.name} has only CUDA sources, and {toolchain.why_no_cuda()}: "
                f"set {settings.CUDA_ARCH_LIST.name}, or add a C++ source with kernels for the CPU"
            )
        cxx = toolchain.compiler(for_cuda=bool(archs))
        ninja, jobs = toolchain.ninja_dir(), toolchain.jobs()
        if archs:
            check_architectures(archs, [*CUDA_CFLAGS, *self.cuda_cflags])
        if settings.CUDA_ARCH_LIST.value() and any(map(_is_cuda, self.sources)) and not archs:
            progress.say(f"{settings.CUDA_ARCH_LIST.name} is set and ignored: {toolchain.why_no_cuda()}")
        cache.start(folder, parts)
        units = _join(sources, folder) if self.kind == "archive" else sources
        log = folder / cache.LOG
        try:
            last_seconds = cache.last_seconds(self.name, self.file_name)
            with progress.building(self.file_name, sources, len(units), folder, str(cxx), archs, last_seconds):
                return self._compile(folder, units, archives, cxx, ninja, jobs, archs)
        except (RuntimeError, UnicodeDecodeError) as error:
            # torch reads what compilers print as UTF-8, and a source may not be.
            output = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
            with cache.errors_named():
                log.write_text(output)
            raise CompileError(_describe_failure(self.file_name, output, log), log) from None
        except BaseException:
            # An interrupt ends ninja; the compilers, in process groups of their own, are left to us.
            cache.end_processes_in(folder)
            raise

    def _compile(
        self,
        folder: Path,
        sources: list[Path],
        archives: list[Path],
        cxx: toolchain.Compiler,
        ninja: Path,
        jobs: int,
        archs: str | None,
    ) -> Path:
        cpp_extension = _cpp_extension()
        environment = {
            "CXX": cxx.path,
            "CC": settings.CC.value() or cxx.path,  # what nvcc is given as its host compiler
            cache.BUILDING: str(folder),
            "LC_ALL": "C",  # the first error is found by the word for it
            "PATH": f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}",
            "TORCH_CUDA_ARCH_LIST": archs,
            "MAX_JOBS": str(jobs),
        }
        # As a "standalone" torch builds and doesn't load, whatever the kind; what it then leaves out
        # of a library is given here. It remembers names and won't build one twice: each is new.
        flags = [*LDFLAGS, *map(str, archives), *self.ldflags, *toolchain.cpp_runtime_flags(cxx)]
        if self.kind != "program":
            flags += ["-shared", f"-L{toolchain.torch_folder() / 'lib'}", "-ltorch_python"]
        if archs:
            flags += toolchain.cuda_runtime_flags(folder, found_at_start=self.kind == "program")
        with _environment(environment), _cuda_home(cpp_extension):
            built = cpp_extension.load(
                f"{self.file_name}.{time.time_ns()}",
                [str(source) for source in sources],
                extra_cflags=[*CFLAGS, *(["-DIDENTITY_CONV_CUDA"] if archs else []), *self.cflags],
                extra_cuda_cflags=[*CUDA_CFLAGS, *self.cuda_cflags] if archs else None,
                # libgomp stays unlinked: its symbols come with libtorch_cpu, and with them torch's threads.
                extra_ldflags=flags,
                extra_include_paths=[str(include) for include in self._all_include_dirs],
                build_directory=str(folder),
                with_cuda=bool(archs),
                is_python_module=False,
                is_standalone=True,
            )
        if self.kind == "archive":
            archive = folder / self.file_name
            objects = sorted(folder.glob("*.o"))
            subprocess.run([toolchain.archiver(), "rcs", archive, *objects], check=True)
            Path(built).unlink()
            return archive
        return Path(built).rename(folder / self.file_name)


def _join(sources: list[Path], folder: Path) -> list[Path]:
    """Files in `folder` that include `sources`, alike in size, one for each compiler that runs at once."""
    units: list[list[Path]] = [[] for _ in range(min(toolchain.jobs(), len(sources)))]
    for source in sorted(sources, key=lambda source: -source.stat().st_size):
        min(units, key=lambda unit: sum(each.stat().st_size for each in unit)).append(source)
    joined = [folder / f"unit{number}.cpp" for number in range(len(units))]
    for file, unit in zip(joined, units, strict=True):
        file.write_text("".join(f'#include "{source}"\n' for source in unit))
    return joined


def _changed_at(files: Iterable[Path]) -> dict[Path, int]:
    return {path: path.stat().st_ctime_ns for path in files}


def _is_cuda(source: Path) -> bool:
    return source.suffix == ".cu" or source.name.endswith("_cuda.cpp")


def check_architectures(archs: str, cuda_flags: Iterable[str] = ()) -> None:
    """Refuses CUDA architectures that torch's build doesn't know.

    Args:
        cuda_flags: nvcc's flags; where they name architectures, `archs` isn't used.

    Raises:
        ToolchainError: there is one.
    """
    try:
        with _environment({"TORCH_CUDA_ARCH_LIST": archs}):
            # Private in torch; seen in torch 2.11, 2.13 and 2.14.
            _cpp_extension()._get_cuda_arch_flags(list(cuda_flags))
    except ValueError as error:
        raise ToolchainError(
            f"torch can't compile for the CUDA architectures {archs!r} ({error}): "
            f"set {settings.CUDA_ARCH_LIST.name} to others"
        ) from error


def _cpp_extension() -> ModuleType:
    """torch's build. Its note that a CUDA torch sees no GPU says nothing of ours."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension

    return cpp_extension


@contextmanager
def _cuda_home(cpp_extension: Any) -> Iterator[None]:
    """torch takes the folder above nvcc on PATH, whatever is in it; here it takes the one that was found."""
    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = str(toolchain.find_cuda_home() or before)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before


@contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            if value is not None:
                os.environ[name] = value
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# As compilers, linkers and CUDA's tools say it: never in the commands that ninja repeats before.
_FIRST_ERROR = re.compile(
    r"^.*(?:\b(?:error|fatal)\s*:|undefined reference to|cannot find -l|: No space left on device).*$", re.MULTILINE
)


_REQUIRED_FROM = re.compile(r"^(\S+:\d+:\d+):\s+required from here$", re.MULTILINE)


def _describe_failure(file_name: str, output: str, log: Path) -> str:
    first = _FIRST_ERROR.search(output)
    line = first.group().strip() if first else output.strip().split("\n")[-1]
    # An error in a header's template names the author's own line before, as the last of those that led to it.
    if first and (asked := _REQUIRED_FROM.findall(output, 0, first.start())):
        line = f"{line}, required from {asked[-1]}"
    return f"{file_name} doesn't build: {line} (the whole output is in {log})"
