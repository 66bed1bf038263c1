"""An object of a custom class, described by what its constructor takes.

torch's list of custom classes is private; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .plan import TensorPlan

_PREFIX = "__torch__.torch.classes."


@dataclasses.dataclass(frozen=True)
class State:
    """An object of a custom class, with plans where its constructor takes Tensors.

    Args:
        name: ``namespace.Class``.
        fields: the constructor's arguments in its order, by name.

    Example::

        >>> print(State("my_ops.IdentityConvClass", {"channels": 3}).build())
        IdentityConvClass(channels=3)
    """

    name: str
    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.removeprefix(_PREFIX))

    @staticmethod
    def parameters(cls: Any) -> tuple[Any, ...]:
        """What the constructor of a class takes, as ``torch.Argument``.

        Args:
            cls: ``torch.classes.namespace.Class``, or ``namespace.Class``.

        Raises:
            ValueError: no such class is registered, or it has no constructor.
        """
        name = State.name_of(cls)
        for schema in torch._C._jit_get_custom_class_schemas():  # type: ignore[attr-defined]
            owner = schema.arguments[0].type.str() if schema.arguments else ""
            if schema.name == "__init__" and owner == _PREFIX + name:
                return tuple(schema.arguments[1:])
        raise ValueError(f"cls must be a registered custom class that has a constructor, got {name}")

    @staticmethod
    def name_of(cls: Any) -> str:
        """``namespace.Class`` of a class of ``torch.classes``, or of that name."""
        if isinstance(cls, str):
            return cls.removeprefix(_PREFIX).replace("::", ".")
        if isinstance(cls, torch.ScriptClass):  # type: ignore[attr-defined]
            # The wrapper keeps its name to itself, but says it when it is called wrongly.
            try:
                cls(**{"no argument has this name": None})
            except (RuntimeError, TypeError) as error:
                found = re.search(rf"__init__\({re.escape(_PREFIX)}([\w.]+) ", str(error))
                if found:
                    return found.group(1)
        raise ValueError(f"cls must be a class of torch.classes, or its name as namespace.Class, got {cls!r}")

    def build(self, device: torch.device | str = "cpu") -> Any:
        """The object, its Tensors on `device`; the constructor's own error where it refuses."""
        namespace, _, name = self.name.partition(".")
        arguments = replaced(
            list(self.fields.values()), lambda plan: plan.build(device), lambda state: state.build(device)
        )
        return getattr(getattr(torch.classes, namespace), name)(*arguments)


def replaced(value: Any, tensor: Callable[[TensorPlan], Any], state: Callable[[State], Any]) -> Any:
    """`value` with `tensor` of each plan and `state` of each state in its place, also within lists and dicts."""
    if isinstance(value, TensorPlan):
        return tensor(value)
    if isinstance(value, State):
        return state(value)
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(item, tensor, state) for item in value)
    if isinstance(value, Mapping):
        return {key: replaced(item, tensor, state) for key, item in value.items()}
    return value
