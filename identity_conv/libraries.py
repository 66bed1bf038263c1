"""The operator libraries that a program needs, found at packaging.

This module touches what is private in torch for that; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._library.triton import triton_ops_to_kernels
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from . import cache, gradients, loading, registry, rehearsal, toolchain
from .registry import Registrations
from .toolchain import BuildError

#: Namespaces of operators that torch itself registers.
TORCHS = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "aten", "c10d",
    "coor", "debug_mode_ops", "debugprims", "export", "inductor", "inductor_prims", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "prepacked", "prim", "prims", "profiler", "quantization", "quantized",
    "quantized_decomposed", "rngprims", "sparse", "static_runtime", "symm_mem",
})  # fmt: skip
TORCHS_CLASSES = frozenset({
    "_nnapi", "aten", "backendutils", "c10d", "dist_rpc", "mkldnn", "profiling", "quantized", "rnn", "sparse",
})  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Operators (``ns::name.overload``) and classes (``ns.Class``) that aren't torch's own."""

    operators: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()

    def __or__(self, other: Names) -> Names:
        return Names(self.operators | other.operators, self.classes | other.classes)


@dataclass(frozen=True)
class Library:
    """A library's file and what it registers."""

    path: Path
    sha256: str
    registrations: Registrations
    code: dict[str, Any] = field(default_factory=dict)  # what the file says of itself
    schemas: dict[str, Any] = field(default_factory=dict)


def named(program: ExportedProgram) -> Names:
    """The operators and classes that the program's graph names."""
    operators = {
        node.target.name()
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    objects = (each for each in program.constants.values() if isinstance(each, torch.ScriptObject))
    classes = {each._type().qualified_name().removeprefix("__torch__.torch.classes.") for each in objects}
    return Names(_foreign(operators, "::", TORCHS), _foreign(classes, ".", TORCHS_CLASSES))


def _foreign(names: Iterable[str], separator: str, own: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name.split(separator)[0] not in own)


class Watch(TorchDispatchMode):
    """Notes every operator that the dispatcher sees, those called inside class methods among them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    @property
    def names(self) -> Names:
        """The operators seen that aren't torch's own."""
        return Names(operators=_foreign(self._seen, "::", TORCHS))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if gradients.is_class_call(func):
            with self:  # the method's own calls are seen too
                return gradients.call_class_method(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            self._seen.add(func.name())
        return func(*args, **(kwargs or {}))


def refuse_python_only(names: Names) -> Names:
    """Refuses operators that no package can carry; returns `names` without those that are compiled in.

    Raises:
        ValueError: an operator's kernel exists only in Python.
    """
    # AOTInductor compiles the Triton kernels in a triton_op, and the operators around them.
    left = frozenset(name for name in names.operators if name.split(".")[0] not in triton_ops_to_kernels)
    for operator in sorted(left):
        if _is_defined_in_python(operator):
            raise ValueError(
                f"compile_package: the operator {operator} exists only in Python (torch.library), and a package runs "
                "without it: write it in C++ (identity_conv.Extension) or in Triton (torch.library.triton_op)"
            )
    return Names(left, names.classes)


def _is_defined_in_python(operator: str) -> bool:
    space, _, rest = operator.partition("::")
    names = {f"{space}/{rest}", f"{space}/{rest.split('.')[0]}", operator, operator.split(".")[0]}
    return (
        not names.isdisjoint(torch.library._defs) or torch.library._maybe_get_opdef(operator.split(".")[0]) is not None
    )


def find(names: Names, given: Sequence[Path], runtime: ModuleType) -> list[Library]:
    """The libraries that register `names`, and those given by path, in the order in which they were loaded.

    Raises:
        FileNotFoundError: one that is given isn't there.
        ValueError: nothing is found that registers one of `names`, or a library needs Python.
        BuildError: a library doesn't load.
    """
    found: list[Library] = []
    missing = set(names.operators) | set(names.classes)

    def take(library: Library) -> None:
        registered = {*library.registrations.operators, *library.registrations.classes}
        missing.difference_update(registered, (each.split(".")[0] for each in library.registrations.operators))
        if all(library.sha256 != other.sha256 for other in found):
            found.append(library)

    for path in given:
        if not path.is_file():
            raise FileNotFoundError(f"compile_package: the library {path} is not there")
        take(_probed(path.resolve()))
    for loaded in loading.loaded():
        if missing & {*loaded.registrations.operators, *loaded.registrations.classes}:
            take(Library(loaded.path, loaded.digest, loaded.registrations))
    for path in _mapped() if missing else ():
        if not missing:
            break
        data = path.read_bytes()
        if not any(_namespace(name).encode() in data for name in missing):
            continue
        try:
            library = _probed(path)
        except BuildError:
            continue
        if missing & {*library.registrations.operators, *library.registrations.classes}:
            take(library)
    if missing:
        name = min(missing)
        what = f"operator {name}" if "::" in name else f"class {name.replace('.', '::', 1)}"
        raise ValueError(
            f"compile_package: no library was found that registers the {what}, which the program needs: "
            "pass its path in libraries="
        )
    for library in found:
        library.code.update(json.loads(runtime.describe_code(str(library.path))))
        library.schemas.update(_schemas(library.registrations, runtime))
        _refuse_python(library)
    return found


def _namespace(name: str) -> str:
    return name.replace("::", ".").split(".")[0]


def _probed(path: Path) -> Library:
    digest = cache.file_digest(path)
    return Library(path, digest, rehearsal.rehearse(path, digest, ()).registrations)


def _mapped() -> list[Path]:
    """Shared libraries in this process that neither torch, Python nor the system brought, in their order."""
    not_theirs = (
        toolchain.torch_folder(),
        Path(sys.base_prefix) / "lib",
        Path("/usr/lib"),
        Path("/lib"),
        Path("/lib64"),
    )
    with open("/proc/self/maps") as maps:
        named = [*torch.ops.loaded_libraries, *(line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line)]
    paths = dict.fromkeys(Path(name) for name in named if name.startswith("/"))
    return [path for path in paths if path.is_file() and not any(path.is_relative_to(place) for place in not_theirs)]


def _schemas(registered: Registrations, runtime: ModuleType) -> dict[str, dict[str, Any]]:
    classes = sorted(name.replace(".", "::", 1) for name in registered.classes)
    operators = {name: runtime.operator_schema(name) for name in sorted(registered.operators)}
    return {
        "operators": {name: schema for name, schema in operators.items() if schema},
        "classes": {name: runtime.class_schemas(name) for name in classes},
    }


def _is_pythons(needed: str) -> bool:
    return needed.startswith(("libtorch_python.", "libpython"))


def _refuse_python(library: Library) -> None:
    """Refuses a library with a symbol that none of its libraries but Python's own defines."""
    if not any(map(_is_pythons, library.code["needed"])) and not any(
        "Py" in each for each in library.code["undefined"]
    ):
        return
    # Of a handle, the symbols of the library and of those that it needs.
    others = [each for each in library.code["needed"] if not _is_pythons(each)]
    handles = [ctypes.CDLL(str(toolchain.torch_folder() / "lib" / "libtorch.so"))]
    for name in others:
        with suppress(OSError):
            handles.append(ctypes.CDLL(name))
    for symbol in library.code["undefined"]:
        if not any(hasattr(handle, symbol) for handle in handles):
            raise ValueError(
                f"compile_package: the library {library.path.name} needs Python (its symbol {symbol}), and a package "
                "runs without it: build it with identity_conv.Extension, or without torch/extension.h"
            )


def carried(library: Library) -> bytes:
    """The library's bytes as the package carries them: without the need of Python's libraries.

    ``torch.utils.cpp_extension`` names libtorch_python for every library, used or not.
    """
    data = bytearray(library.path.read_bytes())
    if any(map(_is_pythons, library.code["needed"])):
        _drop_needed(data)
    return bytes(data)


def _drop_needed(data: bytearray) -> None:
    """Takes Python's libraries out of the dynamic section of a 64-bit little-endian ELF file."""
    (table,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    begin, length = next((offset, filesz) for kind, _, offset, _, _, filesz in segments if kind == 2)  # PT_DYNAMIC
    entries = [struct.unpack_from("<qQ", data, begin + at) for at in range(0, length, 16)]
    address = next(value for tag, value in entries if tag == 5)  # DT_STRTAB
    strings = next(
        offset + address - start
        for kind, _, offset, start, _, filesz in segments
        if kind == 1 and start <= address < start + filesz  # PT_LOAD
    )

    def is_dropped(entry: tuple[int, int]) -> bool:
        tag, value = entry
        name = data[strings + value : data.index(0, strings + value)] if tag == 1 else b""  # DT_NEEDED
        return _is_pythons(name.decode(errors="replace"))

    kept = [entry for entry in entries if not is_dropped(entry)]
    kept += [(0, 0)] * (len(entries) - len(kept))
    for index, entry in enumerate(kept):
        struct.pack_into("<qQ", data, begin + 16 * index, *entry)


def describe(library: Library, record: str, data: bytes) -> dict[str, Any]:
    """The library's entry in the manifest (``src/runtime/libraries.h``)."""
    registered = library.registrations
    owned = registered.owned or {space for space in registered.namespaces if registry.is_owned(space)}
    return {
        "record": record,
        "sha256": hashlib.sha256(data).hexdigest(),
        "namespaces": sorted(registered.namespaces),
        "owned": sorted(owned),
        **library.schemas,
        "cuda": library.code["cuda"],
        "needed": [name for name in library.code["needed"] if not _is_pythons(name)],
    }
