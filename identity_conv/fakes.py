"""Fakes derived from the loaded library: of classes, of operators that take an object; and who has none.

This module touches torch's private interfaces for custom classes and fakes; seen in torch 2.11, 2.13 and
2.14.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library import fake_class_registry
from torch._library.fake_class_registry import FakeScriptObject, global_fake_class_registry
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from . import registry

PREFIX = "__torch__.torch.classes."
_STATE_H = "#include <identity_conv/state.h> writes it from the fields"


def operator(name: str) -> Any:
    """The operator ``namespace::name.overload``, or ``namespace::name``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _schemas_by_class() -> dict[str, list[Any]]:
    """Each class's functions that take an object of it first: its methods, and static methods of some class."""
    schemas: dict[str, list[Any]] = {}
    for schema in torch._C._jit_get_custom_class_schemas():  # type: ignore[attr-defined]
        owner = schema.arguments[0].type.str() if schema.arguments else ""
        if owner.startswith(PREFIX):
            schemas.setdefault(owner.removeprefix(PREFIX), []).append(schema)
    return schemas


class _Fake:
    """What a derived fake class inherits: its methods run on a C++ object, rebuilt from the fake fields."""

    _copy_of_real: Callable[[], Any]

    def __init__(self, real: Any, fields: dict[str, Any]):
        # A field may have any name but this mangled one.
        self.__real = real
        for field, value in fields.items():
            if not hasattr(type(self), field):  # dynamo reads fields; where a method has the name, the method wins
                self.__dict__[field] = value

    @property
    def _real(self) -> Any:
        return self.__real


def derive(qualified: str) -> None:
    """Registers a fake for the class ``namespace.Class`` unless it has one.

    Its methods run on a C++ object rebuilt from the fake fields, so that tracing never changes the real one;
    they reach operators through the dispatcher, whose Meta kernels keep symbolic sizes.
    """
    _let_authors_replace()
    namespace, name = qualified.split(".", 1)
    if global_fake_class_registry.has_impl(f"{PREFIX}{qualified}"):
        return
    shown = f"{namespace}::{name}"
    real_class = getattr(getattr(torch.classes, namespace), name)
    # A static method may take an object of its class first; the class itself knows static methods alone.
    schemas = {each.name: each for each in _schemas_by_class()[qualified] if not _is_static(real_class, each.name)}
    if lacks := _lacks_of_flatten(schemas.get("__obj_flatten__")):
        warnings.warn(
            f'{shown} {lacks} and can\'t be exported or compiled: add .def("__obj_flatten__", ...) '
            f"that returns its fields as pairs of name and value; {_STATE_H}",
            stacklevel=2,
        )
        return
    methods = [
        method
        for method in schemas
        if method not in ("__init__", "__obj_flatten__", "__getstate__", "__setstate__", "__eq__", "__ne__", "__hash__")
    ]

    def unflatten(cls: type, flattened: Any) -> Any:
        _let_strict_export_keep_objects(shown)
        return cls(_rebuild(shown, real_class, schemas, _without_data(flattened)), dict(flattened))

    def copy(self: _Fake) -> Any:
        return _rebuild(shown, real_class, schemas, self._real.__obj_flatten__())

    body = {
        "__obj_unflatten__": classmethod(unflatten),
        "_copy_of_real": copy,
        **{each: _method(shown, each) for each in methods},
    }
    fake_class_registry.register_fake_class(shown, type(name, (_Fake,), body))  # type: ignore[arg-type]


def _lacks_of_flatten(schema: Any) -> str:
    """What is wrong with a class's ``__obj_flatten__``, as far as its schema tells."""
    if schema is None:
        return "has no __obj_flatten__"
    returned = schema.returns[0].type if schema.returns else None
    pairs = returned.elements() if isinstance(returned, torch.TupleType) else [returned]
    for pair in pairs:
        parts = pair.elements() if isinstance(pair, torch.TupleType) else []
        if len(parts) != 2 or parts[0].kind() != "StringType":
            return f"has an __obj_flatten__ that returns {returned.annotation_str if returned else 'nothing'}"
    return ""


def _is_static(real_class: Any, name: str) -> bool:
    try:
        getattr(real_class, name)
    except (AttributeError, RuntimeError):
        return False
    return not hasattr(type(real_class), name)


@functools.cache
def _let_authors_replace() -> None:
    """Lets a fake written by hand take a derived one's place, without torch's warning."""
    register = global_fake_class_registry.register

    def replace(qualified: str, fake_class: Any = None) -> None:
        if global_fake_class_registry.has_impl(qualified):
            before = global_fake_class_registry.get_impl(qualified)
            if isinstance(before, type) and issubclass(before, _Fake):
                global_fake_class_registry.deregister(qualified)
        register(qualified, fake_class)

    global_fake_class_registry.register = replace  # type: ignore[method-assign, assignment]


# --- tensors without data -------------------------------------------------------------------------


class _NoData(torch.Tensor):
    """A fake tensor with symbolic sizes, as C++ is given it.

    By itself it would give a null pointer to who reads its data (``const_data_ptr``), which ends the process:
    torch throws only where a tensor was made with elements. So this one is, and has its sizes then.
    """

    fake: torch.Tensor

    @staticmethod
    def __new__(cls, fake: torch.Tensor) -> _NoData:
        made = torch.Tensor._make_wrapper_subclass(
            cls, [1] * fake.dim(), dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad
        )
        with no_dispatch(), torch._C._AutoDispatchBelowADInplaceOrView(), _on_meta():
            torch.ops.aten.set_.source_Storage_storage_offset(
                made, made.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride()
            )
        return made

    def __init__(self, fake: torch.Tensor):
        self.fake = fake

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        out = func(*_with_data(args), **_with_data(kwargs or {}))
        same = {id(each.fake): each for each in inputs}  # what is changed in place is returned as it came
        return pytree.tree_map(lambda leaf: same[id(leaf)] if id(leaf) in same else _without_data(leaf), out)


def _run(method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a C++ method with fake tensors.

    torch answers ``sizes()`` and ``strides()`` of a fake tensor by fixing its sizes to those that it happens to have.
    That is refused here. But torch itself asks once for each tensor of a tuple that is returned, and forgets.

    Raises:
        RuntimeError: the method has asked.
    """
    from torch.fx.experimental.sym_node import SymNode  # slow to import, and here already

    handlers, guard_int = fake_tensor._DISPATCH_META_HANDLERS, SymNode.guard_int
    answers = {each: handlers[each] for each in (torch.ops.aten.size.default, torch.ops.aten.stride.default)}
    asked: Counter[str] = Counter()

    def hint(node: Any) -> int:
        asked[str(node.expr)] += 1
        return node.hint or 1

    def by_dispatch(op: Any, arguments: Any) -> Any:  # torch 2.11 and 2.13
        numbers = arguments[0].size() if op is torch.ops.aten.size.default else arguments[0].stride()
        if all(isinstance(each, int) or each.node.maybe_as_int() is not None for each in numbers):
            return answers[op](arguments)
        return tuple(each if isinstance(each, int) else hint(each.node) for each in numbers)

    def by_guard(node: Any, file: str, line: int) -> int:  # torch 2.14
        if file.endswith("SymbolicShapeMeta.cpp") and node.maybe_as_int() is None:
            return hint(node)
        return guard_int(node, file, line)

    handlers.update({op: functools.partial(by_dispatch, op) for op in answers})
    SymNode.guard_int = by_guard  # type: ignore[method-assign, assignment]
    try:
        result = _with_data(method(*_without_data(args), **_without_data(kwargs)))
    finally:
        handlers.update(answers)
        SymNode.guard_int = guard_int  # type: ignore[method-assign]
    returned = pytree.tree_leaves(result) if isinstance(result, tuple) else []
    tensors = [leaf for leaf in returned if isinstance(leaf, torch.Tensor)]
    numbers: list[Any] = [each for tensor in tensors for each in (*tensor.size(), *tensor.stride())]
    if asked - Counter(str(each.node.expr) for each in numbers if isinstance(each, torch.SymInt)):
        raise RuntimeError("sizes() of a tensor with symbolic sizes/strides")
    return result


@contextmanager
def _on_meta() -> Iterator[None]:
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)


def _without_data(tree: Any) -> Any:
    def wrap(fake: Any) -> Any:
        symbolic = fake.layout == torch.strided and any(isinstance(size, torch.SymInt) for size in fake.shape)
        return _NoData(fake) if symbolic else fake

    return pytree.tree_map_only(fake_tensor.FakeTensor, wrap, tree)


def _with_data(tree: Any) -> Any:
    return pytree.tree_map_only(_NoData, lambda tensor: tensor.fake, tree)


def _in_dynamo() -> bool:
    """Whether torch.compile, or a strict export, reads Python code here."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    return dynamo is not None and getattr(dynamo.tls, "current_tx", None) is not None


def _let_strict_export_keep_objects(shown: str) -> None:
    """Lets a program of ``torch.export(..., strict=True)`` have the object where torch leaves its fake.

    To be called while it traces: by then its module is imported, which takes long.
    """
    if not (torch.compiler.is_exporting() and _in_dynamo()):
        return
    trace = sys.modules["torch.export._trace"]
    remap = trace._remap_constants
    if remap.__module__ == __name__:
        return
    if torch.__version__ < (2, 13):  # type: ignore[operator]
        raise NotImplementedError(
            f"{shown}: torch {torch.__version__} can't export a module with an object where strict=True: use "
            "identity_conv.export, or torch.export.export(..., strict=False)"
        )

    @functools.wraps(remap, assigned=())
    def remap_and_unwrap(attributes: Any, signature: Any, constants: dict[str, Any]) -> None:
        remap(attributes, signature, constants)
        for name, value in constants.items():
            if isinstance(value, FakeScriptObject):
                constants[name] = value.real_obj

    trace._remap_constants = remap_and_unwrap  # type: ignore[attr-defined]


# --- a copy of an object --------------------------------------------------------------------------

_way_of: dict[str, int] = {}  # by class: what made a right copy the last time


def _rebuild(shown: str, real_class: Any, schemas: dict[str, Any], flattened: Any) -> Any:
    """A C++ object that flattens to `flattened`: by constructor keywords, by order, or by ``__setstate__``.

    Raises:
        TypeError: none of them gives those fields again.
    """
    causes: list[str] = []
    ways = list(_ways(shown, real_class, schemas, flattened))
    first = _way_of.get(shown, 0)
    for index in sorted(range(len(ways)), key=lambda each: each != first):
        what, make = ways[index]
        try:
            copy = make()
            again = copy.__obj_flatten__()
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError) as error:
            causes.append(
                f"{what}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
            )
            continue
        wrong = _differences(flattened, again)
        if not wrong:
            _way_of[shown] = index
            return copy
        causes.append(f"{what}: {', '.join(wrong)} came back different")
    parameters = [argument.name for argument in schemas["__init__"].arguments[1:]] if "__init__" in schemas else []
    raise TypeError(
        f"{shown}: no fake can be derived, since no copy of an object flattens to the fields "
        f"{[field for field, _ in flattened]} again (the constructor takes {parameters}; {'; '.join(causes)}): give "
        f"the constructor the names of __obj_flatten__ (torch::arg), or register a fake class by hand; {_STATE_H}"
    )


def _ways(
    shown: str, real_class: Any, schemas: dict[str, Any], flattened: Any
) -> Iterator[tuple[str, Callable[[], Any]]]:
    fields = dict(flattened)
    values = [value for _, value in flattened]
    if "__init__" in schemas:
        yield "by keywords", lambda: real_class(**fields)
        yield "by order", lambda: real_class(*values)
    if "__setstate__" in schemas:
        # What def_pickle takes isn't known, but few things are likely.
        states = [values[0]] if len(values) == 1 else [tuple(values)]
        for state in [*states, fields, tuple(flattened), values]:
            yield "by __setstate__", functools.partial(_from_state, shown, state)


def _from_state(shown: str, state: Any) -> Any:
    obj: Any = torch.ScriptObject.__new__(torch.ScriptObject)
    obj.__setstate__((state, PREFIX + shown.replace("::", ".")))
    return obj


def _differences(flattened: Any, again: Any) -> list[str]:
    """The names of the fields that aren't the same, tensors by identity or, made anew, by what a fake has."""
    one, other = dict(flattened), dict(again)
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    mine = [leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, torch.Tensor)]
    return [field for field in one if not _same(one[field], other[field], mine)]


def _same(one: Any, other: Any, mine: list[Any]) -> bool:
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    if spec != other_spec:
        return False
    for leaf, its in zip(leaves, others, strict=True):
        if leaf is its:
            continue
        if isinstance(leaf, torch.Tensor) or isinstance(its, torch.Tensor):
            if not (isinstance(leaf, torch.Tensor) and isinstance(its, torch.Tensor)):
                return False
            # Another field's tensor in its place is a swap, however alike they are.
            if any(its is each for each in mine) or _meta(leaf) != _meta(its):
                return False
        elif type(leaf) is not type(its) or not (leaf == its or (leaf != leaf and its != its)):
            return False
    return True


def _meta(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout


# --- a method -------------------------------------------------------------------------------------

#: What torch says to a kernel that looks at the sizes, strides or data of a fake tensor.
_LOOKED = (
    "with symbolic sizes/strides",
    "Cannot access data pointer",
    "data is not allocated yet",
)


def _has_looked(error: RuntimeError) -> bool:
    from torch.fx.experimental import symbolic_shapes  # slow to import, and here already

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        symbolic_shapes.GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds) or any(text in str(error) for text in _LOOKED)


def _method(shown: str, name: str) -> Callable[..., Any]:
    method = f"{shown}.{name}"

    def call(self: _Fake, *args: Any, **kwargs: Any) -> Any:
        _refuse_lost_state_gradient(self, method, args, kwargs)
        args, kwargs = pytree.tree_map(functools.partial(_behind, method), (args, kwargs))
        try:
            if torch._C._is_any_autocast_enabled():
                _refuse_lost_autocast(self, shown, name, args, kwargs)
            given = _without_data((args, kwargs))
            before = versions(given)
            result = _run(getattr(self._real, name), *given)
        except RuntimeError as error:
            if not _has_looked(error):
                raise
            raise RuntimeError(
                f"{method} asks for the sizes, strides or data of a tensor that has none while it is traced "
                f"({str(error).strip().splitlines()[0]}): use sym_size and sym_sizes, leave data to operators with a "
                "Meta kernel, or register a fake class by hand (torch._library.register_fake_class)"
            ) from error
        if versions(given) != before:
            raise NotImplementedError(
                f"{method} changes a tensor that it is given, which no graph knows of, and may order or leave out: "
                "return a fresh tensor, or call it outside of the compiled region (torch.compiler.disable)"
            )
        _refuse_what_graphs_do_not_carry(method, result)
        return result

    call.__name__ = name
    return call


def versions(tree: Any) -> list[int]:
    """Of each tensor, a number that grows where the tensor is changed in place."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _behind(caller: str, leaf: Any) -> Any:
    """The C++ object behind a derived fake, where `leaf` is one."""
    fake = _derived(leaf)
    if isinstance(leaf, FakeScriptObject) and fake is None:
        raise NotImplementedError(
            f"{caller} takes an object whose fake class was written by hand: write the caller's fake too "
            "(torch.library.register_fake for an operator, torch._library.register_fake_class for a class)"
        )
    return leaf if fake is None else fake._real


def _refuse_what_graphs_do_not_carry(method: str, result: Any) -> None:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            raise NotImplementedError(
                f"{method} returns an object of a class, which no graph carries: return its tensors and numbers"
            )
    parts = result if isinstance(result, tuple | list) else [result]
    if _in_dynamo() and (bad := next((each for each in parts if isinstance(each, dict | str)), None)) is not None:
        raise NotImplementedError(
            f"{method} returns a {type(bad).__name__}, which torch.compile can't carry: return a tuple or list of "
            "tensors and numbers, or call it outside of the compiled region (torch.compiler.disable)"
        )


class _Recorder(TorchDispatchMode):
    """Notes the operators that are called, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        self.seen.append((func, [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def _refuse_lost_autocast(fake: _Fake, shown: str, name: str, args: Any, kwargs: Any) -> None:
    """For a method that autocast changes: a graph has the casts of what it shows, and calls methods without."""

    def operators() -> list[Any]:
        with _Recorder() as recorder:
            _run(getattr(fake._copy_of_real(), name), args, kwargs)
        return recorder.seen

    inside = operators()
    with torch._C._DisableAutocast():
        outside = operators()
    if inside != outside:
        raise NotImplementedError(
            f"{shown}.{name} calls operators that torch.autocast changes, and a graph can't carry that into a "
            "method: cast its arguments and call it under torch.autocast(..., enabled=False), or outside of the "
            "compiled region (torch.compiler.disable)"
        )


def _refuse_lost_state_gradient(fake: _Fake, name: str, args: Any, kwargs: Any) -> None:
    """For a method without a tensor, which torch doesn't ask the Autograd key about."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        from . import gradients

        gradients.refuse_lost_state_gradient(name, fake)


def class_of(obj: Any) -> str:
    """``namespace.Class`` of a real or a fake object."""
    name = obj.script_class_name if isinstance(obj, FakeScriptObject) else obj._type().qualified_name()
    return name.removeprefix(PREFIX)


def _derived(obj: Any) -> _Fake | None:
    obj = obj.wrapped_obj if isinstance(obj, FakeScriptObject) else obj
    return obj if isinstance(obj, _Fake) else None


def fields_of(obj: Any) -> list[tuple[str, Any]]:
    """The fields of a fake; of one written by hand, of the real object behind it."""
    fake = _derived(obj)
    real = fake._real if fake is not None else obj.real_obj if isinstance(obj, FakeScriptObject) else obj
    return list(real.__obj_flatten__()) if hasattr(real, "__obj_flatten__") else []


def fingerprint(obj: Any) -> Any:
    """Differs where a method has changed a derived fake's state; None for one written by hand."""
    fake = _derived(obj)
    if fake is None:
        return None

    def key(value: Any) -> Any:
        return (id(value), value._version) if isinstance(value, torch.Tensor) else repr(value)

    return pytree.tree_map(key, fake._real.__obj_flatten__())


# --- operators ------------------------------------------------------------------------------------


def watch_operator(name: str) -> None:
    """Sees to the operator ``namespace::name.overload`` of a loaded library where it is traced.

    One without a Meta kernel or a fake is named, with what to write; one that takes an object runs its Meta
    kernel on the C++ object behind a derived fake.
    """
    from . import gradients

    op = operator(name)
    takes_object = any(argument.type.str().startswith(PREFIX) for argument in op._schema.arguments)

    def rule(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if takes_object and not _has_python_fake(plain) and (key := _meta_key(plain)):
                return _run_meta(mode, func, key, args, kwargs or {})
            return mode.__torch_dispatch__(func, types, args, kwargs)
        except fake_tensor.UnsupportedOperatorException as error:
            if error.func is not func:
                raise
            # Not by this error's type, whose text dynamo replaces.
            raise RuntimeError(_without_fake(func)) from None

    plain = name.removesuffix(".default")
    # One that lives on through a reload of its library has its rule.
    if torch._library.simple_registry.singleton.find(plain).torch_dispatch_rules.find(FakeTensorMode) is None:
        torch.library.register_torch_dispatch(plain, FakeTensorMode, rule)
    if takes_object:  # with a fake of one torch asks here
        op.py_impl(FakeTensorMode)(lambda mode, *args, **kwargs: rule(mode, op, (), args, kwargs))
        gradients.keep_those_of_operator(name)


def _has_python_fake(name: str) -> bool:
    return torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


def _meta_key(name: str) -> str | None:
    """Under which key the operator has a kernel that runs without data."""
    keys = ("Meta", "CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return next((key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)), None)


def _run_meta(mode: FakeTensorMode, func: Any, key: str, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map(functools.partial(_behind, str(func)), (args, kwargs))
    with mode:
        return _run(functools.partial(func._op_dk, getattr(torch._C.DispatchKey, key)), args, kwargs)


def _without_fake(func: Any) -> str:
    schema = func._schema
    namespace, _, short = schema.name.partition("::")
    tensor = next((each.name for each in schema.arguments if each.type.str() == "Tensor"), "x")
    arguments = ", ".join(each.name for each in schema.arguments)
    return (
        f"{schema.name} has no Meta kernel and no fake, so it can't be traced by torch.compile or torch.export. "
        f"If its output is like argument {tensor}, write\n"
        f"  C++:    TORCH_LIBRARY_IMPL({namespace}, Meta, m) {{ "
        f'identity_conv::output_like(m, "{short}", "{tensor}"); }}  // <identity_conv/output_like.h>\n'
        f'  Python: extension.output_like("{short}", "{tensor}")\n'
        "and else\n"
        f'  @torch.library.register_fake("{schema.name}")\n'
        f"  def _({arguments}): return torch.empty(...)"
    )


def output_like(name: str, argument: str) -> None:
    """Registers a fake for the operator ``namespace::name``: its output is like the tensor `argument`.

    Raises:
        ValueError: it has no tensor argument of that name, or doesn't return one tensor.
        AttributeError: there is no such operator.
    """
    if registry.schema_of(name) is None:
        space, _, short = name.partition("::")
        own = [each.partition("::")[2] for each in registry.operators() if each.startswith(f"{space}::")]
        raise AttributeError(f"there is no operator {name}{registry.meant(short, own, f'{space}::')}")
    schema = operator(name)._schema
    if reason := registry.unlike(schema, argument):
        raise ValueError(f"{name}: {reason}")
    index = [each.name for each in schema.arguments].index(argument)

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = args[index] if index < len(args) else kwargs.get(argument)
        if given is None:
            raise ValueError(f"{name}: {argument} must be a tensor, since the output is like it, got None")
        return torch.empty_like(given)

    torch.library.register_fake(name, fake)
