"""hypothesis strategies for tensors, calls, objects and the state that a call meets.

Wherever an argument is a value it may be a strategy for such values. Everything shrinks to what is
dull: first what a tensor is (its layout, rank, sizes), then its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

try:
    from hypothesis import reject
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "identity_conv.testing.strategies needs hypothesis: pip install 'identity-conv[testing]'"
    ) from error

from . import draws, schema, values
from .call import Call
from .context import GRAD_MODES, Context
from .plan import GRADS, SharedStorage, TensorPlan
from .state import State

T = TypeVar("T")


class _Choices:
    """The choices of `draws`, taken from hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(_integers(low, high)) if low < high else low

    def pick(self, among: Sequence[T]) -> T:
        return among[self._draw(_integers(0, len(among) - 1)) if len(among) > 1 else 0]


_integers = functools.lru_cache(maxsize=None)(st.integers)


def _drawn(draw: st.DrawFn, value: Any) -> Any:
    return draw(value) if isinstance(value, st.SearchStrategy) else value


@st.composite
def dtypes(
    draw: st.DrawFn, among: Sequence[torch.dtype] | st.SearchStrategy[Sequence[torch.dtype]] = values.DTYPES
) -> torch.dtype:
    """Dtypes, all that ``torch.clone`` copies if not told otherwise.

    Shrinks to the first, which is float32 by default.

    Args:
        among: those that are drawn from.

    Raises:
        ValueError: `among` is empty, or has one that ``torch.clone`` doesn't copy.
    """
    return _Choices(draw).pick(_checked_dtypes(_drawn(draw, among)))


def _checked_dtypes(among: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    unknown = [dtype for dtype in among if dtype not in values.DTYPES]
    if unknown or not among:
        raise ValueError(f"dtypes must be some that torch.clone copies, got {unknown or among!r}")
    return among


@st.composite
def shapes(
    draw: st.DrawFn,
    *,
    min_rank: int | st.SearchStrategy[int] = 0,
    max_rank: int | st.SearchStrategy[int] = 8,
    max_numel: int | st.SearchStrategy[int] = 4096,
    tile: int | Sequence[int] | st.SearchStrategy[int] = (),
    empty: bool | st.SearchStrategy[bool] = True,
) -> tuple[int, ...]:
    """Sizes of a tensor.

    Shrinks to few dimensions and few elements; what needs a number of elements shrinks to just that
    number, in one dimension if it may.

    Args:
        min_rank: fewest dimensions.
        max_rank: most dimensions.
        max_numel: most elements.
        tile: sizes that the kernel works in; half and more of the longest sizes are then a multiple
            of one, or one more or less.
        empty: whether sizes may be 0.

    Raises:
        ValueError: an argument allows no shape.
    """
    of_shape = {
        "min_rank": _drawn(draw, min_rank),
        "max_rank": _drawn(draw, max_rank),
        "max_numel": _drawn(draw, max_numel),
        "tile": _drawn(draw, tile),
        "empty": _drawn(draw, empty),
    }
    return draws.shape(_Choices(draw), **_checked_shape(**of_shape))


def _checked_shape(**of_shape: Any) -> dict[str, Any]:
    if isinstance(of_shape.get("tile"), int):
        of_shape["tile"] = (of_shape["tile"],)
    low, high = of_shape.get("min_rank", 0), of_shape.get("max_rank", 8)
    if not 0 <= low <= high:
        raise ValueError(f"shapes: min_rank must be from 0 to max_rank, got {low} and {high}")
    if of_shape.get("max_numel", 1) < 1:
        raise ValueError(f"shapes: max_numel must be 1 or more, got {of_shape['max_numel']}")
    if any(size < 1 for size in of_shape.get("tile", ())):
        raise ValueError(f"shapes: tile must be 1 or more, got {of_shape['tile']}")
    return of_shape


def _checked_kinds(kinds: Sequence[str]) -> Sequence[str]:
    unknown = [kind for kind in kinds if kind not in draws.LAYOUTS]
    if unknown:
        raise ValueError(f"kinds must be of {', '.join(draws.LAYOUTS)}, got {', '.join(unknown)}")
    return kinds


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]],
    dtype: torch.dtype | st.SearchStrategy[torch.dtype] = torch.float32,
    *,
    kinds: Sequence[str] | st.SearchStrategy[Sequence[str]] = draws.LAYOUTS,
) -> dict[str, Any]:
    """The fields of a `TensorPlan` that place a tensor in memory, of up to three kinds at once.

    Shrinks to none, which is a dense tensor.

    Args:
        shape: the tensor's sizes.
        dtype: the tensor's dtype.
        kinds: which of ``draws.LAYOUTS`` to use, where shape and dtype allow it.
    """
    sizes, chosen = tuple(_drawn(draw, shape)), _drawn(draw, dtype)
    return draws.layout(_Choices(draw), sizes, chosen, _checked_kinds(_drawn(draw, kinds)))


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]] | None = None,
    dtype: torch.dtype | st.SearchStrategy[torch.dtype] | None = None,
    layout: dict[str, Any] | st.SearchStrategy[dict[str, Any]] | None = None,
    kinds: Sequence[str] | st.SearchStrategy[Sequence[str]] = draws.LAYOUTS,
    special: bool | st.SearchStrategy[bool] = True,
    grad: str | st.SearchStrategy[str] = "none",
) -> TensorPlan:
    """Plans of tensors.

    Shrinks what the tensor is first (dtype, sizes, layout), then its values.

    Args:
        shape: sizes, `shapes()` by default.
        dtype: `dtypes()` by default.
        layout: fields as of `layouts`; drawn by default.
        kinds: which layouts to draw.
        special: whether there may be special cells.
        grad: how autograd sees the tensor; a dtype without gradients gets "none" in place of those.

    Example::

        >>> from hypothesis import find
        >>> find(plans(), lambda plan: "stepped" in plan.kinds)
        TensorPlan((2,), torch.float32, step=(2,))
    """
    source = _Choices(draw)
    chosen = _drawn(draw, dtypes() if dtype is None else dtype)
    sizes = draws.shape(source) if shape is None else tuple(_drawn(draw, shape))
    grads = (_drawn(draw, grad),)
    cells: bool = _drawn(draw, special)
    if layout is not None:
        # Only the values are left to draw.
        return draws.plan(source, sizes, chosen, fields=_drawn(draw, layout), special=cells, grads=grads)
    return draws.plan(source, sizes, chosen, kinds=_checked_kinds(_drawn(draw, kinds)), special=cells, grads=grads)


def tensors(device: torch.device | str | st.SearchStrategy[Any] = "cpu", **of_plan: Any) -> st.SearchStrategy[Any]:
    """Tensors, built of plans.

    Args:
        device: where, or a strategy of it.
        of_plan: the arguments of `plans`.
    """
    devices = device if isinstance(device, st.SearchStrategy) else st.just(device)
    return st.builds(lambda plan, where: plan.build(where), plans(**of_plan), devices)


@st.composite
def broadcastable(
    draw: st.DrawFn,
    count: int | st.SearchStrategy[int] = 2,
    *,
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Shapes that broadcast to each other: the first is the result's.

    Shrinks to equal shapes.

    Args:
        count: how many.
        shape: the first, `shapes()` by default.
    """
    source = _Choices(draw)
    result = draws.shape(source) if shape is None else tuple(_drawn(draw, shape))
    return (result, *(draws.broadcast_from(source, result) for _ in range(_drawn(draw, count) - 1)))


@st.composite
def shared_storage(
    draw: st.DrawFn,
    count: int | st.SearchStrategy[int] = 2,
    *,
    dtype: torch.dtype | st.SearchStrategy[torch.dtype] | None = None,
    max_numel: int | st.SearchStrategy[int] = 256,
    kinds: Sequence[str] | st.SearchStrategy[Sequence[str]] = draws.LAYOUTS,
) -> SharedStorage:
    """Groups of tensors in one storage, some overlapping.

    Shrinks to dense tensors at the same place.

    Args:
        count: how many tensors.
        dtype: of all of them, `dtypes()` by default.
        max_numel: most elements of a tensor.
        kinds: which layouts to draw.
    """
    return draws.shared_storage(
        _Choices(draw),
        _drawn(draw, dtypes() if dtype is None else dtype),
        count=_drawn(draw, count),
        max_numel=_drawn(draw, max_numel),
        kinds=_checked_kinds(_drawn(draw, kinds)),
    )


@st.composite
def states(draw: st.DrawFn, cls: Any, **fields: Any) -> State:
    """Objects of a custom class, described by its constructor's arguments, which are drawn by type.

    Arguments that the constructor refuses are passed over. Shrinks every argument to its dullest.

    Args:
        cls: ``torch.classes.namespace.Class``, or ``"namespace.Class"``.
        fields: of arguments by name, a value or a strategy in place of one by type.

    Raises:
        ValueError: no such class, no such argument, or a type that can't be drawn.
    """
    own = {name: functools.partial(_drawn, draw, value) for name, value in fields.items()}
    found = schema.state(_Choices(draw), cls, lambda: draw(plans()), own)
    try:
        found.build()
    except (RuntimeError, ValueError, TypeError):
        reject()
    return found


_AUTOCAST = st.sampled_from([None, torch.bfloat16])


@st.composite
def contexts(
    draw: st.DrawFn,
    device: str | st.SearchStrategy[str] = "cpu",
    *,
    grad: str | st.SearchStrategy[str] | None = None,
    autocast: torch.dtype | st.SearchStrategy[torch.dtype | None] | None = _AUTOCAST,
    side_stream: bool | st.SearchStrategy[bool] | None = None,
) -> Context:
    """What surrounds a call: grad mode, autocast, and on CUDA a side stream.

    Shrinks to nothing particular.

    Args:
        device: where the call is.
        grad: "enabled", "disabled" or "inference"; any of them by default.
        autocast: autocast's dtype, None for no autocast.
        side_stream: whether to use a side stream; on CUDA sometimes by default.
    """
    source, where = _Choices(draw), _drawn(draw, device)
    mode = source.pick(GRAD_MODES) if grad is None else _drawn(draw, grad)
    cast = _drawn(draw, autocast)
    if side_stream is None:
        side_stream = torch.device(where).type == "cuda" and source.pick((False, True))
    return Context(where, grad=mode, autocast=cast, side_stream=_drawn(draw, side_stream))


@st.composite
def calls(
    draw: st.DrawFn,
    op: Any,
    reference: Callable[..., Any] | None = None,
    *,
    dtypes: Sequence[torch.dtype] | st.SearchStrategy[Sequence[torch.dtype]] = values.DTYPES,
    kinds: Sequence[str] | st.SearchStrategy[Sequence[str]] = draws.LAYOUTS,
    special: bool | st.SearchStrategy[bool] = True,
    grads: Sequence[str] | st.SearchStrategy[Sequence[str]] = GRADS[:1],
    share: bool | st.SearchStrategy[bool] = True,
    given: dict[str, Any] | None = None,
    **of_shape: Any,
) -> Call:
    """Calls of an operator: its Tensors by plan, everything else by the type in its schema.

    Shrinks to absent optional arguments, defaults, and dull Tensors.

    Args:
        op: a packet or overload of ``torch.ops``, what ``torch.library.custom_op`` gives, a name, a
            function, or a ``schema.Binding``.
        reference: draw only what this takes too.
        dtypes: of the Tensors.
        kinds: layouts of the Tensors.
        special: whether the Tensors may hold special values.
        grads: how autograd may see the Tensors.
        share: whether several Tensors may lie in one storage.
        given: of arguments by name, a value or a strategy in place of one by type.
        of_shape: arguments of `shapes`.

    Raises:
        ValueError: `op` isn't registered, `reference` doesn't fit it, or an argument can't be drawn.
    """
    binding = op if isinstance(op, schema.Binding) else schema.bind(op, reference)
    own = {name: functools.partial(_drawn, draw, value) for name, value in (given or {}).items()}
    return schema.call(
        _Choices(draw),
        binding,
        dtypes=_checked_dtypes(_drawn(draw, dtypes)),
        kinds=_checked_kinds(_drawn(draw, kinds)),
        special=_drawn(draw, special),
        grads=_drawn(draw, grads),
        share=_drawn(draw, share),
        given=own,
        **_checked_shape(**{name: _drawn(draw, value) for name, value in of_shape.items()}),
    )
