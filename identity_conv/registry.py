"""What is registered with torch in this process: operators, custom classes, namespaces; and what can't be right.

This module touches what is private in torch for that; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

_CLASSES = "__torch__.torch.classes."


@dataclass(frozen=True)
class Registrations:
    """What loading a library adds to a process."""

    operators: dict[str, str]  # namespace::name.overload of those with a schema, and the schema
    classes: frozenset[str]  # namespace.Name
    owned: frozenset[str]  # namespaces of TORCH_LIBRARY: one library in a process may have each
    namespaces: frozenset[str]
    without_schema: frozenset[str] = frozenset()  # operators that it has kernels for, and no schema

    @property
    def names(self) -> frozenset[str]:
        """All that may be registered once, as one writes it."""
        return frozenset({*self.operators, *(name.replace(".", "::", 1) for name in self.classes), *self.owned})

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return {name: value if isinstance(value, dict) else sorted(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Any) -> Registrations:
        """What `to_json` gave.

        Raises:
            ValueError: `value` is something else.
        """
        if not isinstance(value, dict) or set(value) != {each.name for each in fields(cls)}:
            raise ValueError(f"no registrations: {value!r}")
        sets = {name: frozenset(names) for name, names in value.items() if name != "operators"}
        return cls(dict(value["operators"]), **sets)


def operators() -> set[str]:
    """Every operator, as ``namespace::name.overload`` or ``namespace::name``; also those without a schema."""
    return set(torch._C._dispatch_get_all_op_names())


def methods() -> Counter[str]:
    """Of every custom class that has a method, as ``namespace.Class``, how many it has."""
    owners = (
        schema.arguments[0].type.str()
        for schema in torch._C._jit_get_custom_class_schemas()  # type: ignore[attr-defined]
        if schema.arguments
    )
    return Counter(owner.removeprefix(_CLASSES) for owner in owners if owner.startswith(_CLASSES))


def class_names() -> set[str]:
    """Every custom class that has a method, as ``namespace.Class``."""
    return set(methods())


def methods_of(name: str) -> list[str]:
    """The schemas of a custom class's methods, of ``namespace.Class``, without the object itself."""
    owner = _CLASSES + name
    schemas = (each for each in torch._C._jit_get_custom_class_schemas() if each.arguments)  # type: ignore[attr-defined]
    texts = (str(each) for each in schemas if each.arguments[0].type.str() == owner)
    texts = (re.sub(rf"\({re.escape(owner)} \w+(, )?", "(", text) for text in texts)
    return [re.sub(r" _\d+\b", "", text).replace(_CLASSES, "") for text in texts]


#: What a kernel may be registered for, of which a reader wants to know.
_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def kernels_of(operator: str) -> list[str]:
    """The devices, and other dispatch keys, that an operator has kernels for; Meta also by a fake in Python."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [key for key in _KEYS if has(operator, key)]


def schema_of(operator: str) -> str | None:
    """The operator's schema, or None: a kernel, or a fake in Python, may be there without."""
    name, _, overload = operator.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return None
    return next(
        (str(each) for each in torch._C._jit_get_schemas_for_operator(name) if each.overload_name == overload), ""
    )


def is_owned(namespace: str) -> bool:
    """Whether a library has registered the namespace by TORCH_LIBRARY, or Python by "DEF"."""
    try:
        trial = torch.library.Library(namespace, "DEF")
    except RuntimeError:
        return True
    except ValueError:  # one that torch keeps for itself
        return False
    trial._destroy()
    return False


def of_loading(load: Callable[[], object], mentioned: frozenset[str] = frozenset()) -> Registrations:
    """Calls `load`, and says what that has registered.

    Args:
        mentioned: namespaces to look at beside those of the new operators and classes.
    """
    before = operators(), class_names()
    owned_before = {namespace for namespace in mentioned if is_owned(namespace)}
    load()
    new = operators() - before[0]
    classes = frozenset(class_names() - before[1])
    namespaces = frozenset({name.split("::")[0] for name in new} | {name.split(".")[0] for name in classes})
    owned = frozenset(filter(is_owned, namespaces | mentioned)) - owned_before
    schemas = {name: schema for name in sorted(new) if (schema := schema_of(name)) is not None}
    return Registrations(schemas, classes, owned, namespaces, frozenset(new - schemas.keys()))


# --- what can't be right, and torch takes in silence ----------------------------------------------


def mistake(registrations: Registrations) -> str:
    """What a library in this process registers that can't be right; empty where there is nothing."""
    for name in sorted({*registrations.operators, *registrations.classes}):
        if reason := hidden(name):
            return reason
    for name in sorted({*registrations.operators, *registrations.without_schema}):
        if reason := _mistake_of_kernels(name):
            return reason
    return ""


def hidden(name: str) -> str:
    """Why the operator ``namespace::name.overload``, or the class ``namespace.Class``, can't be reached, if so.

    ``torch.ops`` and ``torch.classes`` look names up as attributes, and their own come first. A traced graph calls
    its operators by the same road.
    """
    owner: Any
    if "::" in name:
        owner, shown = torch.ops, f"operator {name}"
        parts = [*re.split(r"::|\.", name), "default"][:3]
        steps = _STEPS_TO_OPERATOR
    else:
        owner, shown = torch.classes, f"class {name.replace('.', '::', 1)}"
        parts, steps = name.split(".", 1), _STEPS_TO_CLASS
    root = owner.__name__
    for part, (step, kind) in zip(parts, steps, strict=True):
        found = getattr(owner, part, None)
        if not isinstance(found, kind):
            taken = ", ".join(sorted(_own(owner, kind)))
            return (
                f"registers the {shown}, which can't be reached, since {root} has something of its own by that name: "
                f"{step} can't be called {taken}, or as Python's own attributes are (__doc__)"
            )
        owner = found
    return ""


#: What leads from torch.ops to an operator, from torch.classes to a class, and what torch keeps it as.
_STEPS_TO_OPERATOR: tuple[tuple[str, type], ...] = (
    ("a namespace", torch._ops._OpNamespace),
    ("an operator", torch._ops.OpOverloadPacket),
    ("an overload", torch._ops.OpOverload),
)
_STEPS_TO_CLASS: tuple[tuple[str, type], ...] = (
    ("a namespace", torch._classes._ClassNamespace),
    ("a class", torch._C.ScriptClass),  # type: ignore[attr-defined]
)


def attributes_of_namespaces() -> set[str]:
    """The names that nothing can have in ``torch.ops``, ``torch.classes`` and the namespaces there, beside Python's."""
    operators, classes = (kind for _, kind in (_STEPS_TO_OPERATOR[0], _STEPS_TO_CLASS[0]))
    return _own(torch.ops, operators) | _own(operators("")) | _own(torch.classes, classes) | _own(classes(""))


def _own(owner: object, found_there: type | None = None) -> set[str]:
    """The attributes that an object has of its own, without those that it was asked for and keeps."""
    kept = {name for name, value in vars(owner).items() if found_there and isinstance(value, found_there)}
    return {each for each in {*vars(owner), *dir(type(owner))} - kept if not each.startswith("__")}


def _mistake_of_kernels(operator: str) -> str:
    """What kernels of <identity_conv/autograd.h> and <identity_conv/output_like.h> say that their operator isn't."""
    kernels = torch._C._dispatch_dump(operator)  # of every library that has one
    for where, said in re.findall(r"registered at (.*), identity_conv::differentiable\((.*?)\)", kernels):
        if said != operator:
            return f"doesn't fit: the gradient registered at {where} for {operator} has the kOperator {said}"
    name, _, overload = operator.partition(".")
    if schema_of(operator) is None:
        return ""
    for where, said in re.findall(r"registered at (.*), identity_conv::output_like\((.*?)\)", kernels):
        if reason := unlike(torch._C._get_schema(name, overload), said):
            return f"doesn't fit: output_like registered at {where} for {operator}: {reason}"
    return ""


def unlike(schema: torch.FunctionSchema, argument: str) -> str:
    """Why an operator's output can't be like the argument of that name, as far as its schema tells."""
    tensors = [each.name for each in schema.arguments if str(each.type) in ("Tensor", "Optional[Tensor]")]
    if argument not in tensors:
        there = ", ".join(tensors) or "none"
        return f"argument must be one of its tensors, {there}; got {argument!r}{meant(argument, tensors)}"
    if [str(each.type) for each in schema.returns] != ["Tensor"]:
        return f"only an operator that returns one tensor has an output like an argument: {schema}"
    return ""


def meant(given: str, there: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about a name that isn't there: the one that is spelt nearest, with `prefix`."""
    nearest = difflib.get_close_matches(given, list(there), n=1)
    return f", or is {prefix}{nearest[0]} meant?" if nearest else ""
