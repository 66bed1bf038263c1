"""check_class: a method of a custom class against a reference, and the state of its objects."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..wording import counted
from . import draws, schema
from .call import Call, tensors_in
from .compare import Comparison, dense, raw, same_bytes
from .examine import Bench, describe, metadata
from .plan import TensorPlan
from .registry import stage
from .report import Report
from .state import State
from .subject import Dull, Subject, Supplier, load
from .tied_shapes import Shapes


def check_class(
    cls: Any,
    method: str,
    reference: Callable[..., Any],
    *,
    state: Mapping[str, Any] | None = None,
    inputs: Any = None,
    shapes: Mapping[str, Sequence[str | int]] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    compare: Comparison | None = None,
    devices: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    tier: str = "quick",
    seed: int = 0,
) -> Report:
    """Checks a method of a custom class as :func:`check_op` does an operator, and what becomes of its objects.

    Args:
        cls: ``torch.classes.ns.Class``, or ``"ns.Class"``.
        method: the method's name.
        reference: takes the object and the method's arguments, or the arguments alone.
        state: the constructor's arguments by name, each a value or a ``TensorPlan``; drawn by type where not given.
        inputs, shapes, dtypes, compare, devices, skip, tier, seed: as for :func:`check_op`.

    Returns:
        What was looked at.

    Raises:
        CheckFailure: a property is violated; it carries all violations.
        ValueError, TypeError: the arguments don't fit together, in one sentence.

    Example::

        >>> check_class(
        ...     "my_ops.IdentityConvClass", "forward", lambda x: x.clone(), state={"channels": 3}
        ... )  # doctest: +SKIP
    """
    from .checking import check, suppliers

    __tracebackhide__ = True  # pytest then shows the line of the test
    subject = MethodSubject(cls, method, reference, state, suppliers(inputs), Shapes(shapes))
    return check(subject, inputs, dtypes, compare, devices, skip, tier, seed, kind="class")


class MethodSubject(Subject):
    """A method of one object, checked as an operator is."""

    def __init__(
        self,
        cls: Any,
        method: str,
        reference: Callable[..., Any],
        state: Mapping[str, Any] | None,
        given: Mapping[str, Supplier],
        shapes: Shapes,
    ):
        if not callable(reference):
            raise TypeError(f"check_class: reference must be a callable, got {reference!r}")
        self.given = dict(given)
        self.overload = None
        self.reference_given = reference
        self.state_given = dict(state or {})
        self.states = _states(cls, self.state_given)
        self.method = method
        self.state = self.states[0]
        self.object = self.state.build()
        declared = _method_schema(self.state.name, method)
        self.name = f"{self.state.name}.{method}"
        arguments = tuple(declared.arguments[1:])
        self.binding = schema.Binding(declared, arguments, ())
        self.op = getattr(self.object, method)
        self.reference = _with_object(reference, len(arguments), self.object)
        self.shapes = shapes
        self._know("check_class")

    @property
    def qualified(self) -> str | None:
        return f"{self.state.name.replace('.', '::', 1)}.{self.method}"

    @property
    def writes(self) -> bool:
        return False

    @property
    def aliases(self) -> bool:
        return False

    @property
    def autograd_in_python(self) -> bool:
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {
            "class": (
                self.state.name,
                self.method,
                self.reference_given,
                self.state_given,
                self.given,
                self.shapes,
            ),
            "homes": self.homes(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        load(state["homes"])
        self.__init__(*state["class"])  # type: ignore[misc]


def _states(cls: Any, given: Mapping[str, Any]) -> list[State]:
    """Up to four states that the constructor takes, the dullest first."""
    suppliers: dict[str, Callable[[], Any]] = {
        name: functools.partial(copy.copy, value) for name, value in given.items()
    }
    found: list[State] = []
    refused: Exception | None = None
    for attempt in range(60):
        source = draws.RandomSource(attempt)
        # In turn, as a state may be kept in one dtype whatever it was.
        dtype = (torch.float32, torch.float64, torch.bfloat16)[attempt % 3]
        try:
            drawn = schema.state(source, cls, functools.partial(draws.plan, source, (3,), dtype), suppliers)
            drawn.build()
        except (RuntimeError, ValueError, TypeError) as error:
            refused = error
            if isinstance(error, ValueError) and attempt == 0:
                State.parameters(cls)  # no such class: said at once
            continue
        if drawn not in found:
            found.append(drawn)
        if len(found) == 4:
            break
    if not found:
        raise ValueError(
            f"check_class: no arguments were found that {State.name_of(cls)} takes, give state=: {refused}"
        )
    return found


def _method_schema(name: str, method: str) -> Any:
    prefix = "__torch__.torch.classes."
    for each in torch._C._jit_get_custom_class_schemas():  # type: ignore[attr-defined]
        owner = each.arguments[0].type.str() if each.arguments else ""
        if owner == prefix + name and each.name == method:
            return each
    raise ValueError(f"check_class: {name} has no method {method!r}")


def _with_object(reference: Callable[..., Any], count: int, obj: Any) -> Callable[..., Any]:
    """The reference, given the object first where it takes one argument more than the method."""
    try:
        parameters = inspect.signature(reference).parameters.values()
    except (TypeError, ValueError):
        return reference
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(each.kind in positional and each.default is each.empty for each in parameters)
    if needed == count + 1:
        return functools.partial(reference, obj)
    return reference


def _through_archive(obj: Any) -> Any:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _through_script(obj: Any) -> Any:
    """Through a TorchScript archive, which is how a C++ program has it."""

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = obj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Holder()), file)
    file.seek(0)
    return torch.jit.load(file).held


_WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
    "copy.deepcopy": copy.deepcopy,
    "torch.save": _through_archive,
    "a TorchScript archive": _through_script,
}


def _flattened(obj: Any) -> dict[str, Any] | None:
    """The fields that an object flattens to, each Tensor a copy, or None where it doesn't."""
    if not hasattr(obj, "__obj_flatten__"):
        return None
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in obj.__obj_flatten__()
    }


def _fields_differ(now: Mapping[str, Any], was: Mapping[str, Any]) -> str | None:
    if now.keys() != was.keys():
        return f"fields {sorted(now)} instead of {sorted(was)}"
    for name, value in was.items():
        other = now[name]
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if (
                value.shape != other.shape
                or value.dtype != other.dtype
                or not same_bytes(raw(dense(value)), raw(dense(other)))
            ):
                return f"field {name} differs"
        elif isinstance(value, torch.Tensor) or (other != value and value == value):
            return f"field {name} was {value!r} and is {other!r}"
    return None


def _changed_states(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Objects fresh from the constructor, and after calls of each of their methods."""
    subject = _of(bench)
    for state in subject.states:
        yield repr(state), state.build(bench.device)
    prefix = "__torch__.torch.classes."
    for each in torch._C._jit_get_custom_class_schemas():  # type: ignore[attr-defined]
        owner = each.arguments[0].type.str() if each.arguments else ""
        if owner != prefix + subject.state.name or each.name.startswith("__"):
            continue
        obj = subject.state.build(bench.device)
        try:
            for turn in range(2):
                arguments = [
                    schema.value(Dull(), a.real_type, functools.partial(TensorPlan, (3,), seed=turn), length=a.N)
                    for a in each.arguments[1:]
                ]
                call = Call(tuple(arguments))
                bench.about_to(call)
                getattr(obj, each.name)(*call.build(bench.device)[0])
        except Exception:  # it refuses them
            continue
        yield f"{subject.state!r} after {each.name}", obj


def _of(bench: Bench) -> MethodSubject:
    assert isinstance(bench.subject, MethodSubject)
    return bench.subject


def _samples(bench: Bench) -> list[Call]:
    """Calls that the reference and the method take."""
    found = []
    dtype = torch.float32 if torch.float32 in bench.settings.dtypes else bench.settings.dtypes[0]
    plans = (TensorPlan((2, 3), dtype), TensorPlan((3,), dtype), TensorPlan((2, 3, 4, 5), dtype))
    for call in bench.settings.given_calls or [bench.subject.call(plan) for plan in plans]:
        bench.about_to(call)
        args, kwargs = call.build(bench.device)
        try:
            bench.expected(args, kwargs)
            bench.subject.run(args, kwargs)
        except Exception:
            continue
        found.append(call)
        if len(found) == 3:
            break
    return found


def _gives(obj: Any, method: str, call: Call, device: str) -> Any:
    """What a method gives on an object, or the error's text: copies of an object do the same."""
    args, kwargs = call.build(device)
    try:
        return getattr(obj, method)(*args, **kwargs)
    except Exception as error:
        return describe(error)


@stage("state", of=("class",))
def states(bench: Bench, start: int) -> None:
    """Objects through every way of keeping them: their fields, and what their methods give."""
    subject = _of(bench)
    samples = _samples(bench)
    if text := _changed_by_others(subject, bench.device):
        bench.violate("state", f"making other objects changed {subject.state!r}: {text}")
        return
    for index, (what, obj) in enumerate(_changed_states(bench)):
        if index < start:
            continue
        bench.index = index
        was = _flattened(obj)
        ways = dict(_WAYS)
        if was is not None:
            ways["__obj_flatten__ and the constructor"] = lambda obj: _rebuilt(subject, obj)
        for way, through in ways.items():
            bench.about_to(f"{what} through {way}", 20.0)
            try:
                kept = through(obj)
            except Exception as error:
                if way == "a TorchScript archive":
                    bench.tell(f"{way}: refused by torch: {describe(error)[:160]}")
                else:
                    bench.violate("state", f"{way} of {what} raised {describe(error)}")
                continue
            if was is not None:
                if text := _fields_differ(_flattened(kept) or {}, was):
                    bench.violate("state", f"lost through {way} of {what}: {text}")
                    return
                if text := _fields_differ(_flattened(obj) or {}, was):
                    bench.violate("state", f"{way} changed {what} itself: {text}")
                    return
            for call in samples:
                # Each on objects of its own, since a call may change them.
                mine = _gives(through(obj), subject.method, call, bench.device)
                theirs = _gives(
                    copy.deepcopy(obj) if way != "copy.deepcopy" else kept, subject.method, call, bench.device
                )
                if text := _results_differ(bench, mine, theirs):
                    bench.violate("state", f"after {way} of {what} {subject.method} gives otherwise: {text}", call)
                    return
    if _flattened(subject.object) is None:
        bench.tell("it has no __obj_flatten__: its fields can't be compared, nor can it be exported")


def _changed_by_others(subject: MethodSubject, device: str) -> str | None:
    """What other objects change in the first one, by being made."""
    first = subject.state.build(device)
    was = _flattened(first)
    for state in subject.states[1:]:
        other = state.build(device)
        if was is not None and (text := _fields_differ(_flattened(first) or {}, was)):
            return text
        del other
    return None


def _rebuilt(subject: Any, obj: Any) -> Any:
    namespace, name = subject.state.name.split(".", 1)
    return getattr(getattr(torch.classes, namespace), name)(**dict(obj.__obj_flatten__()))


def _results_differ(bench: Bench, mine: Any, theirs: Any) -> str | None:
    got, want = tensors_in(mine), tensors_in(theirs)
    if not want and not got:
        return None if mine == theirs or mine != mine else f"expected {theirs!r}, got {mine!r}"
    if len(got) != len(want):
        return f"expected {counted(len(want), 'tensor')}, got {mine!r}"[:200]
    for one, other in zip(got, want, strict=True):
        if different := next(metadata(one, other), None):
            return different[1]
        if text := bench.compare(one, other):
            return text
    return None


@stage("traced", of=("class",))
def traced(bench: Bench, start: int) -> None:
    """Fakes, export and compilation: they agree with the method, and leave the object as it was."""
    subject = _of(bench)
    if start:
        return
    for call in _samples(bench):
        for how, run in (("fake", _faked), ("export", _exported), ("compile", _compiled)):
            if how != "fake" and not bench.full:
                continue
            obj = subject.state.build(bench.device)
            was = _flattened(obj)
            if was is None and how != "fake":
                continue
            args, _ = call.build(bench.device)
            bench.about_to(call, 120.0)
            try:
                traced_result = run(obj, subject.method, args)
            except Exception as error:
                bench.violate("traced", f"{how} raised {describe(error)}", call)
                return
            eager = subject.state.build(bench.device)
            theirs = _gives(eager, subject.method, call, bench.device)
            # What is compiled runs on the object itself, once; a fake, and a program from its file, on copies.
            expected = _flattened(eager) if how == "compile" else was
            if expected is not None and (text := _fields_differ(_flattened(obj) or {}, expected)):
                bench.violate("traced", f"{how} changed the object: {text}", call)
                return
            if how == "fake":
                for one, other in zip(tensors_in(traced_result), tensors_in(theirs), strict=False):
                    if different := next(metadata(one, other), None):
                        bench.violate("traced", f"the fake says otherwise than the method: {different[1]}", call)
                        return
            elif text := _results_differ(bench, traced_result, theirs):
                bench.violate("traced", f"{how}: {text}", call)
                return
            if was is not None:
                later = _gives(obj, subject.method, call, bench.device)
                if how == "fake" and (text := _results_differ(bench, later, theirs)):
                    bench.violate("traced", f"after {how} the method gives otherwise: {text}", call)
                    return


def _faked(obj: Any, method: str, args: Sequence[Any]) -> Any:
    """What the method gives for fake tensors, on a fake of the object where it has one."""
    mode = FakeTensorMode()
    target = obj
    if _flattened(obj) is not None:
        from torch._library.fake_class_registry import maybe_to_fake_obj

        target = maybe_to_fake_obj(mode, obj)
    faked = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args]
    with mode:
        return getattr(getattr(target, "wrapped_obj", target), method)(*faked)


class _Holder(torch.nn.Module):
    def __init__(self, obj: Any, method: str) -> None:
        super().__init__()
        self.held = obj
        self._method = method

    def forward(self, *args: Any) -> Any:
        return getattr(self.held, self._method)(*args)


def _exported(obj: Any, method: str, args: Sequence[Any]) -> Any:
    program = torch.export.export(_Holder(obj, method), tuple(args), strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()(*args)


def _compiled(obj: Any, method: str, args: Sequence[Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(_Holder(obj, method), backend="aot_eager", fullgraph=True)(*args)
