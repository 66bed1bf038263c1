"""Sizes of an operator's tensors that depend on each other, such as ``{"boxes": ("N", 4), "scores": ("N",)}``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .call import Call
from .plan import TensorPlan

_UNKNOWN = 3  # the size of a dimension that the drawn tensor doesn't have
_LONG = 4096  # elements of one that makes the others 1: they would make it longer still
_OF_RANK = ("permutation", "step", "padding", "expand", "windows", "memory_format")
_NAME = re.compile(r"([A-Za-z_]\w*)(?:<=(\d+))?")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TensorPlan)}

Dimension = str | int


class Shapes:
    """What an author says of shapes: of tensors by argument, each dimension a name, a number or ``"..."``.

    Dimensions of one name have one size, which ``"N<=300"`` bounds wherever N is. ``"..."`` stands for any number of
    dimensions, the same wherever it is.

    Raises:
        TypeError, ValueError: a shape isn't of this form; the sentence names the argument.
    """

    def __init__(self, given: Mapping[str, Sequence[Dimension]] | None = None):
        if not isinstance(given, Mapping | None):
            raise TypeError(f"shapes must be a mapping of an argument's name to its dimensions, got {given!r}")
        self.given: dict[str, tuple[Dimension, ...]] = {}
        self._most: dict[str, int] = {}
        for name, shape in (given or {}).items():
            if not isinstance(shape, list | tuple) or not all(map(_is_dimension, shape)) or shape.count("...") > 1:
                raise ValueError(f"shapes: {name} must be a tuple of names, sizes and at most one '...', got {shape!r}")
            self.given[name] = tuple(self._read(each) for each in shape)

    def _read(self, dimension: Dimension) -> Dimension:
        """The dimension without its bound, of which note is taken."""
        found = _NAME.fullmatch(dimension) if isinstance(dimension, str) else None
        if found is None:
            return dimension
        if found[2]:
            self._most[found[1]] = min(int(found[2]), self._most.get(found[1], int(found[2])))
        return found[1]

    def fit(self, call: Call, names: Sequence[str]) -> Call:
        """The call with the nearest shapes that are of this form: earlier arguments decide over later ones.

        Args:
            names: of the positional arguments.
        """
        if not self.given:
            return call
        sizes: dict[str, Any] = {}

        def fitted(name: str, value: Any) -> Any:
            if isinstance(value, TensorPlan) and name in self.given:
                return reshaped(value, self._bound(self.given[name], value.shape, sizes))
            return value

        args = tuple(fitted(name, value) for name, value in zip(names, call.args, strict=False))
        kwargs = {name: fitted(name, value) for name, value in call.kwargs.items()}
        try:
            return dataclasses.replace(call, args=args + call.args[len(args) :], kwargs=kwargs)
        except ValueError:  # one storage can't hold them
            return Call(args + call.args[len(args) :], kwargs)

    def fixed(self, name: str, rank: int) -> frozenset[int]:
        """The dimensions of an argument whose size is a number."""
        shape = self.given.get(name, ())
        if "..." in shape:
            at = shape.index("...")
            shape = (*shape[:at], *("...",) * (rank - len(shape) + 1), *shape[at + 1 :])
        return frozenset(dim for dim, each in enumerate(shape) if isinstance(each, int))

    def _bound(self, shape: Sequence[Dimension], drawn: tuple[int, ...], sizes: dict[str, Any]) -> tuple[int, ...]:
        """The sizes of `shape`, as far as `sizes` has none by those that were drawn; adds them to `sizes`."""
        before = shape.index("...") if "..." in shape else len(shape)
        after = len(shape) - before - 1
        if "..." in shape:
            any_ = sizes.setdefault("...", drawn[before : max(before, len(drawn) - after)])
            # What stands behind "..." is counted from the end.
            drawn = (*drawn[:before], *any_, *(drawn[-after:] if 0 < after <= len(drawn) - before else ()))
            shape = (*shape[:before], *any_, *shape[before + 1 :])
        if len(drawn) < len(shape):
            drawn = _spread(drawn, [isinstance(each, str) for each in shape])

        def size(dim: int, each: Dimension) -> int:
            if isinstance(each, int):
                return each
            most, found = self._most.get(each), drawn[dim]
            return sizes.setdefault(each, found if most is None or found <= most else found % (most + 1))

        return tuple(size(dim, each) for dim, each in enumerate(shape))


def _spread(drawn: tuple[int, ...], named: Sequence[bool]) -> tuple[int, ...]:
    """Sizes for more dimensions than were drawn, those drawn on named ones: a long one comes to each of them."""
    missing = max(0, sum(named) - len(drawn))
    first = sum(drawn) % (missing + 1)
    other = _UNKNOWN if math.prod(drawn) <= _LONG else 1
    sizes = iter((other,) * first + drawn + (other,) * missing)
    return tuple(next(sizes) if each else other for each in named)


def _is_dimension(given: Any) -> bool:
    if isinstance(given, str):
        return given == "..." or _NAME.fullmatch(given) is not None
    return type(given) is int and given >= 0


def reshaped(plan: TensorPlan, shape: tuple[int, ...]) -> TensorPlan:
    """The plan in another shape, with as much of its layout and of its special cells as that has room for."""
    if plan.shape == shape:
        return plan
    for fields in (_of_last_dimensions(plan, len(shape)), {name: _DEFAULTS[name] for name in _OF_RANK}):
        try:
            bare = dataclasses.replace(plan, **{**fields, "shape": shape, "cells": ()})
        except ValueError:  # such as windows over too few cells
            continue
        kept = tuple(cell for cell in plan.cells if -bare.numbers <= cell[0] < bare.numbers)
        return dataclasses.replace(bare, cells=kept)
    raise AssertionError("a plan without a layout has any shape")


def _of_last_dimensions(plan: TensorPlan, rank: int) -> dict[str, Any]:
    """What the layout says of the last `rank` dimensions; those before are regular."""
    more = rank - len(plan.shape)
    if more == 0:
        return {}
    fields = {name: _DEFAULTS[name] for name in _OF_RANK}
    for name, regular in (("step", 1), ("padding", 0)):
        given = getattr(plan, name)
        if given:
            fields[name] = ((regular,) * more + given)[-rank:] if rank else ()
    fields["expand"] = tuple(dim + more for dim in plan.expand if dim + more >= 0)
    return fields
