"""What an operator takes, by its schema: which arguments a check can draw, and how.

The type objects of a schema are torch's own and undocumented; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from . import draws, values
from .call import Call
from .plan import GRADS, TensorPlan
from .state import State

Operator = Any  # a packet or an overload of torch.ops, what torch.library.custom_op gives, a name, or a function

# The first is what most calls have: with 0 for a factor every result is 0, whatever the kernel does.
_NUMBERS = (2, 0, 1, -1, 0.5, -2.0, 3, 1e-3, 7, 100.0)
_FLOATS = (1.5, 0.5, 0.0, 1.0, -1.0, 2.0, 1e-3, -0.0, 100.0, 1e30)

#: Of each kind of type the numbers that `numbers` gives in turn. Such as most calls have: each sign, a fraction.
ORDINARY: Mapping[str, tuple[Any, ...]] = {
    "IntType": (1, 0, 2, -1),
    "FloatType": (1.5, 0.5, -2.0),
    "NumberType": (2, 0.5, -2.0),
    "BoolType": (False, True),
}
#: Those, and others that kernels were seen to take wrongly.
FINITE: Mapping[str, tuple[Any, ...]] = {
    **ORDINARY,
    "IntType": (*ORDINARY["IntType"], 3, 7, -2, -3, 32, 100, -100),
    "FloatType": (*ORDINARY["FloatType"], 0.0, 1.0, -1.0, 0.1, 1e-3, -0.0, 100.0, 1e30),
    "NumberType": (*ORDINARY["NumberType"], 0, 1, -1, 0.1, 3, 7, 100.0, 1 << 31),
}
#: Those, infinity and NaN.
ANY: Mapping[str, tuple[Any, ...]] = {
    kind: found + ((math.inf, -math.inf, math.nan) if kind in ("FloatType", "NumberType") else ())
    for kind, found in FINITE.items()
}
#: Integers beyond 32 bits, and one that a float64 hasn't. Where they are sizes, there is no room for them.
LARGE = (1 << 31, -(1 << 31) - 1, (1 << 32) + 1, (1 << 53) + 1)


def overload_of(op: Operator) -> torch._ops.OpOverload:
    """The one overload that `op` means.

    Raises:
        ValueError: `op` isn't registered, or has several overloads and none without a name.
    """
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        name, _, overload = name.partition(".")
        try:
            op = getattr(getattr(torch.ops, namespace), name)
            op = getattr(op, overload) if overload else op
        except (AttributeError, RuntimeError) as error:
            raise ValueError(f"op must name a registered operator as namespace::name, got {op!r}") from error
    if isinstance(op, torch._library.custom_ops.CustomOpDef):
        op = op._opoverload
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        # Some packets of aten have a "default" that adds Python numbers.
        usual = [name for name in ("default", "Tensor", *names) if name in names and _takes_tensors(getattr(op, name))]
        if not usual or (usual[0] not in ("default", "Tensor") and len(names) > 1):
            raise ValueError(f"op must be one overload of {op}, one of {', '.join(names)}")
        op = getattr(op, usual[0])
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"op must be a registered operator, got {op!r}")
    return op


def _takes_tensors(overload: torch._ops.OpOverload) -> bool:
    return any("Tensor" in str(argument.type) for argument in overload._schema.arguments)


def schema_of(op: Operator) -> torch.FunctionSchema:
    """The schema of an operator, or one read from a function's annotations.

    A function without annotations takes Tensors.

    Raises:
        ValueError: there is none, in one sentence.
    """
    registered = (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)
    if isinstance(op, registered):
        return overload_of(op)._schema
    if not callable(op):
        raise ValueError(f"op must be an operator, its name, or a function, got {op!r}")
    name = f"python::{getattr(op, '__name__', type(op).__name__).strip('<>')}"
    try:
        return torch._C.parse_schema(name + torch.library.infer_schema(op, mutates_args=()))
    except (ValueError, TypeError, AttributeError):
        parameters = _parameters(op)
    if parameters is None:
        raise ValueError(f"op must have a signature that can be read, or give inputs; {op!r} has none")
    tensors = [p.name for p in parameters if p.default is p.empty and p.kind in (_EITHER, _POSITIONAL)]
    return torch._C.parse_schema(f"{name}({', '.join(f'Tensor {each}' for each in tensors)}) -> Tensor")


_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """A function's parameters, or None where they can't be read."""
    if isinstance(
        function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)
    ):
        return [
            inspect.Parameter(
                argument.name,
                _KEYWORD if argument.kwarg_only else _EITHER,
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in schema_of(function).arguments
        ]
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None


def required(function: Callable[..., Any]) -> int:
    """How many positional arguments a function requires, 0 where that can't be read."""
    parameters = _parameters(function) or []
    return sum(p.default is p.empty and p.kind in (_EITHER, _POSITIONAL) for p in parameters)


def of_tensors(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A function with a signature that can be read: it takes `count` Tensors."""

    def called(*tensors: torch.Tensor) -> Any:
        return function(*tensors)

    names = ["input", *(f"other{index}" for index in range(1, count))]
    called.__name__ = getattr(function, "__name__", "function")
    called.__signature__ = inspect.Signature([inspect.Parameter(name, _POSITIONAL) for name in names])  # type: ignore[attr-defined]
    return called


@dataclasses.dataclass(frozen=True)
class Binding:
    """Which arguments of a schema are given, the rest staying at their default."""

    schema: torch.FunctionSchema
    positional: tuple[Any, ...]
    keyword: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All of them, as ``torch.Argument``."""
        return self.positional + self.keyword


def bind(op: Operator, reference: Callable[..., Any] | None = None) -> Binding:
    """The arguments of `op` that `reference` takes too; all that values can be drawn for without one.

    Raises:
        ValueError: `reference` lacks an argument that `op` requires, or requires one that `op` hasn't.
    """
    schema = schema_of(op)
    parameters = _parameters(reference) if reference is not None else None
    if parameters is None:
        # A reference that can't be read gets the positional arguments.
        given = [a for a in schema.arguments if reference is None or not a.kwarg_only or not a.has_default_value()]
        return _split(schema, [(argument, argument.kwarg_only) for argument in given])
    kinds = {parameter.kind for parameter in parameters}
    any_positional, any_keyword = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    places = [p for p in parameters if p.kind in (_POSITIONAL, _EITHER)]
    by_name = {p.name for p in parameters if p.kind in (_EITHER, _KEYWORD)}
    ours = {argument.name for argument in schema.arguments}
    taken: list[tuple[Any, bool]] = []
    met: set[str] = set()
    for index, argument in enumerate(schema.arguments):
        place = places[index] if index < len(places) else None
        in_order = not argument.kwarg_only and not any(by_keyword for _, by_keyword in taken) and len(taken) == index
        if in_order and place is not None and (place.name == argument.name or place.name not in ours):
            taken.append((argument, False))
            met.add(place.name)
        elif in_order and place is None and any_positional:
            taken.append((argument, False))
        elif argument.name in by_name or any_keyword:
            taken.append((argument, True))
            met.add(argument.name)
        elif not argument.has_default_value():
            raise ValueError(
                f"reference must take the arguments that {schema.name} requires, but {_name(reference)} "
                f"takes {_signature(parameters)} and no {argument.name}"
            )
    lacking = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (_POSITIONAL, _EITHER, _KEYWORD) and p.name not in met
    ]
    if lacking:
        raise ValueError(
            f"reference must require no more than {schema.name} takes, but {_name(reference)} "
            f"requires {', '.join(lacking)} too"
        )
    return _split(schema, taken)


def _split(schema: torch.FunctionSchema, taken: list[tuple[Any, bool]]) -> Binding:
    """A binding without the arguments that values can't be drawn for and that have a default."""
    positional, keyword, gap = [], [], False
    for argument, by_keyword in taken:
        if not _can_draw(argument.real_type) and argument.has_default_value():
            gap = True
        elif by_keyword or gap:
            keyword.append(argument)
        else:
            positional.append(argument)
    return Binding(schema, tuple(positional), tuple(keyword))


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _signature(parameters: list[inspect.Parameter]) -> str:
    return f"({', '.join(parameter.name for parameter in parameters)})"


def kind_of(type_: Any) -> tuple[str, Any]:
    """The kind of a type, and of an optional or list the type inside."""
    kind = type_.kind()
    return kind, type_.getElementType() if kind in ("OptionalType", "ListType") else None


def _can_draw(type_: Any) -> bool:
    kind, inner = kind_of(type_)
    return _can_draw(inner) if inner is not None else kind in _DRAWN or kind in ("TensorType", "DictType", "ClassType")


_DRAWN: dict[str, Callable[[draws.Source], Any]] = {
    "IntType": lambda source: source.integer(-2, 8),
    "SymIntType": lambda source: source.integer(-2, 8),
    "FloatType": lambda source: source.pick(_FLOATS),
    "NumberType": lambda source: source.pick(_NUMBERS),
    "BoolType": lambda source: source.pick((False, True)),
    "SymBoolType": lambda source: source.pick((False, True)),
    "ComplexType": lambda source: complex(source.pick(_FLOATS), source.pick(_FLOATS)),
}


def value(source: draws.Source, type_: Any, tensor: Callable[[], TensorPlan], *, length: int | None = None) -> Any:
    """A value of a schema's type, the dullest being nothing, a small number other than 0, an empty list.

    Args:
        source: where choices come from.
        type_: the ``real_type`` of an argument.
        tensor: gives the plan of a Tensor.
        length: how long a list has to be, None for any.
    """
    kind, inner = kind_of(type_)
    if kind == "TensorType":
        return tensor()
    if kind == "OptionalType":
        return value(source, inner, tensor, length=length) if source.pick((False, True)) else None
    if kind == "ListType":
        return [value(source, inner, tensor) for _ in range(source.integer(0, 3) if length is None else length)]
    if kind == "DictType":
        return {
            _key(type_.getKeyType(), index): value(source, type_.getValueType(), tensor)
            for index in range(source.integer(0, 2))
        }
    if kind == "StringType":
        return source.pick(("", "a", "é", "a longer one"))
    if kind == "ScalarTypeType":
        return source.pick(values.DTYPES)
    if kind == "ClassType":
        return state(source, type_.str(), tensor)
    if kind not in _DRAWN:
        raise ValueError(f"an argument of type {type_} has no values that can be drawn: give inputs")
    return _DRAWN[kind](source)


def numbers(type_: Any, among: Mapping[str, tuple[Any, ...]], *, length: int | None = None) -> list[Any]:
    """Values of a type in turn, the dullest first: of a number, a truth value, or a list of them; none of another.

    Args:
        type_: the ``real_type`` of an argument.
        among: `ORDINARY`, `FINITE` or `ANY`.
        length: how long a list has to be, None for any.
    """
    kind, inner = kind_of(type_)
    if inner is None:
        return [*among.get(kind.removeprefix("Sym"), ())]
    each = numbers(inner, among, length=length)
    if kind == "OptionalType":
        return [None, *each] if each else []
    if length is not None:
        return [[number] * length for number in each]
    pairs = itertools.permutations((0, 1, -1, -2), 2) if each and is_integer(inner) else ()
    return [*([number] for number in each), *map(list, pairs)]


def is_integer(type_: Any) -> bool:
    """Whether a type is an integer, or an optional one."""
    kind, inner = kind_of(type_)
    return is_integer(inner) if kind == "OptionalType" else kind in ("IntType", "SymIntType")


def _key(type_: Any, index: int) -> Any:
    return f"key{index}" if type_.kind() == "StringType" else index


def state(
    source: draws.Source,
    cls: Any,
    tensor: Callable[[], TensorPlan],
    given: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> State:
    """A custom class's constructor arguments, by type or as `given`; the constructor may still refuse them.

    Raises:
        ValueError: no such class, no such argument, or a type that can't be drawn.
    """
    parameters, name = State.parameters(cls), State.name_of(cls)
    _know(name, given, parameters)
    return State(
        name,
        {each.name: _argument(source, name, each, tensor, given) for each in parameters},
    )


def _know(name: str, given: Mapping[str, Any], arguments: Sequence[Any]) -> None:
    unknown = set(given) - {argument.name for argument in arguments}
    if unknown:
        raise ValueError(f"{name} has no argument {', '.join(sorted(unknown))}")


def _argument(
    source: draws.Source,
    owner: str,
    argument: Any,
    tensor: Callable[[], TensorPlan],
    given: Mapping[str, Callable[[], Any]],
) -> Any:
    if argument.name in given:
        return given[argument.name]()
    if argument.has_default_value() and source.pick((True, False)):
        return argument.default_value
    try:
        return value(source, argument.real_type, tensor, length=argument.N)
    except ValueError as error:
        raise ValueError(f"{owner}: argument {argument.name}: {error}") from error


def call(
    source: draws.Source,
    binding: Binding,
    *,
    dtypes: Sequence[torch.dtype] = values.DTYPES,
    kinds: Sequence[str] = draws.LAYOUTS,
    special: bool = True,
    grads: Sequence[str] = GRADS[:1],
    share: bool = True,
    given: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    **of_shape: Any,
) -> Call:
    """A call of an operator: Tensors of one dtype that broadcast to each other, the rest by type.

    Args:
        source: where choices come from.
        binding: which arguments.
        dtypes: of Tensors.
        kinds: layouts of Tensors.
        special: whether Tensors may hold special values.
        grads: how autograd may see Tensors.
        share: whether Tensors may lie in one storage.
        given: of arguments by name, where their values come from instead.
        of_shape: further arguments of ``draws.shape``.

    Raises:
        ValueError: an argument has a type that can't be drawn, and isn't given.
    """
    _know(binding.schema.name, given, binding.arguments)
    dtype = source.pick(dtypes)
    sizes = draws.shape(source, **of_shape)
    drawn: list[TensorPlan] = []

    def tensor(argument: Any) -> TensorPlan:
        written = argument.alias_info is not None and argument.alias_info.is_write
        # torch itself refuses to write into cells that overlap.
        apart = [kind for kind in kinds if not written or kind not in ("expanded", "overlapping")]
        own = sizes if not drawn or written else draws.broadcast_from(source, sizes)
        drawn.append(draws.plan(source, own, dtype, kinds=apart, special=special, grads=grads))
        return drawn[-1]

    def of(argument: Any) -> Any:
        return _argument(source, binding.schema.name, argument, lambda: tensor(argument), given)

    positional = tuple(of(argument) for argument in binding.positional)
    keyword = {argument.name: of(argument) for argument in binding.keyword}
    found = Call(positional, keyword)
    written = any(a.alias_info is not None and a.alias_info.is_write for a in binding.arguments)
    several = share and not written and len(found.plans) == len(drawn) > 1
    if several and source.pick((False,) * 7 + (True,)):
        plans = [
            dataclasses.replace(plan, offset=source.integer(0, 32), cells=(), grad="none", misalignment=0)
            for plan in found.plans
        ]
        return dataclasses.replace(found.replace(plans), shared=True)
    return found
