"""One call of an operator, described: its arguments, with plans where tensors go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .plan import SharedStorage, TensorPlan
from .state import replaced


@dataclasses.dataclass(frozen=True, repr=False)
class Call:
    """The arguments of a call, each Tensor (also in lists) as a `TensorPlan`, each object of a class as a `State`.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        shared: whether all tensors lie in one storage (see `SharedStorage`).

    Example::

        >>> import torch
        >>> call = Call((TensorPlan((2,)),), {"alpha": 2})
        >>> args, kwargs = call.build()
        >>> args[0].shape, kwargs
        (torch.Size([2]), {'alpha': 2})
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(self.args))
        if self.shared:
            SharedStorage(self.plans)

    def __repr__(self) -> str:
        given = [repr(self.args)]
        if self.kwargs:
            given.append(repr(dict(self.kwargs)))
        if self.shared:
            given.append("shared=True")
        return f"Call({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis and IPython would name every field of a dataclass

    @property
    def plans(self) -> tuple[TensorPlan, ...]:
        """Every plan, in the order of the arguments."""
        return tuple(plans_in((self.args, self.kwargs)))

    def fill(
        self, tensors: Iterable[torch.Tensor], device: torch.device | str = "cpu"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors`, in the order of `plans`, in the places of the plans, and states on `device`."""
        rest = iter(tensors)
        return replaced((self.args, dict(self.kwargs)), lambda plan: next(rest), lambda state: state.build(device))

    def replace(self, plans: Iterable[TensorPlan]) -> Call:
        """The same call with other plans, in the order of `plans`."""
        rest = iter(plans)
        args, kwargs = replaced((self.args, dict(self.kwargs)), lambda plan: next(rest), lambda state: state)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def build(self, device: torch.device | str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, built on `device`."""
        if self.shared:
            return self.fill(SharedStorage(self.plans).build(device), device)
        return self.fill((plan.build(device) for plan in self.plans), device)


def plans_in(value: Any) -> Iterator[TensorPlan]:
    """The plans in an argument, or in several."""
    if isinstance(value, TensorPlan):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from plans_in(item)
    elif isinstance(value, Mapping):
        yield from plans_in(tuple(value.values()))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
