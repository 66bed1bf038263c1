"""What is checked: an operator, however it is given, and the reference that it is held against.

This module touches what is private in torch for asking the dispatcher: seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import draws, schema
from .call import Call, plans_in, tensors_in
from .plan import TensorPlan
from .tied_shapes import Shapes

_REGISTERED = (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._library.custom_ops.CustomOpDef)
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


class Supplier:
    """Gives values for one argument: a fixed one, or where a strategy was given its dullest."""

    def __init__(self, given: Any):
        self.given = given
        self._value = given
        if type(given).__module__.startswith("hypothesis"):
            from hypothesis import errors, find

            try:
                self._value = find(given, lambda _: True)
            except errors.Unsatisfiable:
                raise ValueError(f"inputs: there is nothing that {given!r} draws") from None

    def __call__(self) -> Any:
        return self._value


class Subject:
    """An operator or a plain callable, and its reference; both are called alike.

    Args:
        op: ``torch.ops.ns.name``, one of its overloads, a ``torch.library.custom_op``, ``"ns::name"``, or any callable.
        reference: a callable, or an operator, that gives the right result.
        given: of arguments by name, where their values come from.
        shapes: how the shapes of its tensors depend on each other.

    Raises:
        ValueError: no such operator is registered, or the reference can't be called with its arguments.
        TypeError: `op` or `reference` is not callable.
    """

    def __init__(
        self, op: Any, reference: Any, given: Mapping[str, Supplier] | None = None, shapes: Shapes | None = None
    ):
        for name, value in (("op", op), ("reference", reference)):
            if not callable(value) and not isinstance(value, str):
                raise TypeError(f"check_op: {name} must be an operator, its name or a callable, got {value!r}")
        self.given = dict(given or {})
        self.overload = schema.overload_of(op) if isinstance(op, _REGISTERED) else None
        self.reference = schema.overload_of(reference) if isinstance(reference, str) else reference
        self.op: Callable[..., Any] = self.overload or op
        self.binding = _bind(self.op, self.reference)
        self.name = str(self.overload or getattr(op, "__qualname__", op))
        self.shapes = shapes or Shapes()
        self._know("check_op")

    def _know(self, caller: str) -> None:
        """Refuses what is said of arguments that there aren't."""
        unknown = (self.given.keys() | self.shapes.given) - {each.name for each in self.binding.schema.arguments}
        if unknown:
            raise ValueError(f"{caller}: {self.name} has no argument {', '.join(sorted(unknown))}")
        for argument in self.binding.schema.arguments:
            kind, inner = schema.kind_of(argument.real_type)
            kind = inner.kind() if kind == "OptionalType" else kind
            if argument.name in self.shapes.given and kind != "TensorType":
                raise ValueError(f"{caller}: shapes are of tensors, and {argument.name} is a {argument.real_type}")

    def __repr__(self) -> str:
        return self.name

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator's result."""
        return self.op(*args, **kwargs)

    def expect(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The reference's result, nothing where the schema has none."""
        result = self.reference(*args, **kwargs)
        return result if self.overload is None or self.binding.schema.returns else None

    def of_tensors(self, call: Call) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The operator and the reference as functions of a call's tensors alone."""
        args, kwargs = call.args, dict(call.kwargs)

        def with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*tensors: torch.Tensor) -> Any:
                rest = iter(tensors)
                filled = pytree.tree_map(
                    lambda leaf: next(rest) if isinstance(leaf, TensorPlan) else leaf,
                    (args, kwargs),
                    is_leaf=lambda leaf: isinstance(leaf, TensorPlan),
                )
                return function(*filled[0], **filled[1])

            return called

        return with_tensors(self.op), with_tensors(self.reference)

    def call(self, plan: TensorPlan) -> Call:
        """The call with `plan` for every Tensor that must be given, and the dullest values that serve for the rest."""
        return self._call(plan, self._source())

    def _call(self, plan: TensorPlan, source: draws.Source) -> Call:
        fields = {name: getattr(plan, name) for name in TensorPlan.__dataclass_fields__ if name != "_"}
        plans = (TensorPlan(**{**fields, "seed": plan.seed + index}) for index in itertools.count())

        def value(argument: Any) -> Any:
            if argument.name in self.given:
                return self.given[argument.name]()
            if argument.has_default_value() and isinstance(source, Dull):
                return argument.default_value
            return schema.value(source, argument.real_type, lambda: next(plans), length=argument.N)

        return self.fit(
            Call(
                tuple(value(argument) for argument in self.binding.positional),
                {argument.name: value(argument) for argument in self.binding.keyword},
            )
        )

    def fit(self, call: Call) -> Call:
        """The call with shapes that depend on each other as the author says."""
        return self.shapes.fit(call, [argument.name for argument in self.binding.positional])

    def fixed_dimensions(self, call: Call) -> list[frozenset[int]]:
        """Of each plan of a call, the dimensions that the author says have one size always."""
        values = [*zip((each.name for each in self.binding.positional), call.args, strict=False), *call.kwargs.items()]
        return [self.shapes.fixed(name, len(plan.shape)) for name, value in values for plan in plans_in(value)]

    @functools.cached_property
    def _source(self) -> Callable[[], draws.Source]:
        """Gives the choices for what isn't a Tensor: the dullest that the reference takes and that tell something.

        With results that are all alike, such as those of a factor of 0, much goes unseen.
        """
        sources: list[Callable[[], draws.Source]] = [Dull]
        sources += [functools.partial(draws.RandomSource, seed) for seed in range(40)]
        taken: list[Callable[[], draws.Source]] = []
        for source in sources:
            tells = self.tells(self._call(TensorPlan((3,)), source()))
            if tells:
                return source
            if tells is not None:
                taken.append(source)
        return taken[0] if taken else Dull

    def tells(self, call: Call) -> bool | None:
        """Whether the reference gives finite numbers that differ, None where it refuses."""
        args, kwargs = call.build()
        try:
            return any(map(_tells, tensors_in(self.expect(args, kwargs))))
        except Exception:
            return None

    def varied(self, plan: TensorPlan, seed: int) -> Call:
        """As `call`, with whatever isn't a Tensor drawn by type, and optional Tensors there or not."""
        return self._call(plan, draws.RandomSource(seed))

    def numbered(
        self,
        plan: TensorPlan,
        among: Mapping[str, tuple[Any, ...]],
        large: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> Iterator[Call]:
        """As `call`, with each number, truth value and list of them another in turn: of `among` by type, and `large`.

        Args:
            among: as of ``schema.numbers``.
            large: of integers by name, those beyond 32 bits that the reference takes.
        """
        call = self.call(plan)
        for at, argument in enumerate(self.binding.arguments):
            if argument.name in self.given:
                continue
            for number in (
                *schema.numbers(argument.real_type, among, length=argument.N),
                *large.get(argument.name, ()),
            ):
                if at < len(call.args):
                    yield dataclasses.replace(call, args=(*call.args[:at], number, *call.args[at + 1 :]))
                else:
                    yield dataclasses.replace(call, kwargs={**call.kwargs, argument.name: number})

    @property
    def varies(self) -> bool:
        """Whether calls may differ in more than their Tensors."""
        drawn = (each for each in self.binding.arguments if each.name not in self.given)
        return any(each.real_type.kind() != "TensorType" for each in drawn)

    @functools.cached_property
    def writes(self) -> bool:
        """Whether the schema lets it write into an input; of a function, which has none, whether its reference does."""
        if self.overload is None:
            return self.reference_writes
        return any(each.alias_info is not None and each.alias_info.is_write for each in self.binding.schema.arguments)

    @functools.cached_property
    def reference_writes(self) -> bool:
        """Whether the reference changes its inputs."""
        args, kwargs = self.call(TensorPlan((3,))).build()
        tensors = tensors_in((args, kwargs))
        before = [each._version for each in tensors]
        try:
            with torch.no_grad():
                self.expect(args, kwargs)
        except Exception:
            return False
        return before != [each._version for each in tensors]

    def written(self, call: Call) -> list[bool]:
        """Of each plan of a call, whether its tensor may be written into."""
        return [may for value, may in self._writable(call.args, call.kwargs) for _ in plans_in(value)]

    def written_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among arguments that may be written into."""
        return [each for value, may in self._writable(args, kwargs) if may for each in tensors_in(value)]

    def _writable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
        for argument, value in self._arguments(args, kwargs):
            info = argument.alias_info if argument is not None else None
            yield value, self.writes if self.overload is None else info is not None and info.is_write

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Each argument that is given, with its value."""
        arguments = self.binding.schema.arguments
        by_name = {each.name: each for each in arguments}
        return [*zip(arguments, args, strict=False), *((by_name.get(name), value) for name, value in kwargs.items())]

    @property
    def aliases(self) -> bool:
        """Whether the schema lets an output share memory with an input."""
        return self.writes or any(each.alias_info is not None for each in self.binding.schema.arguments)

    def fresh(self, outputs: Any) -> list[torch.Tensor]:
        """The outputs that must have memory of their own."""
        returns = self.binding.schema.returns
        if len(returns) < 2 or not isinstance(outputs, tuple | list) or len(outputs) != len(returns):
            return [] if self.aliases else tensors_in(outputs)
        shared = [each.alias_info is not None for each in returns]
        return tensors_in([each for each, shares in zip(outputs, shared, strict=True) if not shares])

    def given_back(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> list[tuple[Any, Any]]:
        """The outputs that the schema says are an input that was written into, each with that input."""
        written = {
            frozenset(argument.alias_info.before_set): value
            for argument, value in self._arguments(args, kwargs)
            if argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        }
        returns = self.binding.schema.returns
        return [
            (output, written[frozenset(each.alias_info.before_set)])
            for each, output in zip(returns, outputs if len(returns) > 1 else [outputs], strict=False)
            if each.alias_info is not None and frozenset(each.alias_info.before_set) in written
        ]

    @property
    def qualified(self) -> str | None:
        """``namespace::name`` of a registered operator."""
        return self.overload._schema.name if self.overload else None

    @functools.cached_property
    def device_types(self) -> tuple[str, ...]:
        """Device types of this machine for which there is a kernel."""
        present = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        if self.overload is None:
            return tuple(present)
        has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        return tuple(each for each in present if has(self.entry, _KEYS[each]))

    def registers(self, key: str) -> bool:
        """Whether there is a kernel for a dispatch key, itself or by composition."""
        if self.overload is None:
            return True
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return has(self.entry, "CompositeImplicitAutograd") or has(self.entry, key)

    @functools.cached_property
    def autograd_in_python(self) -> bool:
        """Whether its gradient was registered from Python, where torch has no forward mode."""
        if self.overload is None:
            return True
        lines = _dump(self.entry).splitlines()
        return any(line.startswith("Autograd") and ".py:" in line for line in lines)

    @property
    def entry(self) -> str:
        """``namespace::name.overload``, as the dispatcher writes it."""
        assert self.overload is not None
        name, overload = self.overload._schema.name, self.overload._schema.overload_name
        return f"{name}.{overload}" if overload else name

    def homes(self) -> tuple[list[str], list[str]]:
        """What a fresh process must load and import to have the operator."""
        from ..loading import namespaces

        space = (self.qualified or "").partition("::")[0]
        libraries = []
        for library in map(str, torch.ops.loaded_libraries):
            registered = namespaces(Path(library))  # of one that others loaded nothing is known
            if (not space or not registered or space in registered) and Path(library).exists():
                libraries.append(library)  # one that is gone since it was loaded has no say in a new process
        definition = torch._library.custom_ops.OPDEFS.get(self.qualified or "")
        modules = [definition._init_fn.__module__] if definition is not None else []
        if any("libidentity_conv_ops" in each for each in libraries):
            modules.append("identity_conv.ops")
            libraries = [each for each in libraries if "libidentity_conv_ops" not in each]
        return libraries, [each for each in modules if each in sys.modules and each != "__main__"]

    def __getstate__(self) -> dict[str, Any]:
        homeless = self.overload is not None and self.qualified not in torch._library.custom_ops.OPDEFS
        if homeless and re.search(r"^debug: registered at .*\.py:\d+$", _dump(self.entry), re.MULTILINE):
            raise ValueError(f"{self.qualified} is defined by a torch.library.Library in Python")
        return {
            "op": _entry_of(self.op),
            "reference": _entry_of(self.reference),
            "given": self.given,
            "shapes": self.shapes,
            "homes": self.homes(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        load(state["homes"])
        self.__init__(state["op"], state["reference"], state["given"], state["shapes"])  # type: ignore[misc]


def _dump(entry: str) -> str:
    """What the dispatcher knows of an operator."""
    return torch._C._dispatch_dump(entry)


def load(homes: tuple[list[str], list[str]]) -> None:
    """Does in a fresh process what :meth:`Subject.homes` says."""
    libraries, modules = homes
    for library in libraries:
        torch.ops.load_library(library)
    for module in modules:
        importlib.import_module(module)


def _tells(result: torch.Tensor) -> bool:
    """Whether a result is made of finite numbers that differ."""
    if result.numel() < 2 or result.is_complex() or not result.is_floating_point():
        return result.numel() > 0
    return bool(torch.isfinite(result).all() and (result != result.reshape(-1)[0]).any())


class Dull(draws.RandomSource):
    """The dullest choice each time, but for an integer, which is 1."""

    def __init__(self) -> None:
        super().__init__(0)

    def integer(self, low: int, high: int) -> int:
        return min(max(1, low), high)

    def pick(self, among: Sequence[Any]) -> Any:
        return among[0]


def _bind(op: Any, reference: Any) -> schema.Binding:
    try:
        schema.schema_of(op)
    except ValueError:
        if not callable(op):
            raise
        # A builtin whose signature can't be read: it takes the tensors that the reference takes, or one.
        return schema.bind(schema.of_tensors(op, schema.required(reference) or 1), reference)
    return schema.bind(op, reference)


def _entry_of(function: Any) -> Any:
    """An operator by name, and anything else as it is."""
    if isinstance(function, torch._ops.OpOverload):
        schema_ = function._schema
        return f"{schema_.name}.{schema_.overload_name or 'default'}"
    return function
