"""From sources to a loaded library: key → folder → lock → build → load, each once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from . import fakes, prefix, settings, toolchain
from .progress import building
from .toolchain import BuildError, ToolchainError

Kind = Literal["library", "program", "module"]

#: Raised with each change to what a folder of the cache holds.
CACHE_FORMAT = "1"

STAMP = "finished.json"
COMPILER_PARTS = ("C++ compiler", "nvcc", "nvcc's host compiler")
LOCK_TIMEOUT_S = 1800
LOCK_NOTE_AFTER_S = 5

CFLAGS = ("-O3", "-fopenmp", "-fvisibility=hidden", "-fno-gnu-unique", "-ffunction-sections", "-fdata-sections")
# --as-needed, before any library, drops the ones torch names for all and we don't use: libtorch_python.
LDFLAGS = ("-Wl,--as-needed", "-Wl,--gc-sections")

# torch's build reads the environment of the process and remembers names: one at a time.
_build_lock = threading.Lock()
_loaded: dict[str, Path] = {}


class CompileError(BuildError):
    """A source doesn't compile or link. `log` is the full output of the build."""

    def __init__(self, message: str, log: Path):
        super().__init__(message)
        self.log = log


class Extension:
    """A C++/CUDA library of PyTorch operators and classes, built once and loaded once.

    Sources that end in ``.cu`` or ``_cuda.cpp`` join where CUDA does (a GPU is visible, or
    ``TORCH_CUDA_ARCH_LIST`` is set, with a CUDA torch) and stay out elsewhere, so one list serves
    both builds without an ``#ifdef``.

    Args:
        name: the library is ``lib<name>.so``.
        sources: C++ and CUDA files; stems must differ.
        include_dirs: folders for ``#include``, beside each source's own and
            ``identity_conv``'s headers.
        cflags, cuda_cflags, ldflags: more flags for the C++ compiler, nvcc and the linker.
        cuda: True or False decides whether the CUDA sources join; None leaves it to the machine.

    Raises:
        FileNotFoundError: a source isn't there.

    Example::

        ext = Extension("my_kernels", ["my_kernels.cpp", "my_kernels.cu"]).load()
        torch.ops.my_kernels.scale(x, 2.0)
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str | os.PathLike[str]],
        *,
        include_dirs: Iterable[str | os.PathLike[str]] = (),
        cflags: Iterable[str] = (),
        cuda_cflags: Iterable[str] = (),
        ldflags: Iterable[str] = (),
        cuda: bool | None = None,
    ):
        self._init("library", name, sources, include_dirs, cflags, cuda_cflags, ldflags, cuda)

    def _init(self, kind: Kind, name, sources, include_dirs, cflags, cuda_cflags, ldflags, cuda) -> None:
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise ValueError(f"Extension: name must be an identifier, got {name!r}")
        self.name = name
        self.kind = kind
        self._given = [Path(source).absolute() for source in sources]
        for source in self._given:
            if not source.is_file():
                raise FileNotFoundError(f"Extension {name!r}: source {source} is not there")
        self._include_dirs = [Path(folder).absolute() for folder in include_dirs]
        self._include_dirs.append(settings.source_dir() / "include")
        self._cflags = [*CFLAGS, *cflags]
        self._cuda_cflags = ["-O3", *cuda_cflags]
        self._ldflags = [*LDFLAGS, *ldflags]
        self._cuda = cuda

    @classmethod
    def _of_kind(cls, kind: Kind, name: str, sources, *, cflags=(), ldflags=()) -> Extension:
        """A program or a Python module instead of a library, on the same road."""
        extension = cls.__new__(cls)
        extension._init(kind, name, sources, (), cflags, (), ldflags, False)
        return extension

    def __repr__(self) -> str:
        return f"Extension({self.name!r}, {[str(source) for source in self._given]})"

    @property
    def file_name(self) -> str:
        """The name of what the build makes."""
        return {
            "library": f"lib{self.name}.so",
            "module": f"{self.name}.so",
            "program": self.name.replace("_", "-"),
        }[self.kind]

    @property
    def library(self) -> Path | None:
        """The file that this process loaded, or None."""
        return _loaded.get(self.file_name)

    @property
    def key(self) -> str:
        """The name of the build among all builds of this extension: a digest of all that it depends on."""
        return _digest(self._parts())

    def build(self) -> Path:
        """Builds what isn't built yet and returns the file.

        Raises:
            ToolchainError: the machine lacks a compiler, ninja or nvcc, or has one that is too old.
            CompileError: a source doesn't compile.
            BuildError: the cache, the prefix or this torch can't be used.
        """
        toolchain.check_torch()
        if (ready := self._find_prefixed()) or (ready := self._find_finished()):
            return ready
        folder = settings.cache_dir() / self.name / self.key
        try:
            with _build_lock, _folder_lock(folder):
                return self._find_finished() or self._build_in(folder)
        except OSError as error:
            raise BuildError(
                f"the build cache {settings.cache_dir()} can't be written ({error.strerror}): "
                f"make it writable, or set {settings.CACHE_DIR.name} to a folder of yours"
            ) from error

    def load(self) -> Extension:
        """Builds if need be, and loads the library into this process, once.

        Raises:
            what :meth:`build` raises; BuildError: the library doesn't load.
        """
        if self.file_name not in _loaded:
            path = self.build()
            before = fakes.class_names()
            _load_library(path)
            for name in sorted(fakes.class_names() - before):
                fakes.derive(name)
            fakes.keep_gradients_of_class_calls()
        return self

    # What the build depends on.

    def _cuda_archs(self) -> str | None:
        if self._cuda is False or not any(map(_is_cuda, self._given)):
            return None
        return toolchain.cuda_architectures()

    def _sources(self, archs: str | None) -> list[Path]:
        return [source for source in self._given if archs or not _is_cuda(source)]

    def _parts(self) -> dict[str, str]:
        """What the library is made from, each part by name: the key is their digest."""
        archs = self._cuda_archs()
        parts = {
            "cache format": CACHE_FORMAT,
            "name": self.file_name,
            **toolchain.torch_facts(),
            "platform": toolchain.platform(),
            "flags": " ".join([*self._cflags, *self._ldflags]),
        }
        if self.kind == "module":
            parts["Python"] = sys.implementation.cache_tag
        if self.kind == "program":
            parts["torch folder"] = str(toolchain.torch_folder())  # where it finds libtorch by itself
        if archs:
            import torch

            parts["CUDA"] = str(torch.version.cuda)
            parts["CUDA architectures"] = archs
            parts["CUDA flags"] = " ".join(self._cuda_cflags)
        for file, digest in _contents(self._sources(archs), self._include_dirs):
            # Two folders may each have a header of that name.
            parts[f"source {file}"] = f"{parts.get(f'source {file}', '')} {digest}".strip()
        if cxx := toolchain.find_cxx():
            parts["C++ compiler"] = toolchain.compiler_identity(cxx)
        if archs and (nvcc := toolchain.find_nvcc()):
            host = toolchain.find_cc() or cxx
            parts["nvcc"] = f"{os.path.realpath(nvcc)} {toolchain.nvcc_version(nvcc)}"
            parts["nvcc's host compiler"] = toolchain.compiler_identity(host) if host else "none"
        return parts

    # Where a finished build is.

    def _find_prefixed(self) -> Path | None:
        folder = settings.prefix()
        if folder is None:
            return None
        found = prefix.find(folder, self.file_name, self.kind)
        if found is None and self._given[0].is_relative_to(settings.source_dir()):
            raise BuildError(
                f"{settings.PREFIX.name}={folder} has no {self.file_name}: lay it down with "
                f"`identity-conv build --prefix {folder}`, or unset {settings.PREFIX.name}"
            )
        return found

    def _find_finished(self) -> Path | None:
        parts = self._parts()
        home = settings.cache_dir() / self.name
        folders = [home / _digest(parts)]
        lacking = toolchain.find_cxx() is None or ("CUDA" in parts and "nvcc" not in parts)
        if lacking and home.is_dir():
            # Without a compiler nothing could be built anyway: any build serves that agrees in the rest.
            folders += sorted(folder for folder in home.iterdir() if _agree(folder / "key.json", parts))
        built = (folder / self.file_name for folder in folders if (folder / STAMP).is_file())
        return next((file for file in built if file.is_file()), None)

    # The build.

    def _build_in(self, folder: Path) -> Path:
        parts = self._parts()
        archs = self._cuda_archs()
        cxx = toolchain.compiler()
        if archs and toolchain.find_nvcc() is None:
            raise ToolchainError(
                f"Extension {self.name!r} has CUDA sources and no nvcc was found: install the CUDA toolkit, set "
                "CUDA_HOME to it, or hide the GPU (CUDA_VISIBLE_DEVICES='') for a build for the CPU alone"
            )
        _start_afresh(folder)
        (folder / "key.json").write_text(json.dumps(parts, indent=1))
        sources = self._sources(archs)
        log = folder / "build.log"
        try:
            with building(self.file_name, sources, folder, str(cxx), archs):
                self._compile(folder, sources, cxx, archs)
        except RuntimeError as error:
            log.write_text(str(error))
            raise CompileError(_describe_failure(self.file_name, str(error), log), log) from None
        except ValueError as error:
            if not archs:
                raise
            raise ToolchainError(
                f"torch can't compile for the CUDA architectures {archs!r} ({error}): "
                f"set {settings.CUDA_ARCH_LIST.name} to others"
            ) from error
        (folder / STAMP).write_text(json.dumps({"library": self.file_name}))
        return folder / self.file_name

    def _compile(self, folder: Path, sources: list[Path], cxx: toolchain.Compiler, archs: str | None) -> None:
        from torch.utils import cpp_extension

        environment = {
            "CXX": cxx.path,
            "CC": settings.CC.value() or cxx.path,  # what nvcc is given as its host compiler
            "LC_ALL": "C",  # the first error is found by the word for it
            "PATH": f"{toolchain.ninja_dir()}{os.pathsep}{os.environ.get('PATH', '')}",
            "TORCH_CUDA_ARCH_LIST": archs,
            "MAX_JOBS": settings.MAX_JOBS.value() or str(len(os.sched_getaffinity(0))),
        }
        # As a "standalone" torch builds and doesn't load, whatever the kind; what it then leaves out
        # of a library is given here. It remembers names and won't build one twice: each is new.
        flags = [*self._ldflags, *toolchain.cpp_runtime_flags(cxx)]
        if self.kind != "program":
            flags += ["-shared", f"-L{toolchain.torch_folder() / 'lib'}", "-ltorch_python"]
        if home := toolchain.find_cuda_home():
            cpp_extension.CUDA_HOME = str(home)  # torch takes the folder above nvcc on PATH, whatever is in it
        with _environment(environment):
            built = cpp_extension.load(
                f"{self.file_name}.{time.time_ns()}",
                [str(source) for source in sources],
                extra_cflags=self._cflags,
                extra_cuda_cflags=self._cuda_cflags if archs else None,
                # libgomp stays unlinked: its symbols come with libtorch_cpu, and with them torch's threads.
                extra_ldflags=flags,
                extra_include_paths=[str(include) for include in self._include_dirs],
                build_directory=str(folder),
                with_cuda=bool(archs),
                is_python_module=False,
                is_standalone=True,
            )
        os.rename(built, folder / self.file_name)


def _is_cuda(source: Path) -> bool:
    return source.suffix == ".cu" or source.stem.endswith("_cuda")


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _agree(record: Path, parts: dict[str, str]) -> bool:
    try:
        built = json.loads(record.read_text())
    except (OSError, ValueError):
        return False
    return _without_compilers(built) == _without_compilers(parts)


def _without_compilers(parts: dict[str, str]) -> dict[str, str]:
    return {name: part for name, part in parts.items() if name not in COMPILER_PARTS}


_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def _contents(sources: Iterable[Path], include_dirs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Each source and each header that it reaches in the project's folders, with its digest.

    Files are named from the folder they were found in, so that a moved checkout stays the same.
    """
    waiting = [(source.name, source) for source in sources]
    seen: set[Path] = set()
    while waiting:
        name, path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_bytes()
        yield name, hashlib.sha256(text).hexdigest()
        for quoted, angled in _INCLUDE.findall(text):
            include = os.fsdecode(quoted or angled)
            folders = [path.parent, *include_dirs] if quoted else include_dirs
            for folder in folders:
                if (candidate := folder / include).is_file():
                    waiting.append((include, candidate))
                    break


def _start_afresh(folder: Path) -> None:
    """An empty folder in place of one that an interrupted build left.

    Compilers of a killed build may still run and write into their working folder by relative path,
    so the old folder is moved away whole and never used again.
    """
    if folder.exists():
        away = folder.with_name(f"{folder.name}.abandoned-{os.getpid()}-{time.time_ns()}")
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    settings.make_private(folder)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """The lock among processes on one build folder: the system drops it with its holder."""
    from filelock import FileLock, Timeout

    settings.make_private(folder.parent)
    lock = FileLock(f"{folder}.lock")
    holder = Path(f"{folder}.holder")
    try:
        lock.acquire(timeout=LOCK_NOTE_AFTER_S)
    except Timeout:
        who = holder.read_text() if holder.exists() else "another process"
        print(f"identity_conv: waiting for {who}, which builds {folder.name}", file=sys.stderr)
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout:
            raise BuildError(f"{who} has held the lock {lock.lock_file} for {LOCK_TIMEOUT_S} s") from None
    try:
        holder.write_text(f"process {os.getpid()} on {os.uname().nodename}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


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
_FIRST_ERROR = re.compile(r"^.*(?:\b(?:error|fatal)\s*:|undefined reference to|cannot find -l).*$", re.MULTILINE)


def _describe_failure(file_name: str, output: str, log: Path) -> str:
    first = _FIRST_ERROR.search(output)
    line = first.group().strip() if first else output.strip().split("\n")[-1]
    return f"{file_name} doesn't build: {line} (the whole output is in {log})"


def _load_library(path: Path) -> None:
    import torch

    if path.name in _loaded:
        return
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # torch says which library, and the linker behind it why.
        raise BuildError(f"{path} doesn't load: {error.__cause__ or error}") from error
    _loaded[path.name] = path
