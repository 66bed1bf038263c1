"""An author's operator library: built from its sources, loaded once."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import cache, display
from .building import NotBuilt, Target
from .wording import counted

#: What a source's name may end in.
SUFFIXES = (".cpp", ".cc", ".cxx", ".cu")


class Extension:
    """A C++/CUDA library of PyTorch operators and classes, built once and loaded once.

    Sources that end in ``.cu`` or ``_cuda.cpp`` join where CUDA does (a GPU is visible, or
    ``TORCH_CUDA_ARCH_LIST`` is set, with a CUDA torch) and stay out elsewhere, so one list serves
    both builds without an ``#ifdef``.

    Args:
        name: the library is ``lib<name>.so``.
        sources: C++ and CUDA files; two C++ files, or two CUDA files, may not share a stem.
        include_dirs: folders for ``#include``, beside each source's own and
            ``identity_conv``'s headers.
        cflags, cuda_cflags, ldflags: more flags for the C++ compiler, nvcc and the linker.
        cuda: True or False decides whether the CUDA sources join; None leaves it to the machine.
        archs: CUDA architectures to compile for, such as ``("9.0",)``; else ``TORCH_CUDA_ARCH_LIST``, else
            the GPUs of this machine.

    Raises:
        FileNotFoundError: a source isn't there.
        ValueError: `name` is no identifier, there are no sources, or two have one stem.

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
        archs: Iterable[str] | None = None,
    ):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,199}", name):
            raise ValueError(f"Extension: name must be an identifier of up to 200 letters, got {name!r}")
        if isinstance(sources, str | os.PathLike) or not sources:
            raise ValueError(f"Extension {name!r}: sources must be a list of files, got {sources!r}")
        flags: dict[str, list[str]] = {}
        for option, given in (("cflags", cflags), ("cuda_cflags", cuda_cflags), ("ldflags", ldflags)):
            flags[option] = [given] if isinstance(given, str) else list(given)
            if isinstance(given, str) or not all(isinstance(flag, str) for flag in flags[option]):
                raise ValueError(f"Extension {name!r}: {option} must be a list of strings, got {flags[option]!r}")
        files = [Path(source).absolute() for source in sources]
        objects = [(file.stem, file.suffix == ".cu") for file in files]
        for file, named in zip(files, objects, strict=True):
            if not file.is_file():
                raise FileNotFoundError(f"Extension {name!r}: source {file} is not there")
            if file.suffix not in SUFFIXES:
                raise ValueError(f"Extension {name!r}: a source ends in {', '.join(SUFFIXES)}, got {file.name!r}")
            if any(letter in "$:\n" for letter in str(file)) or len(file.name.split()) > 1:
                raise ValueError(
                    f"Extension {name!r}: ninja can't read a path with $, a colon or a new line, or a source with a "
                    f"space in its name, got {str(file)!r}"
                )
            if objects.count(named) > 1:
                raise ValueError(
                    f"Extension {name!r}: two sources have the stem {file.stem!r}, by which objects are named"
                )
        self._target = Target(
            "library",
            name,
            files,
            include_dirs=[Path(folder).absolute() for folder in include_dirs],
            cflags=flags["cflags"],
            cuda_cflags=flags["cuda_cflags"],
            ldflags=flags["ldflags"],
            cuda=cuda,
            archs=";".join([archs] if isinstance(archs, str) else archs) if archs else None,
        )
        self._library: Path | None = None
        self._asked = 0.0

    @classmethod
    def _of(cls, target: Target) -> Extension:
        """The extension of a library target that is described already."""
        extension = cls.__new__(cls)
        extension._target = target
        extension._library = None
        extension._asked = 0.0
        return extension

    def __repr__(self) -> str:
        return f"Extension({self.name!r}, {[display.place(source) for source in self._target.sources]})"

    def _repr_html_(self) -> str:
        sources = ", ".join(display.place(source) for source in self._target.sources)
        if self._library is None:
            facts = [("sources", sources), ("library", "not loaded: load() builds it if need be")]
            return display.page(display.heading(f"Extension {self.name}"), display.table((), facts))
        from . import loading, registry

        facts = [("sources", sources), ("library", self._library.name), ("build", self._origin(self._library))]
        parts = [display.heading(f"Extension {self.name}"), display.table((), facts)]
        found = loading.registrations(self._library)
        if found is None:
            unknown = "Another build has taken its place, or something else loaded it: what it registers isn't known."
            return display.page(*parts, display.sentence(unknown))
        if found.operators:
            rows = [(schema, ", ".join(registry.kernels_of(name))) for name, schema in found.operators.items()]
            parts.append(display.table(("operator", "kernels"), rows))
        for name in sorted(found.classes):
            parts.append(display.table((f"class {name}",), [(method,) for method in registry.methods_of(name)]))
        return display.page(*parts)

    def _origin(self, library: Path) -> str:
        """Where the loaded library comes from, in a line."""
        made = cache.origin(library)
        if made is None:
            return "not of the cache"
        took = "compiled" if made.seconds is None else f"compiled in {made.seconds:.1f} s"
        if made.made >= self._asked:
            when = f"{took} by this load()"
        else:
            when = f"found in the cache, {took} on {time.strftime('%Y-%m-%d', time.localtime(made.made))}"
        return f"{made.key}, for CPU{f' and CUDA {made.archs}' if made.archs else ''}: {when}"

    @property
    def name(self) -> str:
        """The library is ``lib<name>.so``."""
        return self._target.name

    @property
    def library(self) -> Path | None:
        """The file that :meth:`load` loaded, or None before."""
        return self._library

    @property
    def ops(self) -> Any:
        """The operators of the loaded library: ``torch.ops.<its namespace>``; loads it if need be.

        Raises:
            AttributeError: it registers in no namespace, or in several.
        """
        import torch

        return getattr(torch.ops, self._namespace())

    @property
    def classes(self) -> Any:
        """The classes of the loaded library: ``torch.classes.<its namespace>``; loads it if need be.

        Raises:
            AttributeError: it registers in no namespace, or in several.
        """
        import torch

        return getattr(torch.classes, self._namespace())

    def output_like(self, operator: str, argument: str) -> None:
        """Says that an operator's output is like one of its arguments: sizes, strides, dtype and device.

        With that it can be exported and compiled; loads the library if need be. In C++,
        ``<identity_conv/output_like.h>`` does the same.

        Args:
            operator: its name in the library's namespace.
            argument: the name of a tensor among its arguments.

        Raises:
            ValueError: it has no tensor argument of that name, or doesn't return one tensor.
            AttributeError: the library registers in no namespace, or in several, or has no such operator.

        Example::

            ext.output_like("scale", "x")
        """
        from . import fakes

        fakes.output_like(f"{self._namespace()}::{operator}", argument)

    def _namespace(self) -> str:
        from . import loading

        library = self._library or self._load()
        found = sorted(loading.namespaces(library))
        if len(found) != 1:
            raise AttributeError(
                f"Extension {self.name!r} registers in {counted(len(found), 'namespace')} "
                f"({', '.join(found) or 'none'}): name one, torch.ops.<namespace>"
            )
        return found[0]

    @property
    def key(self) -> str:
        """The name of the build among all builds of this extension: a digest of all that it depends on."""
        return cache.digest(self._target.parts())

    def explain(self) -> str:
        """Says whether there is a finished build, and else what changed since the latest one."""
        file, changes = self._state()
        if file:
            return f"{self.name}: built, {file}"
        return "\n".join([f"{self.name}: will be built, because", *(f"  {change}" for change in changes)])

    def _state(self) -> tuple[Path | None, list[str]]:
        """The finished build, or None and what changed since the latest one."""
        parts = self._target.parts()
        if file := self._target.find(parts):
            return file, []
        return None, cache.differences(self.name, parts, self._target._inputs().located)

    def build(self) -> Path:
        """Builds what isn't built yet and returns the file.

        Raises:
            ToolchainError: the machine lacks a compiler, ninja or nvcc, or has one that is too old.
            CompileError: a source doesn't compile.
            BuildError: the cache, the prefix or this torch can't be used.
        """
        return self._target.build()

    def load(self) -> Extension:
        """Builds if need be, and loads the library into this process, once.

        Sources that have changed since are built and take the place of the loaded library, unless it has
        a class or C++ autograd nodes: those can't leave a process.

        Raises:
            what :meth:`build` raises; BuildError: the library doesn't load, registers what this process has registered
                already, has a kernel of a name that its own namespace has no schema for, or one that says of its
                operator what it isn't, or registers a name that ``torch.ops`` or ``torch.classes`` can't give.
        """
        with suppress(NotBuilt):  # who only looks at a module goes on to where it needs the library
            self._load()
        return self

    def _load(self) -> Path:
        from . import loading

        self._asked = time.time()
        self._library = loading.load(self.build(), trusted=self._target.bundled)
        return self._library
