"""Fake classes derived from the loaded library, and the gradient rule for class calls.

This is the one module that touches torch's private interfaces for custom classes; seen in torch
2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops import torchbind
from torch._library import fake_class_registry

_PREFIX = "__torch__.torch.classes."


def class_names() -> set[str]:
    """Every custom class registered in this process, as ``namespace.Class``."""
    return set(_methods_by_class())


def _methods_by_class() -> dict[str, list[Any]]:
    methods: dict[str, list[Any]] = {}
    for schema in torch._C._jit_get_custom_class_schemas():  # type: ignore[attr-defined]
        owner = schema.arguments[0].type.str() if schema.arguments else ""
        if owner.startswith(_PREFIX):
            methods.setdefault(owner.removeprefix(_PREFIX), []).append(schema)
    return methods


def derive(qualified: str) -> None:
    """Registers a fake for the class ``namespace.Class`` unless it has one.

    The fake's methods run on a C++ copy of the object, rebuilt from its flattened fields, so that
    tracing never changes the real one; the C++ methods reach operators through the dispatcher, whose
    Meta kernels keep symbolic sizes.
    """
    namespace, name = qualified.split(".", 1)
    if fake_class_registry.global_fake_class_registry.has_impl(f"{_PREFIX}{qualified}"):
        return
    schemas = {schema.name: schema for schema in _methods_by_class()[qualified]}
    if "__obj_flatten__" not in schemas:
        return  # torch itself names the class and the method when tracing meets it
    real_class = getattr(getattr(torch.classes, namespace), name)
    parameters = [argument.name for argument in schemas["__init__"].arguments[1:]]
    methods = [method for method in schemas if not method.startswith("__")]

    def unflatten(cls: type, flattened: Any) -> Any:
        fields = dict(flattened)
        if set(parameters) != set(fields):
            raise TypeError(
                f"{qualified}: no fake can be derived, since its constructor takes {parameters} and "
                f"__obj_flatten__ gives {sorted(fields)}: name both alike (torch::arg), or register a fake class"
            )
        fake = cls()
        fake._copy = real_class(**fields)
        for field, value in fields.items():
            if field not in methods:
                setattr(fake, field, value)
        return fake

    def method(method_name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._copy, method_name)(*args, **kwargs)

        call.__name__ = method_name
        return call

    body = {"__obj_unflatten__": classmethod(unflatten), **{each: method(each) for each in methods}}
    fake_class_registry.register_fake_class(f"{namespace}::{name}", type(name, (), body))  # type: ignore[arg-type]


@functools.cache
def keep_gradients_of_class_calls() -> None:
    """Lets gradients through class methods that run under ``torch.compile``.

    torch's own rule for ``call_torchbind`` and the Autograd key detaches: parameters before the call
    get no gradient, without a word. Where grad is wanted the method runs as it does in eager, and
    the operators inside it record themselves.
    """
    call_torchbind = torchbind.call_torchbind
    torchs_rule = call_torchbind.py_kernels[DispatchKey.Autograd]

    def rule(obj: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return torchbind.call_torchbind_impl(obj, method, *args, **kwargs)
        return torchs_rule(obj, method, *args, **kwargs)

    call_torchbind.py_kernels[DispatchKey.Autograd] = rule
    call_torchbind._dispatch_cache.clear()


def is_class_call(function: Any) -> bool:
    """Whether a dispatch mode is asked about a call of a class method."""
    return function is torchbind.call_torchbind


def call_class_method(obj: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """The call itself, in C++."""
    return torchbind.call_torchbind_impl(obj, method, *args, **kwargs)
