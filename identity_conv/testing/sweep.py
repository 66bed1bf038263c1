"""The inputs that every check run looks at: one at least of each kind that a wrong kernel was seen to need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import values
from .plan import TensorPlan

#: One dtype of each width, floating where there is one.
WIDTHS = (torch.float32, torch.uint8, torch.bfloat16, torch.float64, torch.complex128)

_SPECIALS_APART = 17  # odd, so that each special value meets each lane of a vector


def plain(dtypes: Sequence[torch.dtype], *, full: bool) -> Iterator[TensorPlan]:
    """Row-major tensors of ordinary size: every dtype, every special value at every place of a vector."""
    for dtype in dtypes:
        special = list(values.specials(dtype))
        shapes = ((64,), (7, 5), (3, 4, 5), (37,)) if full else ((37,), (3, 5))
        for seed, shape in enumerate(shapes):
            yield TensorPlan(shape, dtype, seed=seed)
        count = len(special) * _SPECIALS_APART
        numbers = 2 if dtype.is_complex else 1
        cells = tuple((at, special[at % len(special)]) for at in range(count))
        yield TensorPlan((-(-count // numbers),), dtype, cells=cells)
        # Each alone among ordinary numbers, at the edges.
        for name in special:
            yield TensorPlan((33,), dtype, cells=((0, name), (17, name), (-1, name)))
            if full:
                yield TensorPlan((4,), dtype, cells=tuple((at, name) for at in range(4 * numbers)))
                yield TensorPlan((5, 7), dtype, cells=((3, name),), permutation=(1, 0))
                yield TensorPlan((1,), dtype, cells=((0, name),))
        for seed in range(3 if full else 1):
            yield TensorPlan((1000,), dtype, seed=seed + 10)


def modes(dtypes: Sequence[torch.dtype]) -> Iterator[TensorPlan]:
    """Tensors as autograd may see them."""
    for dtype in dtypes:
        floating = dtype.is_floating_point or dtype.is_complex
        fields: dict[str, Any]
        for grad in ("leaf", "nonleaf", "inference") if floating and dtype.itemsize > 1 else ("inference",):
            for fields in ({}, {"permutation": (1, 0)}, {"padding": (0, 2)}):
                yield from _plan((3, 4), dtype, {**fields, "grad": grad})
            yield TensorPlan((), dtype, grad=grad)
            yield TensorPlan((0, 2), dtype, grad=grad)
        for fields in ({"conj": True}, {"neg": True}, {"conj": True, "neg": True}):
            for shape in ((3, 4), ()):
                yield from _plan(shape, dtype, fields)


def layouts(dtypes: Sequence[torch.dtype], *, full: bool) -> Iterator[TensorPlan]:
    """Every kind of layout and of two kinds together, in each width of element."""
    shared = min(3, len(dtypes))
    for turn, dtype in enumerate(dtypes):
        for shape in (
            (13,),
            (8, 16),
            (5, 3),
            (2, 3, 4),
            (2, 4, 3, 5),
            *(((3, 2, 2, 3, 2), (9,), (64, 3)) if full else ()),
        ):
            singles = list(_single(shape, dtype))
            for fields in singles:
                yield from _plan(shape, dtype, fields)
            pairs = itertools.combinations(singles, 2)
            # At full the dtypes share them, each in one at least.
            first_pair, every = (turn % shared, shared) if full else (0, 7)
            for first, second in itertools.islice(pairs, first_pair, None, every):
                if not first.keys() & second.keys():
                    yield from _plan(shape, dtype, {**first, **second})
        for shape in ((1, 5), (5, 1), (1, 4, 1), (1, 1), (2, 1, 3), (1,), (1, 3, 1, 2)):
            for stride in (0, 1, 2, 7, 1000):
                yield from _plan(shape, dtype, {"unit_stride": stride})
            yield from _plan(shape, dtype, {"permutation": tuple(reversed(range(len(shape))))})
        eight = (2, 1, 2, 3, 2, 1, 2, 2)
        for fields in (
            {"permutation": (7, 6, 5, 4, 3, 2, 1, 0)},
            {"step": (1, 1, 2, 1, 1, 1, 2, 1)},
            {"padding": (0, 0, 1, 0, 0, 0, 0, 3)},
            {"expand": (1, 4)},
            {"permutation": (3, 1, 0, 2, 7, 5, 4, 6), "offset": 3},
        ):
            yield from _plan(eight, dtype, fields)
        for rank in (5, 6, 7, 9, 12) if full else (6, 9):
            shape = (2, 3) + (2,) * (rank - 2)
            for fields in (
                {"permutation": tuple(reversed(range(rank)))},
                {"step": (2,) * rank},
                {"expand": (rank - 1,)},
            ):
                yield from _plan(shape, dtype, fields)
        for shape in ((0, 4), (3, 0, 2), (2, 0, 1, 3)):
            for fields in _single(shape, dtype):
                yield from _plan(shape, dtype, fields)


def layouts_of_each(dtypes: Sequence[torch.dtype]) -> Iterator[TensorPlan]:
    """A few layouts in every dtype, whatever its width."""
    for dtype in dtypes:
        for shape, fields in (
            ((5, 6), {"permutation": (1, 0)}),
            ((5, 6), {"padding": (0, 2), "offset": 1}),
            ((5, 6), {"step": (1, 2)}),
            ((5, 6), {"expand": (0,)}),
            ((40,), {"misalignment": dtype.itemsize}),
        ):
            yield from _plan(shape, dtype, fields)


def _single(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The fields of one kind of layout each."""
    rank = len(shape)
    orders = list(itertools.permutations(range(rank)))[1:]
    if len(orders) > 6:
        orders = [orders[0], orders[-1], orders[len(orders) // 2], orders[len(orders) // 3], orders[-2]]
    yield from ({"permutation": order} for order in orders)
    for offset in (1, 3, 4, 16):
        yield {"offset": offset}
    for dim in range(rank):
        only = [each == dim for each in range(rank)]
        yield {"step": tuple(2 if each else 1 for each in only)}
        yield {"padding": tuple(1 if each else 0 for each in only)}
        yield {"expand": (dim,)}
    if rank:
        yield {"step": (3,) * rank}
        yield {"padding": (0,) * (rank - 1) + (5,)}
        yield {"padding": (2,) * rank}
    if rank > 1:
        yield {"expand": tuple(range(rank))}
        yield {"expand": (0, rank - 1)}
        for windows in (1, 2):
            yield {"windows": windows}
    for misalignment in {dtype.itemsize, 3 * dtype.itemsize, 16 + dtype.itemsize} - {64}:
        yield {"misalignment": misalignment}
    if rank == 4:
        yield {"memory_format": torch.channels_last}
    if rank == 5:
        yield {"memory_format": torch.channels_last_3d}
    if dtype.is_complex:
        yield {"conj": True}
    yield {"neg": True}


def large(dtypes: Sequence[torch.dtype]) -> Iterator[TensorPlan]:
    """Layouts of tensors large enough for threads and for vectors with a tail."""
    for dtype in dtypes:
        for shape, fields in (
            ((301, 517), {}),
            ((301, 517), {"permutation": (1, 0)}),
            ((301, 517), {"padding": (0, 3)}),
            ((301, 517), {"padding": (0, 3), "offset": 1}),
            ((301, 517), {"step": (1, 2)}),
            ((301, 517), {"step": (3, 5)}),
            ((301, 517), {"expand": (0,)}),
            ((301, 517), {"expand": (1,)}),
            ((301, 517), {"windows": 2}),
            ((155_617,), {"misalignment": dtype.itemsize}),
            ((155_617,), {"offset": 1}),
            ((155_617,), {"step": (2,)}),
            ((4, 30, 66, 20), {"memory_format": torch.channels_last}),
            ((4, 30, 66, 20), {"memory_format": torch.channels_last, "padding": (0, 0, 0, 3)}),
            ((4, 30, 66, 20), {"permutation": (3, 1, 0, 2)}),
            ((3, 5, 7, 40, 40), {"step": (1, 2, 1, 1, 2)}),
            # Over two million elements.
            ((2063, 1025), {}),
            ((2063, 1025), {"permutation": (1, 0)}),
            ((2063, 1025), {"padding": (0, 1)}),
        ):
            yield from _plan(shape, dtype, fields)


def sizes(dtypes: Sequence[torch.dtype], *, full: bool) -> Iterator[TensorPlan]:
    """Empty, 0-d, every small length, edges of tiles, high ranks, one long dimension."""
    for dtype in dtypes:
        for shape in (
            (),
            (0,),
            (0, 3),
            (3, 0),
            (2, 0, 3),
            (0, 0),
            (1, 0, 1, 1),
            (1,),
            (1, 1),
            (1,) * 8,
            (2,) * 8,
            (1, 2) * 4,
        ):
            yield TensorPlan(shape, dtype)
        for rank in (3, 5, 6, 7, 9, 12, 16) if full else (5, 9):
            yield TensorPlan((2,) * min(rank, 10) + (1,) * (rank - 10), dtype)
        for length in range(2, 300 if full else 70):
            yield TensorPlan((length,), dtype)
        for power in range(7, 18 if full else 13):
            for beside in (-1, 0, 1, 3):
                yield TensorPlan(((1 << power) + beside,), dtype)
        for rows, columns in itertools.product((1, 2, 3, 7), (1, 2, 5, 8, 17, 33, 64)) if full else ((7, 17), (3, 33)):
            yield TensorPlan((rows, columns), dtype)
            yield TensorPlan((2, rows, columns), dtype)
            yield TensorPlan((1, rows, 3, columns), dtype)
            yield TensorPlan((rows, 1, columns), dtype)
    for dtype in dtypes[:3] if full else ():
        for shape in (
            (5, 129),
            (5, 1000),
            (1000, 5),
            (257, 3),
            (3, 2049),
            (33, 1025),
            (16, 512),
            (4, 4, 300),
            (300, 4, 4),
        ):
            yield TensorPlan(shape, dtype)
            yield from _plan(shape, dtype, {"padding": (0,) * (len(shape) - 1) + (1,)})
            yield from _plan(shape, dtype, {"permutation": tuple(reversed(range(len(shape))))})
    for dtype in dtypes if full else dtypes[:1]:
        for shape in ((65_535,), (65_536,), (65_537,), (100_003,)):
            yield TensorPlan(shape, dtype)
    for dtype in dtypes[:3] if full else ():
        for shape in (
            (65_537, 2),
            (2, 65_537),
            (70_000, 1),
            (1, 70_000),
            (65_537, 1, 2),
            (1, 65_537, 1, 1),
            ((1 << 20) + 3,),
        ):
            yield TensorPlan(shape, dtype)
            yield from _plan(shape, dtype, {"padding": (0,) * (len(shape) - 1) + (1,)})
            if len(shape) > 1:
                yield from _plan(shape, dtype, {"permutation": tuple(reversed(range(len(shape))))})
    if full:
        yield TensorPlan(((1 << 24) + 5,), torch.uint8 if torch.uint8 in dtypes else dtypes[0])


def several(count: int, dtype: torch.dtype, *, full: bool) -> Iterator[tuple[TensorPlan, ...]]:
    """Several tensors that differ: in layout, and in shape so far as they broadcast."""
    if count < 2:
        return
    fields: tuple[dict[str, Any], ...] = (
        {}, {"permutation": (1, 0)}, {"offset": 1}, {"padding": (0, 3)}, {"step": (1, 2)}, {"expand": (0,)},
        {"expand": (1,)}, {"windows": 1}, {"padding": (1, 0), "offset": 3},
    )  # fmt: skip
    larger = ((70, 1001),) if full else ()

    def with_one(at: int, one: TensorPlan, shape: tuple[int, ...]) -> tuple[TensorPlan, ...]:
        return tuple(one if index == at else TensorPlan(shape, dtype, seed=index + 1) for index in range(count))

    for at in range(count):
        for shape in ((4, 6), *larger):
            for each in fields[1:]:
                yield with_one(at, TensorPlan(shape, dtype, **each), shape)
            rows, columns = shape
            for smaller in ((1, columns), (rows, 1), (columns,), (1,), (), (1, 1)):
                yield with_one(at, TensorPlan(smaller, dtype), shape)
        yield with_one(at, TensorPlan((3, 4, 6), dtype), (4, 6))
        yield with_one(at, TensorPlan((1, 6), dtype), (0, 6))
        yield with_one(at, TensorPlan((0,), dtype), (4, 1))
    for turn in range(1, len(fields)):
        yield tuple(
            TensorPlan((4, 6), dtype, seed=index, **fields[(turn + 3 * index) % len(fields)]) for index in range(count)
        )


def places(count: int, dtype: torch.dtype) -> Iterator[tuple[TensorPlan, ...]]:
    """Tensors in one storage: the same, one behind the other, transposed, partly over each other."""
    same = TensorPlan((4, 4), dtype)
    for other in (
        same,
        TensorPlan((4, 4), dtype, permutation=(1, 0)),
        TensorPlan((4, 4), dtype, offset=16),
        TensorPlan((4, 4), dtype, offset=1),
        TensorPlan((4, 4), dtype, expand=(0,)),
    ):
        yield (same, *[other] * (count - 1))
        yield (*[other] * (count - 1), same)


def grids(dtypes: Sequence[torch.dtype]) -> Iterator[TensorPlan]:
    """Shapes for which a grid of blocks gets near a limit, whichever dimension it is laid over."""
    for dtype in dtypes:
        for shape in (
            ((1 << 20) + 3, 3),
            (3, (1 << 20) + 3),
            ((1 << 17) + 1, 17),
            (2, 65_537, 3),
            (65_537, 2, 3),
            (2, 3, 65_537),
            (65_536, 64),
            ((1 << 25) + 1,),
        ):
            yield TensorPlan(shape, dtype)
            for fields in (
                {"padding": (0,) * (len(shape) - 1) + (1,)},
                {"permutation": tuple(reversed(range(len(shape))))},
            ):
                yield from _plan(shape, dtype, fields)


def _plan(shape: tuple[int, ...], dtype: torch.dtype, fields: dict[str, Any]) -> Iterator[TensorPlan]:
    """The plan, where there is such a one."""
    try:
        yield TensorPlan(shape, dtype, **fields)
    except ValueError:
        return
