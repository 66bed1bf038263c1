"""Gradients of class methods, and of operators that take an object, under ``torch.compile``.

torch's own rule for ``call_torchbind`` and the Autograd key detaches, and an operator with an object
falls through that key: parameters before the call get no gradient, without a word. Here the call stays
in the forward graph as it is, and one operator in the backward graph runs it again on the same object,
as eager does, and differentiates that. So what has gradients in eager has the same ones here, whoever
wrote the class and its fake, and the state is read when the graph runs. The price is a second run of
the method in backward.

A second run is wrong where the first left a trace: a call that changes its object's state, or draws
random numbers, is refused, and so is a backward after the state has changed.

This is the one module that touches torch's private interfaces for this; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import base64
import functools
import itertools
import pickle
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._higher_order_ops import effects, torchbind
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from . import fakes

_REMEDY = "call it outside of the compiled region (torch.compiler.disable), or under torch.no_grad()"
_library = torch.library.Library("identity_conv", "FRAGMENT")


@dataclass(frozen=True)
class _Slot:
    """Stands in a call's arguments for what the graph carries."""

    kind: str  # "tensor", "number" (it may be symbolic) or "object"
    wants_grad: bool = False


@dataclass(frozen=True)
class _Call:
    """A call of a method or an operator, without its tensors, numbers and object."""

    name: str  # ns::Class.method or ns::operator.overload
    owner: str  # the object's class, ns.Class
    is_method: bool
    arguments: Any  # (args, kwargs) with slots

    @property
    def wanted(self) -> list[bool]:
        """Of each tensor, whether its gradient is wanted."""
        return [slot.wants_grad for slot in pytree.tree_leaves(self.arguments) if _is(slot, "tensor")]

    def run(self, obj: Any, tensors: Iterable[Any], numbers: Iterable[Any]) -> Any:
        values = {"tensor": iter(tensors), "number": iter(numbers), "object": itertools.repeat(obj)}
        args, kwargs = pytree.tree_map_only(_Slot, lambda slot: next(values[slot.kind]), self.arguments)
        if self.is_method:
            return torchbind.call_torchbind(args[0], self.name.rpartition(".")[2], *args[1:], **kwargs)
        return fakes.operator(self.name)(*args, **kwargs)

    def dumps(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode()


@functools.lru_cache(4096)
def _loads(text: str) -> _Call:
    return pickle.loads(base64.b64decode(text))


def _is(leaf: Any, kind: str) -> bool:
    return isinstance(leaf, _Slot) and leaf.kind == kind


def _call(name: str, is_method: bool, args: Any, kwargs: Any) -> Any:
    """A call where it is traced: the gradients of what it returns are eager's.

    Raises:
        NotImplementedError: they can't be.
    """
    found: dict[str, list[Any]] = {"tensor": [], "number": [], "object": []}

    def slot(leaf: Any) -> Any:
        kind = (
            "tensor" if isinstance(leaf, torch.Tensor)
            else "object" if isinstance(leaf, torch.ScriptObject | FakeScriptObject)
            else "number" if isinstance(leaf, torch.SymInt | int) and not isinstance(leaf, bool)
            else None
        )  # fmt: skip
        if kind is None:
            return leaf
        found[kind].append(leaf)
        return _Slot(kind, kind == "tensor" and leaf.requires_grad)

    arguments = pytree.tree_map(slot, (args, kwargs))
    tensors, numbers = found["tensor"], found["number"]
    if not any(tensor.requires_grad for tensor in tensors):
        for each in found["object"]:
            refuse_lost_state_gradient(name, each)
        with torch._C._AutoDispatchBelowAutograd():
            return _Call(name, "", is_method, (args, kwargs)).run(None, (), ())
    if len(found["object"]) != 1:
        raise NotImplementedError(
            f"{name}: under torch.compile a call with one object has gradients, got {len(found['object'])}: {_REMEDY}"
        )
    obj = found["object"][0]
    call = _Call(name, fakes.class_of(obj), is_method, arguments)
    rest: list[Any] = []
    outputs = iter(_Differentiable.apply(call, obj, numbers, rest, *tensors))
    flat, spec = rest
    return pytree.tree_unflatten([next(outputs) if isinstance(each, torch.Tensor) else each for each in flat], spec)


def refuse_lost_state_gradient(name: str, obj: Any) -> None:
    """For a call whose object's tensors alone require grad: a graph has no place for their gradients."""
    for field, value in fakes.fields_of(obj):
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value)):
            raise NotImplementedError(
                f"{name}: the field {field!r} of its object requires grad and no argument does, so under torch.compile "
                f"its gradient would be lost: pass the tensor as an argument, or {_REMEDY}"
            )


class _Differentiable(torch.autograd.Function):
    """A call in a graph that is differentiated."""

    @staticmethod
    def forward(ctx: Any, call: _Call, obj: Any, numbers: list[Any], rest: list[Any], *tensors: torch.Tensor) -> Any:
        before, versions = fakes.fingerprint(obj), fakes.versions(tensors)
        with torch._C._AutoDispatchBelowAutograd(), _saved_by_checkpoints():
            result = call.run(obj, tensors, numbers)
            state = _state_operator(call.owner)(obj)
        if fakes.fingerprint(obj) != before:
            raise NotImplementedError(_changes(call, "the state of its object"))
        if fakes.versions(tensors) != versions:
            raise NotImplementedError(_changes(call, "a tensor that it is given"))
        ctx.save_for_backward(*tensors, state)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.numbers = call, numbers
        flat, spec = pytree.tree_flatten(result)
        rest += [flat, spec]
        return tuple(_tensors(flat))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *tensors, state = ctx.saved_tensors
        text = ctx.call.dumps()
        found = iter(torch.ops.identity_conv.backward(text, state, tensors, ctx.numbers, list(grads)))
        return None, None, None, None, *(next(found) if wants else None for wants in ctx.call.wanted)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _changes(call: _Call, what: str) -> str:
    return (
        f"{call.name} changes {what}: under torch.compile a call that is differentiated may not, "
        f"since its backward runs it again; {_REMEDY}"
    )


@contextmanager
def _saved_by_checkpoints() -> Iterator[None]:
    """Activation checkpoints keep what is traced here: a backward graph can't hold the object to run it again."""
    meta = torch.fx.traceback.current_meta
    before = meta.get("recompute")
    if before is not None:
        meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        if before is not None:
            meta["recompute"] = before


def _keep_in_checkpoints(op: Any) -> None:
    """The same where a checkpoint is a dispatch mode, with a policy (torch 2.13 and newer: with any)."""

    def keep(mode: Any, *args: Any, **kwargs: Any) -> Any:
        policy = mode.policy_fn
        mode.policy_fn = lambda *_, **__: checkpoint.CheckpointPolicy.MUST_SAVE
        try:
            return mode.__torch_dispatch__(op, (), args, kwargs)
        finally:
            mode.policy_fn = policy

    op.py_impl(checkpoint._CachingTorchDispatchMode)(keep)
    op.py_impl(checkpoint._CachedTorchDispatchMode)(
        lambda mode, *args, **kwargs: mode.__torch_dispatch__(op, (), args, kwargs)
    )


# The graph's two operators: an object's state, in forward, and the backward of a call. The object itself can't be
# saved for backward, so its state carries a number by which it is found.

_library.define(
    "backward(str call, Tensor state, Tensor[] tensors, SymInt[] numbers, Tensor?[] grads) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_serials = itertools.count()
_serial_of: dict[int, int] = {}  # by address
_objects: dict[int, weakref.ref[Any]] = {}  # by serial


@functools.cache
def _state_operator(owner: str) -> Any:
    """The operator of a class: torch passes the fake of an object to no schema without the class's name."""
    name = f"state_of_{owner.replace('.', '__')}"
    _library.define(f"{name}({fakes.PREFIX}{owner} obj) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _state, "CompositeExplicitAutograd")
    qualified = f"identity_conv::{name}"
    torch.library.register_fake(qualified, lambda obj: torch.empty(2, dtype=torch.int64), lib=_library)
    effects._register_effectful_op(f"{qualified}.default", None)
    op = getattr(torch.ops.identity_conv, name).default
    _keep_in_checkpoints(op)
    return op


def _state(obj: Any) -> torch.Tensor:
    """Two numbers: which object it is, and a digest of its state."""
    serial = _serial_of.get(id(obj), -1)
    if serial not in _objects or _objects[serial]() is not obj:
        serial = _serial_of[id(obj)] = next(_serials)
        _objects[serial] = weakref.ref(obj, functools.partial(_forget, serial))
    state = torch.tensor([serial, _digest(obj)], dtype=torch.int64)
    # Whoever keeps this tensor for a backward keeps the object with it, as a graph in eager does.
    state.object = obj  # type: ignore[attr-defined]
    return state


def _forget(serial: int, _: Any) -> None:
    _objects.pop(serial, None)


def _digest(obj: Any) -> int:
    """Equal where nothing has changed, to the versions of tensors."""

    def key(value: Any, again: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A tensor that is made when asked for says nothing by its identity.
        same = value is again and not value.is_inference()
        return (id(value), value._version) if same else (tuple(value.shape), value.dtype)

    return hash(repr(pytree.tree_map(key, obj.__obj_flatten__(), obj.__obj_flatten__())))


def _backward_fake(text: str, state: Any, tensors: Any, numbers: Any, grads: Any) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each, wants in zip(tensors, _loads(text).wanted, strict=True) if wants]


def _backward(text: str, state: torch.Tensor, tensors: Any, numbers: Any, grads: Any) -> list[torch.Tensor]:
    call = _loads(text)
    serial, digest = state.tolist()
    obj = _objects[serial]() if serial in _objects else None
    if obj is None:
        raise RuntimeError(f"{call.name}: its object is gone, and under torch.compile its backward needs it")
    if _digest(obj) != digest:
        raise RuntimeError(
            f"{call.name}: the state of its object changed between the call and its backward, which under "
            f"torch.compile runs the call again: call backward first, or {_REMEDY}"
        )
    drawn, versions = _random_state(tensors), fakes.versions(tensors)
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_(wants) for each, wants in zip(tensors, call.wanted, strict=True)]
        outputs = _tensors(call.run(obj, inputs, numbers))
    if _digest(obj) != digest:
        raise RuntimeError(_changes(call, "the state of its object"))
    if fakes.versions(tensors) != versions:
        raise RuntimeError(_changes(call, "a tensor that it is given"))
    if _random_state(tensors) != drawn:
        raise RuntimeError(
            f"{call.name} draws random numbers: under torch.compile a call that is differentiated may not, since its "
            f"backward runs it again and would draw others; {_REMEDY}"
        )
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None]
    if not pairs:
        return [torch.zeros_like(each) for each in inputs if each.requires_grad]
    if not any(y.requires_grad for y, _ in pairs):
        raise RuntimeError(
            f"{call.name} isn't differentiable, what it returns doesn't require grad in eager either: detach its "
            "arguments, or give the operators in it an Autograd kernel (identity_conv/autograd.h)"
        )
    pairs = [(y, grad) for y, grad in pairs if y.requires_grad]
    with _only_wanted_leaves(obj):
        torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
    # With the strides that the graph expects, and no memory of anybody else's.
    return [
        torch.zeros_like(each.detach()) if each.grad is None else torch.empty_like(each.detach()).copy_(each.grad)
        for each in inputs
        if each.requires_grad
    ]


@contextmanager
def _only_wanted_leaves(obj: Any) -> Iterator[None]:
    """The object's own tensors that require grad get theirs, as in eager, unless it was asked for others alone."""
    state = [leaf for leaf in _tensors(obj.__obj_flatten__()) if leaf.requires_grad and leaf.is_leaf]
    left = [] if _all_are_wanted() else state
    before = [leaf.grad for leaf in left]
    for leaf in left:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in zip(left, before, strict=True):
            leaf.grad = grad


def _all_are_wanted() -> bool:
    """Whether what runs is ``backward()``, and not ``grad`` for some inputs: as far as this node's neighbours tell."""
    node = torch._C._current_autograd_node()
    if node is None:
        return True
    try:
        return all(torch._C._will_engine_execute_node(each) for each, _ in node.next_functions if each is not None)
    except RuntimeError:  # a leaf under grad() can't be asked about
        return False


def _random_state(tensors: Any) -> Any:
    """What drawing a number would change."""
    found: list[Any] = [bytes(torch.default_generator.get_state().numpy())]
    for index in {each.device.index for each in tensors if each.is_cuda}:
        if not torch.cuda.is_current_stream_capturing():
            found.append(torch.cuda.default_generators[index].get_offset())
    return found


_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("identity_conv::backward", _backward_fake, lib=_library)


@functools.cache
def keep_those_of_methods() -> None:
    """Gives ``call_torchbind`` the rule of this module for the Autograd key, in place of torch's."""
    call_torchbind = torchbind.call_torchbind

    def rule(obj: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, torch.ScriptObject):  # the graph runs: what is in the method records itself
            return torchbind.call_torchbind_impl(obj, method, *args, **kwargs)
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            with torch._C._AutoDispatchBelowAutograd():
                return call_torchbind(obj, method, *args, **kwargs)
        name = f"{fakes.class_of(obj).replace('.', '::')}.{method}"
        return _call(name, True, (obj, *args), kwargs)

    schema_of = effects._get_schema

    def get_schema(op: Any, args: Any, kwargs: Any = None) -> Any:
        # A method's tuple is one return, and its effects' rule expects as many returns as it gets outputs.
        schema = schema_of(op, args, kwargs)
        if op is call_torchbind and len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TupleType):
            return types.SimpleNamespace(returns=schema.returns[0].type.elements())
        return schema

    effects._get_schema = get_schema
    call_torchbind.py_kernels[DispatchKey.Autograd] = rule
    for transform in (TransformType.Grad, TransformType.Jvp, TransformType.Vmap):
        call_torchbind.py_impl(transform)(_transformed)
    call_torchbind._dispatch_cache.clear()
    _keep_in_checkpoints(call_torchbind)


def _transformed(interpreter: Any, obj: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """A call in a graph under a transform of torch.func: the method itself knows it, where there is one."""
    if isinstance(obj, torch.ScriptObject):
        return torchbind.call_torchbind_impl(obj, method, *args, **kwargs)
    raise NotImplementedError(
        f"{fakes.class_of(obj).replace('.', '::')}.{method}: torch.func.{interpreter.key().name.lower()} of a method "
        "isn't traced by torch.compile or torch.export: transform the compiled or exported program, or call it "
        "outside (torch.compiler.disable)"
    )


def keep_those_of_operator(name: str) -> None:
    """The same for the operator `name`, which takes an object: torch asks Python where that is a fake."""
    op = fakes.operator(name)

    def rule(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)
        return _call(name, False, args, kwargs)

    for key in (DispatchKey.Autograd, DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA):
        if key not in op.py_kernels:
            op.py_impl(key)(rule)
    _keep_in_checkpoints(op)


def is_class_call(function: Any) -> bool:
    """Whether a dispatch mode is asked about a call of a class method."""
    return function is torchbind.call_torchbind


def call_class_method(obj: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """The call itself, in C++."""
    return torchbind.call_torchbind_impl(obj, method, *args, **kwargs)
