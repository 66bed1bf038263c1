"""How inputs are drawn: once, for hypothesis and for the fixed corpus.

Each function takes its choices from a `Source` and is written so that the smallest choices give the
dullest input: what a shrinker arrives at.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from . import values
from .plan import GRADS, SharedStorage, TensorPlan

T = TypeVar("T")

#: The kinds of layout, each a field or two of a plan; the dullest first.
LAYOUTS = (
    "permuted", "offset", "stepped", "padded", "expanded", "misaligned", "overlapping", "channels_last",
    "unit_stride", "conj", "neg",
)  # fmt: skip

#: Ranks as often as they are worth it; the smallest first.
_RANKS = (0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 2, 3, 4, 2, 6, 8)
_SIZES = (1, 2, 3, 4, 5, 7, 8, 1, 9, 16, 17, 32, 33, 64)


class Source(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both allowed; the dullest is the one nearest to 0."""

    def pick(self, among: Sequence[T]) -> T:
        """One of `among`; the first is the dullest."""


class RandomSource:
    """Choices that depend on a seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        # Small ranges evenly; in wide ones every magnitude is as likely.
        if high - low < 64:
            return self._random.randint(low, high)
        return low + min(high - low, self._random.randrange(1 << self._random.randint(1, (high - low).bit_length())))

    def pick(self, among: Sequence[T]) -> T:
        return self._random.choice(among)


def shape(
    source: Source,
    *,
    min_rank: int = 0,
    max_rank: int = 8,
    max_numel: int = 4096,
    tile: Sequence[int] = (),
    empty: bool = True,
) -> tuple[int, ...]:
    """Sizes; the number of elements is drawn as one number, so that a threshold of it is found exactly."""
    numel = source.integer(0 if empty else 1, max_numel)
    rank = source.pick([rank for rank in _RANKS if min_rank <= rank <= max_rank] or range(min_rank, max_rank + 1))
    if rank == 0:
        return ()
    long = source.integer(0, rank - 1)
    left = max(numel, 1)
    sizes = []
    for _ in range(rank - 1):
        size = min(source.pick(_SIZES), left)
        left //= size
        sizes.append(size)
    if tile and numel:
        left = _edge_below(left, source.pick(tile), source.pick((1, 0, -1)))
    sizes.insert(rank - 1 - long, left if numel else 0)
    return tuple(sizes)


def _edge_below(size: int, tile: int, beside: int) -> int:
    """The greatest number up to `size` that is a multiple of `tile`, or one beside it.

    It is below, so that a shrinker that gives the tile up keeps what needs a size.
    """
    edge = (size - beside) // tile * tile + beside
    return edge if edge > 0 else size


def kinds_possible(sizes: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """The kinds of layout that a tensor can have."""
    rank, longer = len(sizes), any(size > 1 for size in sizes)
    possible = {
        "permuted": rank > 1,
        "offset": True,
        "stepped": longer,
        "padded": rank > 0,
        "expanded": rank > 0,
        "misaligned": True,
        "overlapping": rank > 1 and sizes[-2] > 1 and sizes[-1] > 1,
        "channels_last": rank in (4, 5),
        "unit_stride": 1 in sizes,
        "conj": dtype.is_complex,
        "neg": dtype in values.NEGATABLE,
    }
    return [kind for kind in LAYOUTS if possible[kind]]


def layout(
    source: Source, sizes: tuple[int, ...], dtype: torch.dtype, kinds: Sequence[str] = LAYOUTS
) -> dict[str, Any]:
    """Fields of a plan that place it in memory: none, or those of up to three kinds."""
    fields: dict[str, Any] = {}
    possible = [kind for kind in kinds_possible(sizes, dtype) if kind in kinds]
    for _ in range(source.integer(0, min(3, len(possible)))):
        kind = source.pick(possible)
        fields.update(_LAYOUT[kind](source, sizes, dtype))
        possible = [other for other in possible if _go_together(kind, other, dtype)]
        if not possible:
            break
    return fields


# Kinds that a plan refuses together, or whose mixture would say nothing more.
_APART = (
    {"permuted", "channels_last", "overlapping"},
    {"stepped", "overlapping"},
    {"stepped", "expanded"},
    {"padded", "overlapping"},
    {"expanded", "overlapping"},
)


def _go_together(one: str, other: str, dtype: torch.dtype) -> bool:
    if dtype is torch.complex32 and {one, other} == {"conj", "neg"}:
        return False
    return one != other and not any({one, other} <= group for group in _APART)


def _permuted(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    rest = list(range(len(sizes)))
    order: list[int] = []
    # From the innermost outwards, taking the outermost that is left: the dullest is the reverse.
    while rest:
        order.append(rest.pop(source.integer(0, len(rest) - 1) if len(rest) > 1 else 0))
    return {"permutation": tuple(reversed(order))} if order[::-1] != sorted(order) else {}


def _one_dim(source: Source, among: Sequence[int], rank: int, value: int, otherwise: int) -> tuple[int, ...]:
    """`value` at one dimension, the innermost being the dullest, `otherwise` elsewhere."""
    at = source.pick(list(reversed(among)))
    return tuple(value if dim == at else otherwise for dim in range(rank))


def _stepped(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    among = [dim for dim, size in enumerate(sizes) if size > 1]
    step = source.pick((2, 3, 5))
    if len(among) > 1 and source.pick((False, False, True)):
        return {"step": tuple(step if dim in among else 1 for dim in range(len(sizes)))}
    return {"step": _one_dim(source, among, len(sizes), step, 1)}


def _padded(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"padding": _one_dim(source, range(len(sizes)), len(sizes), source.pick((1, 2, 3, 4, 5, 7, 8, 16)), 0)}


def _offset(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"offset": source.pick((1, 2, 3, 4, 5, 8, 15, 16, 17))}


def _expanded(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    among = [dim for dim, size in enumerate(sizes) if size > 1] or list(range(len(sizes)))
    dims = {source.pick(among)}
    if len(among) > 1 and source.pick((False, False, True)):
        dims.add(source.pick(among))
    return {"expand": tuple(sorted(dims))}


def _misaligned(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    # Half of them off 16 bytes by one element, the rest anywhere below 64.
    return {"misalignment": dtype.itemsize * source.pick((1, source.integer(1, 64 // dtype.itemsize - 1)))}


def _overlapping(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"windows": source.integer(1, min(sizes[-1] - 1, 5))}


def _channels_last(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"memory_format": torch.channels_last if len(sizes) == 4 else torch.channels_last_3d}


def _unit_stride(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"unit_stride": source.pick((0, 1, 2, 7, 100_000))}


def _conj(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"conj": True}


def _neg(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"neg": True}


_LAYOUT = {
    "permuted": _permuted,
    "offset": _offset,
    "stepped": _stepped,
    "padded": _padded,
    "expanded": _expanded,
    "misaligned": _misaligned,
    "overlapping": _overlapping,
    "channels_last": _channels_last,
    "unit_stride": _unit_stride,
    "conj": _conj,
    "neg": _neg,
}


def cells(source: Source, count: int, dtype: torch.dtype) -> tuple[tuple[int, str], ...]:
    """Up to three special values among `count` numbers, at the edges or anywhere."""
    names = list(values.specials(dtype))
    found: dict[int, str] = {}
    for _ in range(source.integer(0, 3) if count else 0):
        position = source.pick((0, -1, None))
        found[source.integer(0, count - 1) if position is None else position] = source.pick(names)
    return tuple(found.items())


def plan(
    source: Source,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    *,
    kinds: Sequence[str] = LAYOUTS,
    fields: Mapping[str, Any] | None = None,
    special: bool = True,
    grads: Sequence[str] = GRADS[:1],
) -> TensorPlan:
    """A plan of given sizes and dtype: a layout (unless its `fields` are given), values, how autograd sees it."""
    if not (dtype.is_floating_point or dtype.is_complex):
        grads = [grad for grad in grads if grad in ("none", "inference")] or GRADS[:1]
    placed = layout(source, sizes, dtype, kinds) if fields is None else fields
    grad = source.pick(grads) if len(grads) > 1 else grads[0]
    drawn = TensorPlan(sizes, dtype, **placed, seed=source.integer(0, 1000), grad=grad)
    found = cells(source, drawn.numbers, dtype) if special else ()
    return dataclasses.replace(drawn, cells=found) if found else drawn


def broadcast_from(source: Source, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that broadcast to `sizes`: the same, or with dimensions of 1 or without the first ones."""
    if not sizes or source.pick((True, False)):
        return sizes
    kept = tuple(source.pick((size, 1)) for size in sizes)
    return kept[source.integer(0, len(kept)) :]


def shared_storage(
    source: Source, dtype: torch.dtype, *, count: int = 2, max_numel: int = 256, kinds: Sequence[str] = LAYOUTS
) -> SharedStorage:
    """Tensors in one storage, of which each starts at an offset of its own."""
    seed = source.integer(0, 1000)
    plans: list[TensorPlan] = []
    inside = [kind for kind in kinds if kind not in ("misaligned", "offset")]
    for _ in range(count):
        same = bool(plans) and source.pick((True, False))
        sizes = plans[-1].shape if same else shape(source, max_numel=max_numel)
        fields = layout(source, sizes, dtype, inside)
        plans.append(TensorPlan(sizes, dtype, offset=source.integer(0, 32), seed=seed, **fields))
    return SharedStorage(tuple(plans))
