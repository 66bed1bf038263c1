"""Inputs that are always the same: every kind of layout, of dtype, of value. For a start, and without hypothesis."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from . import draws, schema, values
from .call import Call
from .plan import GRADS, TensorPlan

#: Shapes and places in memory, each with something that kernels get wrong.
_PLACES: tuple[dict[str, Any], ...] = (
    {"shape": (7,)},
    {"shape": (5, 7), "permutation": (1, 0)},
    {"shape": (33,), "offset": 1},
    {"shape": (6, 9), "step": (1, 2)},
    {"shape": (4, 13), "padding": (0, 3)},
    {"shape": (3, 8), "expand": (0,)},
    {"shape": ()},
    {"shape": (4, 33), "misalignment": 16},
    {"shape": (6, 4), "windows": 1},
    {"shape": (2, 3, 5, 4), "memory_format": torch.channels_last},
    {"shape": (0,)},
    {"shape": (1, 6, 1), "unit_stride": 7},
    {"shape": (4, 6), "conj": True},
    {"shape": (3, 11), "neg": True},
    {"shape": (1000,), "step": (3,)},
    {"shape": (3, 0, 2)},
    {"shape": (65, 31), "step": (2, 3), "offset": 5},
    {"shape": (8, 5), "expand": (1,)},
    {"shape": (2, 3, 4), "permutation": (2, 0, 1), "padding": (1, 0, 2)},
    {"shape": (1,), "offset": 3},
    {"shape": (2, 2, 3, 4, 2), "memory_format": torch.channels_last_3d},
    {"shape": (1, 2, 1, 3, 2, 1, 2, 2), "permutation": (7, 6, 5, 4, 3, 2, 1, 0)},
    {"shape": (4096,)},
    {"shape": (17, 255), "padding": (0, 1), "misalignment": 32},
    {"shape": (2, 300), "windows": 7, "offset": 2},
    {"shape": (5, 6), "expand": (0, 1), "offset": 4},
    {"shape": (12, 10), "permutation": (1, 0), "step": (2, 1), "neg": True},
    {"shape": (1, 1), "unit_stride": 0},
    {"shape": (3, 5, 7), "padding": (0, 2, 0), "conj": True},
    {"shape": (257,), "seed": 2},
)


def plans(
    *,
    dtypes: Sequence[torch.dtype] = values.DTYPES,
    kinds: Sequence[str] = draws.LAYOUTS,
    special: bool = True,
    grads: Sequence[str] = GRADS[:1],
) -> Iterator[TensorPlan]:
    """Each place in memory with each dtype; any beginning of them holds many of both.

    Args:
        dtypes: of the plans.
        kinds: layouts that the plans may have.
        special: whether some have special cells.
        grads: how autograd sees the tensors, in turn.
    """
    turn = itertools.cycle(grads)
    turns: Counter[torch.dtype] = Counter()
    for round_ in range(len(dtypes)):
        for index, place in enumerate(_PLACES):
            fitting = [dtype for dtype in dtypes if _fits(place, dtype)]
            if not fitting:
                continue
            dtype = fitting[(index + round_) % len(fitting)]
            plan = _placed(place, dtype, seed=len(_PLACES) * round_ + index)
            if not set(plan.kinds) & {*draws.LAYOUTS} <= set(kinds):
                continue
            if special and plan.numbers and index % 3 == round_ % 3:
                names, begin = draws.special_names(plan), turns[dtype]
                places = dict.fromkeys(at % plan.numbers for at in (0, 1, 2, -2, -1))
                cells = {at: names[(begin + number) % len(names)] for number, at in enumerate(places)}
                turns[dtype] += len(cells)
                plan = dataclasses.replace(plan, cells=tuple(cells.items()))
            grad = next(turn)
            if grad in ("leaf", "nonleaf") and not (dtype.is_floating_point or dtype.is_complex):
                grad = "none"
            yield dataclasses.replace(plan, grad=grad)


def _fits(place: Mapping[str, Any], dtype: torch.dtype) -> bool:
    return (not place.get("conj") or dtype.is_complex) and (not place.get("neg") or dtype in values.NEGATABLE)


def _placed(place: Mapping[str, Any], dtype: torch.dtype, seed: int) -> TensorPlan:
    fields = {"seed": seed, **place}
    if "misalignment" in place and dtype.itemsize < 16:
        fields["misalignment"] += dtype.itemsize
    return TensorPlan(dtype=dtype, **fields)


def calls(
    op: Any,
    reference: Callable[..., Any] | None = None,
    *,
    count: int = 200,
    dtypes: Sequence[torch.dtype] = values.DTYPES,
    kinds: Sequence[str] = draws.LAYOUTS,
    special: bool = True,
    grads: Sequence[str] = GRADS[:1],
    share: bool = True,
    given: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    **of_shape: Any,
) -> Iterator[Call]:
    """Calls of an operator: half with every Tensor from `plans`, the other half drawn from fixed seeds.

    Args:
        op: as of ``strategies.calls``; a ``schema.Binding`` too.
        reference: take only what this takes too.
        count: how many.
        dtypes: of the Tensors.
        kinds: layouts of the Tensors.
        special: whether the Tensors may hold special values.
        grads: how autograd may see the Tensors.
        share: whether several Tensors may lie in one storage.
        given: of arguments by name, a function that gives the value.
        of_shape: arguments of ``draws.shape``, for the drawn half.

    Raises:
        ValueError: as of ``strategies.calls``.
    """
    binding = op if isinstance(op, schema.Binding) else schema.bind(op, reference)
    options: dict[str, Any] = {"dtypes": dtypes, "kinds": kinds, "special": special, "grads": grads, "given": given}
    listed = plans(dtypes=dtypes, kinds=kinds, special=special, grads=grads)
    for index in range(count):
        source = draws.RandomSource(index)
        place = next(listed, None) if index % 2 == 0 else None
        drawn = schema.call(source, binding, share=share and place is None, **options, **of_shape)
        if place is not None:
            drawn = drawn.replace(dataclasses.replace(place, seed=place.seed + at) for at in range(len(drawn.plans)))
        yield drawn
