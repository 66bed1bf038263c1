"""The operator libraries that a program needs, found at packaging.

This module touches what is private in torch for that; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._library.triton import triton_ops_to_kernels
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from . import cache, fakes, loading, toolchain
from .toolchain import BuildError

#: Namespaces of operators that torch itself registers.
TORCHS = frozenset(
    ["_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "aten", "c10d", "coor", "debug_mode_ops", "debugprims", "export", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "prepacked", "prim", "prims", "profiler", "quantization", "quantized", "quantized_decomposed", "rngprims", "sparse", "static_runtime", "symm_mem"]
)
TORCHS_CLASSES = frozenset(["_nnapi", "aten", "backendutils", "c10d", "dist_rpc", "mkldnn", "profiling", "quantized", "rnn", "sparse"])


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
    registrations: loading.Registrations


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
    classes = {each._type().qualified_name().removeprefix("__torch__.torch.classes.") for each in objects}  # type: ignore[attr-defined]
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
        if fakes.is_class_call(func):
            with self:  # the method's own calls are seen too
                return fakes.call_class_method(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            self._seen.add(func.name())
        return func(*args, **(kwargs or {}))


def refuse_python_only(names: Names) -> None:
    """Refuses operators that no package can carry.

    Raises:
        ValueError: an operator's kernel exists only in Python.
    """
    for operator in sorted(names.operators):
        if operator.split(".")[0] in triton_ops_to_kernels:
            continue  # AOTInductor compiles the Triton kernels in it
        if _is_defined_in_python(operator):
            raise ValueError(
                f"compile_package: the operator {operator} exists only in Python (torch.library), and a package runs "
                "without it: write it in C++ (identity_conv.Extension), or its kernel in Triton (torch.library.triton_op)"
            )


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
        registered = library.registrations.operators | library.registrations.classes
        missing.difference_update(registered, (each.split(".")[0] for each in library.registrations.operators))
        if all(library.sha256 != other.sha256 for other in found):
            found.append(library)

    for path in given:
        if not path.is_file():
            raise FileNotFoundError(f"compile_package: the library {path} is not there")
        take(_probed(path.resolve()))
    for loaded in loading.loaded():
        if missing & (loaded.registrations.operators | loaded.registrations.classes):
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
        if missing & (library.registrations.operators | library.registrations.classes):
            take(library)
    if missing:
        name = min(missing)
        what = f"operator {name}" if "::" in name else f"class {name.replace('.', '::', 1)}"
        raise ValueError(
            f"compile_package: no library was found that registers the {what}, which the program needs: "
            "pass its path in libraries="
        )
    for library in found:
        _refuse_python(library, json.loads(runtime.describe_code(str(library.path))))
    return found


def _namespace(name: str) -> str:
    return name.replace("::", ".").split(".")[0]


def _probed(path: Path) -> Library:
    digest = cache.file_digest(path)
    return Library(path, digest, loading.Registrations.of(path, digest))


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


def _refuse_python(library: Library, code: dict[str, Any]) -> None:
    if code["python"]:
        raise ValueError(
            f"compile_package: the library {library.path.name} needs Python (its symbol {code['python'][0]}), and a "
            "package runs without it: build it with identity_conv.Extension, or without torch/extension.h"
        )


def describe(library: Library, record: str, runtime: ModuleType) -> dict[str, Any]:
    """The library's entry in the manifest (``src/runtime/libraries.h``)."""
    registered = library.registrations
    spaces = registered.owned or {space for space in registered.namespaces if loading.is_owned(space)}
    code = json.loads(runtime.describe_code(str(library.path)))
    return {
        "record": record,
        "sha256": library.sha256,
        "namespaces": sorted(registered.namespaces),
        "owned": sorted(spaces),
        "operators": {name: runtime.operator_schema(name) for name in sorted(registered.operators)},
        "classes": {
            name.replace(".", "::", 1): runtime.class_schemas(name.replace(".", "::", 1))
            for name in sorted(registered.classes)
        },
        "cuda": code["cuda"],
        "needed": code["needed"],
    }
