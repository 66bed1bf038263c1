"""What a package says of itself: ``extra/identity_conv/manifest.json`` in the archive.

The C++ runtime reads it: ``src/runtime/contract.h`` tells the form of the inputs, by which every call is
checked, ``libraries.h`` and ``sample.h`` those of the records beside it. These lie under ``data/``, since torch's
own loader reads all that is under ``extra/`` as text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)

from . import instruction_sets, toolchain

RECORD = "extra/identity_conv/manifest.json"
DIGEST = "extra/identity_conv/manifest.sha256"
LIBRARIES = "data/identity_conv/lib"
FORMAT = 1


@contextlib.contextmanager
def without_warnings_of_specs() -> Iterator[None]:
    """Keeps back what torch 2.13 says of its own use of an interface that it deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*", category=FutureWarning)
        yield


def describe(program: ExportedProgram) -> dict[str, Any]:
    """The manifest of a package of `program`.

    Raises:
        ValueError: an input is neither a tensor nor a constant, has a size that is no polynomial of the
            dynamic dimensions, or a layout that is neither dense nor of fixed strides; or the export assumed
            of the sizes what can't be checked.
    """
    symbols: dict[str, Any] = {}
    inputs: list[dict[str, Any]] = []
    constants: list[list[Any]] = []
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    user_inputs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    for position, spec in enumerate(user_inputs):
        argument = spec.arg
        if isinstance(argument, ConstantArgument):
            constants.append([position, argument.name, repr(argument.value)])
        elif isinstance(argument, TensorArgument):
            inputs.append(_describe_input(argument.name, values[argument.name], program, symbols))
        else:
            raise ValueError(
                f"compile_package: input {argument.name} is neither a tensor nor a constant of the export "
                f"({type(argument).__name__}): give it as a tensor"
            )
    mutated = _mutated_inputs(program)
    for described in inputs:
        if described["name"] in mutated:
            described["mutated"] = True
    guards = [_describe_guard(guard, values, symbols, program) for guard in _guards(values)]
    numbers = [
        position
        for position, spec in enumerate(_user_outputs(program))
        if isinstance(spec.arg, SymIntArgument | SymFloatArgument | SymBoolArgument)
    ]
    return {
        "format": FORMAT,
        "symbols": symbols,
        "inputs": inputs,
        "constants": constants,
        "guards": guards,
        "number outputs": numbers,
        "outputs": [_describe_output(spec, program) for spec in _user_outputs(program)],
    }


def _describe_output(spec: Any, program: ExportedProgram) -> dict[str, Any]:
    """What people read of an output; nothing is checked by it."""
    argument = spec.arg
    if not isinstance(argument, TensorArgument):
        return {"value": repr(argument.value)} if isinstance(argument, ConstantArgument) else {"name": argument.name}
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == argument.name)
    sizes = [size if isinstance(size, int) else str(size) for size in value.shape]
    return {"name": argument.name, "dtype": str(value.dtype).removeprefix("torch."), "sizes": sizes}


def describe_host(package: Path, configs: Mapping[str, Any]) -> dict[str, Any]:
    """What a host must have for the model, which was compiled under inductor's settings `configs`."""
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        facts = json.loads(archive.read(next(name for name in names if name.endswith("_metadata.json"))))
        kernels = any(name.endswith((".cubin", ".fatbin")) for name in names)
    device = facts["AOTI_DEVICE_KEY"]
    capability = str(facts.get("AOTI_COMPUTE_CAPABILITY") or "")
    return {
        "platform": toolchain.platform(),
        "device": device,
        "instruction sets": instruction_sets.compiled_for(configs, device=device),
        "cuda": [f"sm_{capability.removeprefix('sm_').replace('.', '')}"] if kernels and capability else [],
    }


def describe_torch() -> dict[str, Any]:
    """The torch that compiled the package."""
    return {
        "version": torch.__version__,
        "git": torch.version.git_version,
        "cxx11 abi": torch.compiled_with_cxx11_abi(),
        "cuda": torch.version.cuda,
    }


def _mutated_inputs(program: ExportedProgram) -> set[str]:
    """The inputs that the model writes to; only a program without in-place operators says so itself."""
    calls = (node.target for node in program.graph.nodes if node.op == "call_function")
    if any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in calls):
        with without_warnings_of_specs():
            program = program.run_decompositions({})
    return set(program.graph_signature.user_inputs_to_mutate.values())


def _user_outputs(program: ExportedProgram) -> list[Any]:
    return [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]


def add(package: Path, manifest: dict[str, Any], records: Mapping[str, bytes]) -> None:
    """Writes `records` and `manifest`, with the digest of every record, into the archive at `package`."""
    with zipfile.ZipFile(package, "a") as archive:
        # Every record lies in one folder, named when the archive was made.
        folder = archive.namelist()[0].split("/", 1)[0]
        for name, data in records.items():
            archive.writestr(f"{folder}/{name}", data)
        digests = {}
        for name in archive.namelist():
            with archive.open(name) as record:
                digests[name.removeprefix(f"{folder}/")] = hashlib.file_digest(record, "sha256").hexdigest()  # type: ignore[arg-type]
        text = json.dumps(manifest | {"records": digests}, indent=1)
        archive.writestr(f"{folder}/{RECORD}", text)
        archive.writestr(f"{folder}/{DIGEST}", hashlib.sha256(text.encode()).hexdigest())


def sizes(package: Path, text: str) -> dict[str, Any]:
    """The bytes of the file at `package` and of its records; nothing where its manifest isn't `text` any more."""
    try:
        with zipfile.ZipFile(package) as archive:
            folder = archive.namelist()[0].split("/", 1)[0]
            if archive.read(f"{folder}/{RECORD}").decode() != text:
                return {}
            records = {each.filename.removeprefix(f"{folder}/"): each.file_size for each in archive.infolist()}
            return {"bytes": package.stat().st_size, "records": records}
    except (OSError, KeyError, IndexError, ValueError, zipfile.BadZipFile):
        return {}


def _describe_input(
    name: str, value: torch.Tensor, program: ExportedProgram, symbols: dict[str, Any]
) -> dict[str, Any]:
    sizes = [_describe_size(name, dimension, size, program, symbols) for dimension, size in enumerate(value.shape)]
    described = {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "sizes": sizes}
    order = _dense_order(value)
    if order is not None:
        return described | {"order": order}
    if all(isinstance(stride, int) for stride in value.stride()):
        return described | {"strides": list(value.stride())}
    raise ValueError(
        f"compile_package: input {name} has strides {tuple(value.stride())}, which are neither dense nor fixed: "
        "export with a contiguous example"
    )


def _describe_size(name: str, dimension: int, size: Any, program: ExportedProgram, symbols: dict[str, Any]) -> Any:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    free = sorted(expression.free_symbols, key=str)
    for symbol in free:
        bounds = program.range_constraints[symbol]
        symbols[str(symbol)] = {"min": _finite(bounds.lower), "max": _finite(bounds.upper)}
    if expression.is_Symbol:
        return str(expression)
    if not expression.is_polynomial(*free):
        raise ValueError(
            f"compile_package: input {name}: size of dimension {dimension} is {expression}, and only polynomials "
            "of the dynamic dimensions can be checked: export it as a dimension of its own"
        )
    terms = expression.as_poly(*free).terms()
    return [[int(factor), [str(s) for s, power in zip(free, powers, strict=True) for _ in range(power)]]
            for powers, factor in terms]  # fmt: skip


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def _dense_order(value: torch.Tensor) -> list[int] | None:
    """Dimensions from outermost to innermost where `value` is dense in that order, else None."""
    rank = value.dim()
    if value.is_contiguous():
        return list(range(rank))
    # A dimension of size 1 may have any stride: it stays where row-major order has it.
    order = sorted(range(rank), key=lambda d: (_hint(value.stride(d)), -d), reverse=True)
    dense: Any = 1
    for dimension in reversed(order):
        size = value.shape[dimension]
        if size == 1:
            continue
        if value.stride(dimension) != dense:
            return None
        dense = dense * size
    return order


def _hint(stride: Any) -> int:
    return stride if isinstance(stride, int) else stride.node.hint


def _guards(values: Mapping[str, Any]) -> list[Any]:
    """What the export assumed of the sizes beyond each one's range, as sympy's relations."""
    for value in values.values():
        environment = getattr(getattr(value, "fake_mode", None), "shape_env", None)
        if environment is not None:
            # In the symbols that are left: a size that equals another has become that one.
            guards = [environment.replace(guard.expr) for guard in environment.guards]
            return [guard for guard in guards if guard.free_symbols]
    return []


#: sympy's and torch's functions of sizes, and what contract.h calls them.
_OPERATORS = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%",
    "Min": "min", "Max": "max", "And": "and", "Or": "or", "Not": "not",
    "Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=",
}  # fmt: skip


def _describe_guard(
    guard: Any, values: Mapping[str, Any], symbols: dict[str, Any], program: ExportedProgram
) -> dict[str, Any]:
    places: dict[Any, str] = {}
    for name, value in values.items():
        for dimension, size in enumerate(getattr(value, "shape", ())):
            if not isinstance(size, int):
                places.setdefault(size.node.expr, f"{name}.size({dimension})")
    text = str(guard)
    for symbol in sorted(guard.free_symbols, key=lambda each: -len(str(each))):
        if str(symbol) not in symbols:
            bounds = program.range_constraints[symbol]
            symbols[str(symbol)] = {"min": _finite(bounds.lower), "max": _finite(bounds.upper)}
        text = re.sub(rf"\b{symbol}\b", places.get(symbol, str(symbol)), text)
    return {"text": text, "test": _expression(guard)}


def _expression(expression: Any) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    name = type(expression).__name__
    arguments = list(expression.args)
    if name in ("StrictGreaterThan", "GreaterThan"):
        return _expression(expression.reversed)
    if name == "Pow" and arguments[1].is_Integer and arguments[1] > 0:
        return (
            ["*", *[_expression(arguments[0])] * int(arguments[1])] if arguments[1] > 1 else _expression(arguments[0])
        )
    if name in _OPERATORS:
        return [_OPERATORS[name], *map(_expression, arguments)]
    raise ValueError(
        f"compile_package: the export assumed {expression} of its sizes, which can't be checked: "
        "fix the dimension, or change the model so that it doesn't depend on it"
    )
