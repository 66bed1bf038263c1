"""How inputs are drawn: once, for hypothesis and for the fixed corpus.

Each function takes its choices from a `Source` and is written so that the smallest choices give the
dullest input: what a shrinker arrives at.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
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

_SIZES = (1, 2, 3, 4, 5, 7, 8, 1, 9, 16, 17, 32, 33, 64)


# Whether to go on. A choice before each piece, in place of their number before all, lets a shrinker cut a piece out.
# For the same reason a piece makes the same number of choices whatever was chosen before, from ranges that don't
# depend on it: what follows a piece that goes must keep its meaning.
_RARELY, _OFTEN, _MOSTLY = (False, False, True), (False, True, True), (False, *(True,) * 11)


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
    at = source.integer(0, 7)
    edge = (source.pick(tile), source.pick((1, 0, -1))) if tile else None
    sizes: list[int] = []
    while len(sizes) < min_rank or (len(sizes) < max_rank and source.pick(_OFTEN if sizes else _MOSTLY)):
        sizes.append(source.pick(_SIZES))
    if not sizes:
        return ()
    # One dimension takes the elements that the others leave.
    long = _from_the_end(range(len(sizes)), at)
    left = max(numel, 1)
    for dim in range(len(sizes)):
        if dim != long:
            sizes[dim] = min(sizes[dim], left)
            left //= sizes[dim]
    if edge and numel:
        left = _edge_below(left, *edge)
    sizes[long] = left if numel else 0
    return tuple(sizes)


def _from_the_end(among: Sequence[T], at: int) -> T:
    return among[-1 - at % len(among)]


def _edge_below(size: int, tile: int, beside: int) -> int:
    """The greatest number up to `size` that is a multiple of `tile`, or one beside it.

    It is below, so that a shrinker that gives the tile up keeps what needs a size.
    """
    edge = (size - beside) // tile * tile + beside
    return edge if edge > 0 else size


def layout(
    source: Source, sizes: tuple[int, ...], dtype: torch.dtype, kinds: Sequence[str] = LAYOUTS
) -> dict[str, Any]:
    """Fields of a plan that place it in memory: none, or those of up to four of `kinds`, where they are possible."""
    fields: dict[str, Any] = {}
    done: list[str] = []
    kinds = [*kinds, *(kind for kind in _SELDOM_POSSIBLE if kind in kinds)]
    while kinds and len(done) < 4 and source.pick(_OFTEN if done else _MOSTLY):
        at = source.integer(0, len(kinds) - 1)
        # The one drawn, or else the next one that this tensor can have: so a draw is seldom lost, and means the same
        # whatever was drawn before.
        kind = next((kind for kind in kinds[at:] + kinds[:at] if _LAYOUT[kind][0](sizes, dtype)), None)
        if kind is not None and all(_go_together(kind, other, dtype) for other in done):
            fields.update(_LAYOUT[kind][1](source, sizes, dtype))
            done.append(kind)
    return fields


_SELDOM_POSSIBLE = ("channels_last", "channels_last", "overlapping", "overlapping", "conj")

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
    dims = tuple(range(len(sizes)))
    number = source.pick((0, 1, 2, source.integer(0, math.factorial(8) - 1)))
    if number == 0:
        order = dims[::-1]
    elif number == 1:
        order = (*dims[:-2], dims[-1], dims[-2])
    elif number == 2:
        order = (*dims[1:], dims[0])
    else:
        rest, drawn = list(dims), []
        while rest:
            number, at = divmod(number, len(rest))
            drawn.append(rest.pop(at))
        order = tuple(drawn)
    return {"permutation": order} if order != dims else {}


def _stepped(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    among = [dim for dim, size in enumerate(sizes) if size > 1]
    step, everywhere, at = source.pick((2, 3, 5)), source.pick(_RARELY), source.integer(0, 7)
    stepped = among if everywhere else [_from_the_end(among, at)]
    return {"step": tuple(step if dim in stepped else 1 for dim in range(len(sizes)))}


def _padded(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    cells, at = source.pick((1, 2, 3, 4, 5, 7, 8, 16)), source.integer(0, 7)
    padded = _from_the_end(range(len(sizes)), at)
    return {"padding": tuple(cells if dim == padded else 0 for dim in range(len(sizes)))}


def _offset(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"offset": source.pick((1, 2, 3, 4, 5, 8, 15, 16, 17))}


def _expanded(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    among = [dim for dim, size in enumerate(sizes) if size > 1] or list(range(len(sizes)))
    several, at = source.pick(_RARELY), source.integer(0, 7)
    dims = {_from_the_end(among, at), _from_the_end(among, at + several)}
    return {"expand": tuple(sorted(dims))}


def _misaligned(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    # Half of them off 16 bytes by one element, the rest anywhere below 64.
    elements = source.pick((1, source.integer(1, 63)))
    return {"misalignment": dtype.itemsize * (1 + (elements - 1) % (64 // dtype.itemsize - 1))}


def _overlapping(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"windows": min(source.pick((1, 2, 3, 4, 5)), sizes[-1] - 1)}


def _channels_last(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"memory_format": torch.channels_last if len(sizes) == 4 else torch.channels_last_3d}


def _unit_stride(source: Source, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"unit_stride": source.pick((0, 1, 2, 7, 100_000))}


def _is_longer(sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    return any(size > 1 for size in sizes)


# Of each kind: whether a tensor can have it, and the fields that give it.
_LAYOUT: dict[str, tuple[Callable[..., bool], Callable[..., dict[str, Any]]]] = {
    "permuted": (lambda sizes, dtype: len(sizes) > 1, _permuted),
    "offset": (lambda sizes, dtype: True, _offset),
    "stepped": (_is_longer, _stepped),
    "padded": (lambda sizes, dtype: len(sizes) > 0, _padded),
    "expanded": (lambda sizes, dtype: len(sizes) > 0, _expanded),
    "misaligned": (lambda sizes, dtype: True, _misaligned),
    "overlapping": (lambda sizes, dtype: len(sizes) > 1 and sizes[-2] > 1 and sizes[-1] > 1, _overlapping),
    "channels_last": (lambda sizes, dtype: len(sizes) in (4, 5), _channels_last),
    "unit_stride": (lambda sizes, dtype: 1 in sizes, _unit_stride),
    "conj": (lambda sizes, dtype: dtype.is_complex, lambda *_: {"conj": True}),
    "neg": (lambda sizes, dtype: dtype in values.NEGATABLE, lambda *_: {"neg": True}),
}


def cells(source: Source, drawn: TensorPlan) -> tuple[tuple[int, str], ...]:
    """Up to four special values of a plan, at the edges or anywhere."""
    names, count = special_names(drawn), drawn.numbers
    found: dict[int, str] = {}
    while len(found) < 4 and source.pick(_OFTEN):
        where, anywhere, name = source.pick((0, -1, None)), source.integer(0, 9999), source.pick(names)
        if not count:
            return ()
        found[anywhere % count if where is None else where] = name
    return tuple(found.items())


def special_names(drawn: TensorPlan) -> list[str]:
    """The special values that a plan can have and torch can read.

    Through the conjugate or negative bit torch reads by arithmetic, which loses a NaN's sign and payload
    in some dtypes, and a zero's sign in some complex ones, here in a vector and there in its tail.
    """
    lost = ("nan", "-nan", "payload", "snan", "0", "-0") if drawn.conj or drawn.neg else ()
    return [name for name in values.specials(drawn.dtype) if name not in lost]


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
    found = cells(source, drawn) if special else ()
    return dataclasses.replace(drawn, cells=found) if found else drawn


def broadcast_from(source: Source, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that broadcast to `sizes`: the same, or with dimensions of 1 or without the first ones."""
    if source.pick((True, False)):
        return sizes
    ones, dropped = source.integer(0, 255), source.integer(0, 8)
    kept = tuple(1 if ones >> dim & 1 else size for dim, size in enumerate(sizes))
    return kept[min(dropped, len(kept)) :]


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
