"""Libraries of operators in this process: each content once, and never two of one registration.

torch ends the process where a namespace, an operator or a class is registered a second time; here that
is found in the file before it is mapped. This module touches what is private in torch for that: seen in
torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from . import fakes
from .toolchain import BuildError


@dataclass(frozen=True)
class Image:
    """What a library's file says that it will register.

    Read from the names that torch's macros give their functions, and from its strings; a stripped
    library says nothing.
    """

    path: Path
    data: bytes
    digest: str

    @classmethod
    def read(cls, path: Path) -> Image:
        data = path.read_bytes()
        return cls(path, data, hashlib.sha256(data).hexdigest())

    def _initializers(self, macro: bytes) -> set[str]:
        return {name.decode() for name in re.findall(macro + rb"_init_(\w+?)RN5torch7LibraryE", self.data)}

    @property
    def owned(self) -> set[str]:
        """Namespaces of TORCH_LIBRARY: one library in a process may have each."""
        return self._initializers(b"TORCH_LIBRARY")

    @property
    def extended(self) -> set[str]:
        """Namespaces of TORCH_LIBRARY_FRAGMENT, whose functions end in a number."""
        return {re.sub(r"_\d+$", "", name) for name in self._initializers(b"TORCH_LIBRARY_FRAGMENT")}

    @property
    def implemented(self) -> set[str]:
        """Namespaces of TORCH_LIBRARY_IMPL, with the dispatch key behind."""
        return self._initializers(b"TORCH_LIBRARY_IMPL")

    @property
    def has_autograd_nodes(self) -> bool:
        return b"_ZTIN5torch8autograd4NodeE" in self.data

    def defines(self, namespace: str, operator: str) -> bool:
        """Whether the library's strings hold the operator's schema, or its bare name to define it by."""
        name = operator.encode()
        if b"\0" + name + b"(" in self.data:
            return True
        only_implements = any(each.startswith(f"{namespace}_") for each in self.implemented)
        return not only_implements and b"\0" + name + b"\0" in self.data

    def names_class(self, name: str) -> bool:
        return b"torch6class_" in self.data and b"\0" + name.encode() + b"\0" in self.data


@dataclass
class _Loaded:
    image: Image
    handle: int
    operators: set[str]
    classes: set[str]


_lock = threading.RLock()
_loaded: list[_Loaded] = []


def load(path: Path) -> Path:
    """Loads the operator library at `path`, or finds its content loaded, and returns the loaded file.

    A library whose registrations another one of ours holds takes its place where that can be unloaded.

    Raises:
        BuildError: it doesn't load, or registers again what this process has registered.
    """
    with _lock:
        image = Image.read(path)
        for known in _loaded:
            if known.image.digest == image.digest:
                return known.image.path
        for rival in [known for known in _loaded if _conflicts(image, known)]:
            _unload(rival, image)
        _refuse_registered(image)
        classes, operators = fakes.class_names(), _operators()
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} doesn't load: {error}") from error
        torch.ops.loaded_libraries.add(str(path))
        new_classes = fakes.class_names() - classes
        _loaded.append(_Loaded(image, library._handle, _operators() - operators, new_classes))
        for name in sorted(new_classes):
            fakes.derive(name)
        fakes.keep_gradients_of_class_calls()
        return path


def namespaces(path: Path) -> set[str]:
    """The namespaces that the loaded library at `path` has operators or classes in."""
    for known in _loaded:
        if known.image.path == path:
            return {name.split("::")[0] for name in known.operators} | {name.split(".")[0] for name in known.classes}
    return set()


def _operators() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


def _is_defined(operator: str) -> bool:
    """Whether the operator has a schema: a fake in Python may outlive the library that defined it."""
    name, _, overload = operator.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def _bare(operator: str) -> str:
    return operator.split("::")[1].split(".")[0]


def _conflicts(image: Image, known: _Loaded) -> bool:
    if image.owned & known.image.owned:
        return True
    touched = image.owned | image.extended
    return any(
        operator.split("::")[0] in touched and image.defines(operator.split("::")[0], _bare(operator))
        for operator in known.operators
    ) or any(name.split(".")[0] in touched and image.names_class(name.split(".")[1]) for name in known.classes)


def _unload(rival: _Loaded, image: Image) -> None:
    """Takes a library and its operators out of the process, to make room for `image`."""
    keeps = "a custom class" if rival.classes else "C++ autograd nodes" if rival.image.has_autograd_nodes else None
    if keeps:
        raise BuildError(
            f"{image.path.name} has changed and can't take the place of the loaded one, which has {keeps}: "
            "restart Python (in a notebook, the kernel)"
        )
    _ctypes.dlclose(rival.handle)
    if any(map(_is_defined, rival.operators)) or _is_mapped(rival.image.path):
        raise BuildError(
            f"{rival.image.path} can't be unloaded to load {image.path}: restart Python (in a notebook, the kernel)"
        )
    _loaded.remove(rival)
    torch.ops.loaded_libraries.discard(str(rival.image.path))
    # torch.ops remembers operators by name: the next look finds the new ones.
    for namespace in {operator.split("::")[0] for operator in rival.operators}:
        torch.ops.__dict__.pop(namespace, None)


def _refuse_registered(image: Image) -> None:
    touched = image.owned | image.extended
    for operator in sorted(_operators()):
        namespace = operator.split("::")[0]
        if namespace in touched and image.defines(namespace, _bare(operator)) and _is_defined(operator):
            raise BuildError(
                f"{image.path} registers the operator {operator}, which this process has from elsewhere: "
                "give it another name or namespace, or restart Python without the other"
            )
    for name in sorted(fakes.class_names()):
        namespace, bare = name.split(".", 1)
        if namespace in touched and image.names_class(bare):
            raise BuildError(
                f"{image.path} registers the class {namespace}::{bare}, which this process has from elsewhere: "
                "give it another name or namespace, or restart Python without the other"
            )
    in_use = {name.split("::")[0] for name in _operators()} | {name.split(".")[0] for name in fakes.class_names()}
    if doubtful := image.owned & in_use:
        for path in _mapped_libraries():
            for namespace in doubtful & Image.read(path).owned:
                raise BuildError(
                    f"{image.path} registers the namespace {namespace} (TORCH_LIBRARY), which {path} has "
                    "registered in this process: use TORCH_LIBRARY_FRAGMENT, or another namespace"
                )


def _mapped_libraries() -> list[Path]:
    """Shared libraries in this process that could register operators: not torch's, not the system's."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if ".so" in line}
    torchs = str(Path(torch.__file__).parent)
    return sorted(
        Path(file)
        for file in files
        if os.path.isfile(file) and not file.startswith((torchs, "/lib", "/usr/lib")) and "/nvidia/" not in file
    )


def _is_mapped(path: Path) -> bool:
    with open("/proc/self/maps") as maps:
        return any(str(path) in line for line in maps)
