"""A failing call made small: one change at a time, kept where the call still fails."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .call import Call
from .plan import TensorPlan

#: Fields in the order in which they are given up: what reads worst comes first.
_FIELDS = (
    "cells", "conj", "neg", "misalignment", "unit_stride", "windows", "expand", "step", "padding", "offset",
    "permutation", "memory_format", "grad", "seed",
)  # fmt: skip
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TensorPlan)}


def shrink(
    call: Call,
    fails: Callable[[Call], bool],
    *,
    fit: Callable[[Call], Call],
    seconds: float,
    tries: int = 400,
    clock: Callable[[], float] = time.process_time,
) -> Call:
    """The dullest call found that still fails.

    Args:
        fails: whether a call fails in the way that is looked for.
        fit: gives a call the shapes that the operator takes.
        seconds, tries: how long to look, and for how many calls.
        clock: what measures the seconds: of this process, where it does the work itself.
    """
    deadline = clock() + seconds
    left = tries
    progress = True
    seen = [call]
    while progress:
        progress = False
        for simpler in _simpler(call):
            candidate = fit(simpler)
            # What had to be fitted may be larger again, or what it was before.
            if candidate in seen or (candidate != simpler and _elements(candidate) > _elements(call)):
                continue
            if left <= 0 or clock() > deadline:
                return call
            left -= 1
            if fails(candidate):
                call, progress = candidate, True
                seen.append(call)
                break
    return call


def _elements(call: Call) -> int:
    return sum(plan.numel for plan in call.plans)


def _simpler(call: Call) -> Iterator[Call]:
    """Calls with one thing simpler, the boldest change first."""
    if call.shared:
        yield dataclasses.replace(call, shared=False)
    plans = call.plans
    if len(plans) > 1:
        for each in _simpler_plans(plans[0]):
            # Shapes that must agree shrink together.
            if each.shape != plans[0].shape and all(plan.shape == plans[0].shape for plan in plans):
                changed = _try(lambda: [_reshaped(plan, each.shape) for plan in plans])  # noqa: B023
            elif each.dtype != plans[0].dtype:
                changed = _try(lambda: [_typed(plan, each.dtype) for plan in plans])  # noqa: B023
            else:
                continue
            if changed is not None:
                yield call.replace(changed)
    for index, plan in enumerate(plans):
        for each in _simpler_plans(plan):
            yield call.replace((*plans[:index], each, *plans[index + 1 :]))


def _simpler_plans(plan: TensorPlan) -> Iterator[TensorPlan]:
    for fields in _changes(plan):
        candidate = _try(functools.partial(dataclasses.replace, plan, **fields))
        if candidate is not None and candidate != plan:
            yield candidate


def _changes(plan: TensorPlan) -> Iterator[dict[str, Any]]:
    if plan.cells:
        yield {"cells": ()}
    if len(plan.cells) > 1:
        half = len(plan.cells) // 2
        yield {"cells": plan.cells[:half]}
        yield {"cells": plan.cells[half:]}
    elif plan.cells and plan.cells[0][0]:
        yield {"cells": ((0, plan.cells[0][1]),)}
    for shape in ((), (0,), (1,), (2,), (3,), (plan.numel,)):
        if shape != plan.shape and (len(shape) < len(plan.shape) or plan.numel > 3):
            yield {**_plain(plan), "shape": shape, "cells": _kept(plan, 0 not in shape)}
    for name in _FIELDS:
        if getattr(plan, name) != _DEFAULTS[name]:
            yield {name: _DEFAULTS[name]}
    if plan.dtype is not torch.float32:
        yield {"dtype": torch.float32, "cells": ()}
        yield {"dtype": torch.float32}
    for dim in range(len(plan.shape)):
        yield _without(plan, dim)
    for dim, size in enumerate(plan.shape):
        for smaller in dict.fromkeys(
            (0, 1, 2, 3, size // 2, size * 3 // 4, size - size // 8, size - size // 64, size - 1)
        ):
            if 0 <= smaller < size:
                yield {"shape": (*plan.shape[:dim], smaller, *plan.shape[dim + 1 :]), "cells": _kept(plan, smaller)}
    for name in ("step", "padding"):
        for dim, value in enumerate(getattr(plan, name)):
            least = 1 if name == "step" else 0
            if value > least + 1:
                given = getattr(plan, name)
                yield {name: (*given[:dim], least + 1, *given[dim + 1 :])}
            if value > least:
                given = getattr(plan, name)
                yield {name: (*given[:dim], least, *given[dim + 1 :])}
    for name in ("offset", "windows"):
        if getattr(plan, name) > 1:
            yield {name: 1}
    if plan.misalignment > plan.dtype.itemsize:
        yield {"misalignment": plan.dtype.itemsize}


def _plain(plan: TensorPlan) -> dict[str, Any]:
    """Fields that depend on the rank, given up."""
    names = ("permutation", "step", "padding", "expand", "windows", "memory_format", "cells")
    return {name: _DEFAULTS[name] for name in names}


def _without(plan: TensorPlan, dim: int) -> dict[str, Any]:
    """A change that takes one dimension out, with what is said of it."""
    rest = [each for each in range(len(plan.shape)) if each != dim]
    place = {each: index for index, each in enumerate(rest)}
    return {
        "shape": tuple(plan.shape[each] for each in rest),
        "permutation": tuple(place[each] for each in plan.permutation if each != dim),
        "step": tuple(plan.step[each] for each in rest) if plan.step else (),
        "padding": tuple(plan.padding[each] for each in rest) if plan.padding else (),
        "expand": tuple(place[each] for each in plan.expand if each != dim),
        "memory_format": torch.contiguous_format,
        "cells": plan.cells if plan.shape[dim] == 1 else (),
    }


def _kept(plan: TensorPlan, size: int) -> tuple[tuple[int, str], ...]:
    """Special cells that a smaller plan surely has still."""
    return tuple((position, name) for position, name in plan.cells if position in (0, -1)) if size else ()


def _reshaped(plan: TensorPlan, shape: tuple[int, ...]) -> TensorPlan:
    return dataclasses.replace(plan, **{**(_plain(plan) if len(shape) != len(plan.shape) else {}), "shape": shape})


def _typed(plan: TensorPlan, dtype: torch.dtype) -> TensorPlan:
    return dataclasses.replace(plan, dtype=dtype, cells=())


def _try(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError:  # such a plan can't be
        return None
