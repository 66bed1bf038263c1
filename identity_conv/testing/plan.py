"""What a tensor is, as a small record: its shape, its place in memory, its values."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..wording import counted
from . import values

#: How autograd sees the tensor: not at all, as a leaf, as the result of an operation, or never
#: (made in inference mode).
GRADS = ("none", "leaf", "nonleaf", "inference")

_MEMORY_FORMATS = {
    torch.contiguous_format: None,
    torch.channels_last: (0, 2, 3, 1),
    torch.channels_last_3d: (0, 2, 3, 4, 1),
}
_ALIGNMENT = 64  # bytes; no allocator of torch aligns less


class Guarded(NamedTuple):
    """A tensor, and all the memory around it: bytes ``base[start:stop]`` are its storage."""

    tensor: torch.Tensor
    base: torch.Tensor
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, repr=False)
class TensorPlan:
    """A tensor, described: the same values on every device, in any layout.

    Values belong to logical positions, so plans that differ in layout alone build equal tensors.
    Cells of the storage that are no cell of the tensor hold `poison` (see `build_guarded`).

    Args:
        shape: sizes; any rank, zeros allowed.
        dtype: any that ``torch.clone`` copies.
        permutation: dimensions in the order of memory, outermost first; empty for row-major.
        step: for each dimension, take every n-th cell; empty for 1 everywhere.
        padding: for each dimension, unused cells behind it in memory; empty for none.
        offset: elements of the storage before the first (``storage_offset()``).
        misalignment: bytes by which the storage itself starts past a 64-byte boundary, as one made
            by ``from_dlpack`` or ``from_blob`` can; a multiple of the element's size. Nothing on meta.
        expand: dimensions with stride 0.
        windows: overlapping windows, as of ``unfold``: the distance between the windows; the two
            dimensions innermost in memory are the number of windows and their length. 0 for none.
        memory_format: ``torch.channels_last`` or ``torch.channels_last_3d`` in place of `permutation`.
        unit_stride: the stride of dimensions of size 1, where nothing depends on it; None for the
            regular one.
        conj: whether the conjugate bit is set.
        neg: whether the negative bit is set.
        seed: which values; floating ones have magnitudes of about 1, integers any bits.
        cells: special values: pairs of a position and a name from ``values.specials(dtype)``. A position
            counts the numbers in row-major order (a complex element is two, an expanded dimension has
            size 1, windows count as the row that they are taken of); from the end if negative.
        grad: "none", "leaf", "nonleaf" or "inference".

    Raises:
        ValueError: an argument, or two together, don't describe a tensor; the sentence names it.

    Example::

        >>> plan = TensorPlan((2, 3), torch.int32, permutation=(1, 0), offset=1)
        >>> plan
        TensorPlan((2, 3), torch.int32, permutation=(1, 0), offset=1)
        >>> plan.build().stride()
        (1, 2)
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    _: dataclasses.KW_ONLY
    permutation: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    offset: int = 0
    misalignment: int = 0
    expand: tuple[int, ...] = ()
    windows: int = 0
    memory_format: torch.memory_format = torch.contiguous_format
    unit_stride: int | None = None
    conj: bool = False
    neg: bool = False
    seed: int = 0
    cells: tuple[tuple[int, str], ...] = ()
    grad: str = "none"

    def __post_init__(self) -> None:
        rank = len(self._integers("shape", self.shape))
        if self.dtype not in values.DTYPES:
            raise ValueError(f"TensorPlan: dtype must be one that torch.clone copies, got {self.dtype!r}")
        for name, least in (("offset", 0), ("misalignment", 0), ("windows", 0), ("seed", 0)):
            self._integers(name, (getattr(self, name),), least)
        for name, least in (("step", 1), ("padding", 0)):
            if getattr(self, name) and len(self._integers(name, getattr(self, name), least)) != rank:
                self._refuse(name, f"one number for each of {counted(rank, 'dimension')}")
        if self.permutation and sorted(self._integers("permutation", self.permutation)) != list(range(rank)):
            self._refuse("permutation", f"the dimensions 0 to {rank - 1}, each once")
        if self.memory_format is not torch.contiguous_format:
            if self.memory_format not in _MEMORY_FORMATS:
                self._refuse("memory_format", "contiguous_format, channels_last or channels_last_3d")
            order = _MEMORY_FORMATS[self.memory_format]
            if order is None or len(order) != rank:
                self._refuse("memory_format", f"contiguous_format at rank {rank}")
            if self.permutation:
                self._refuse("memory_format", "contiguous_format where permutation is given")
        if self.misalignment and (self.misalignment % self.dtype.itemsize or self.misalignment >= _ALIGNMENT):
            self._refuse("misalignment", f"a multiple of {counted(self.dtype.itemsize, 'byte')} below {_ALIGNMENT}")
        if self.expand:
            dims = self._integers("expand", self.expand)
            if len(set(dims)) != len(dims) or max(dims) >= rank:
                self._refuse("expand", f"dimensions from 0 to {rank - 1}, each once")
            if self.step and any(self.step[dim] != 1 for dim in dims):
                self._refuse("step", "1 for a dimension in expand, which has no cells to step over")
        if self.windows:
            self._check_windows(rank)
        if self.unit_stride is not None:
            self._integers("unit_stride", (self.unit_stride,))
        if self.conj and not self.dtype.is_complex:
            self._refuse("conj", f"False for {self.dtype}, which is not complex")
        if self.neg and self.dtype not in values.NEGATABLE:
            self._refuse("neg", f"False for {self.dtype}, which torch can't negate lazily")
        if self.neg and self.conj and self.dtype is torch.complex32:
            self._refuse("neg", "False for a conjugated torch.complex32, which torch can't resolve")
        if self.cells:
            self._check_cells()
        if self.grad not in GRADS:
            self._refuse("grad", f"one of {', '.join(GRADS)}")
        if self.grad in ("leaf", "nonleaf") and not (self.dtype.is_floating_point or self.dtype.is_complex):
            self._refuse("grad", f"none or inference for {self.dtype}, which has no gradients")

    def _refuse(self, name: str, allowed: str) -> None:
        raise ValueError(f"TensorPlan: {name} must be {allowed}, got {getattr(self, name)!r}")

    def _integers(self, name: str, numbers: Any, least: int = 0) -> tuple[int, ...]:
        """`numbers` checked; a field given as a list (or torch.Size) becomes a plain tuple."""
        try:
            listed = tuple(numbers)
        except TypeError:
            listed = (None,)
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= least for number in listed):
            self._refuse(name, f"integers of at least {least}")
        if isinstance(getattr(self, name), Sequence):
            object.__setattr__(self, name, listed)
        return listed

    def _check_windows(self, rank: int) -> None:
        if rank < 2:
            self._refuse("windows", f"0 at rank {rank}")
        count, length = self._order[-2:]
        if self.shape[count] < 2 or self.windows >= self.shape[length]:
            self._refuse("windows", f"below the window's length {self.shape[length]}, with two windows or more")
        if {count, length} & set(self.expand):
            self._refuse("expand", "other dimensions than those of windows")
        if (self.step and self.step[count] != 1) or (self.padding and self.padding[length]):
            self._refuse("windows", "0 where the windows are stepped or their cells padded")

    def _check_cells(self) -> None:
        try:
            cells = tuple((position, name) for position, name in self.cells)
        except (TypeError, ValueError):
            cells = ((None, ""),)  # type: ignore[assignment]
        known, count = values.specials(self.dtype), self.numbers
        for position, name in cells:
            if not isinstance(position, int) or not isinstance(name, str):
                self._refuse("cells", "pairs of a position and a name")
            if not -count <= position < count:
                self._refuse("cells", f"at positions from {-count} to {count - 1}")
            if name not in known:
                self._refuse("cells", f"of the names that {self.dtype} has ({', '.join(known)})")
        object.__setattr__(self, "cells", cells)

    def __repr__(self) -> str:
        given = [f"{self.shape!r}", f"{self.dtype!r}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f"{field.name}={value!r}")
        return f"TensorPlan({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis and IPython would name every field of a dataclass

    def __getstate__(self) -> dict[str, Any]:
        # What is at its default, or worked out, needn't be pickled with each of thousands of calls.
        fields = dataclasses.fields(self)
        return {each.name: value for each in fields if (value := getattr(self, each.name)) != each.default}

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """Dimensions in the order of memory, outermost first."""
        return _MEMORY_FORMATS[self.memory_format] or self.permutation or tuple(range(len(self.shape)))

    @functools.cached_property
    def _memory(self) -> tuple[tuple[int, ...], int]:
        """The strides, and the elements that the storage holds after `offset`."""
        shape, step, padding = self.shape, self.step, self.padding
        strides = [0] * len(shape)
        order = list(self._order)
        span = 1
        if self.windows:
            length, count = order.pop(), order.pop()
            strides[length] = step[length] if step else 1
            strides[count] = self.windows * strides[length]
            row = (shape[count] - 1) * self.windows + shape[length]
            span = (row - 1) * strides[length] + 1 + (padding[count] if padding else 0)
        for dim in reversed(order):
            every = step[dim] if step else 1
            size = 1 if dim in self.expand else max(shape[dim], 1)
            strides[dim] = 0 if dim in self.expand else span * every
            span *= (size - 1) * every + 1 + (padding[dim] if padding else 0)
        if self.unit_stride is not None:
            strides = [
                self.unit_stride if size == 1 and dim not in self.expand else stride
                for dim, (size, stride) in enumerate(zip(shape, strides, strict=True))
            ]
        return tuple(strides), span if self.numel else 0

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """What ``stride()`` of the tensor is."""
        return self._memory[0]

    @property
    def storage_bytes(self) -> int:
        """Bytes of the tensor's storage."""
        return (self.offset + self._memory[1]) * self.dtype.itemsize

    @functools.cached_property
    def _core(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the distinct cells: expanded dimensions once, windows as their row."""
        cells = list(zip(self.shape, self.strides, strict=True))
        for dim in self.expand:
            cells[dim] = (min(self.shape[dim], 1), 0)
        if self.windows:
            count, length = self._order[-2:]
            row = (self.shape[count] - 1) * self.windows + self.shape[length]
            cells[count] = (row, self.strides[length])
            cells.pop(length)
        return tuple(size for size, _ in cells), tuple(stride for _, stride in cells)

    @property
    def number_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the numbers that `cells` counts, in the storage seen as numbers."""
        sizes, strides = self._core
        if self.dtype.is_complex:
            return (*sizes, 2), (*(2 * stride for stride in strides), 1)
        return sizes, strides

    @property
    def numbers(self) -> int:
        """Numbers that the tensor holds: its distinct cells, two to a complex one."""
        return math.prod(self.number_layout[0])

    def line(self) -> tuple[int, int]:
        """How the storage is best read: elements in a line, and those that the first line has before the storage.

        A line is a step of the second innermost dimension; where there is none, 16 elements.
        """
        steps = sorted(stride for size, stride in zip(*self._core, strict=True) if size > 1)
        pitch = steps[1] if len(steps) > 1 else max(min(self.storage_bytes // self.dtype.itemsize, 16), 1)
        return pitch, -self.offset % pitch if len(steps) > 1 else 0

    def owner(self, element: int) -> tuple[tuple[int, ...], int] | None:
        """The first index whose cell is `element` of the storage, and how many indices have it; None for no cell."""
        if not self.numel:
            return None
        count, length = self._order[-2:] if self.windows else (-1, -1)
        dims = [dim for dim in range(len(self.shape)) if dim != length]
        cells = sorted(zip(*self._core, dims, strict=True), key=lambda cell: -cell[1])
        index, rest = [0] * len(self.shape), element - self.offset
        for size, stride, dim in cells:
            if size > 1:
                index[dim], rest = divmod(rest, stride)
                if not 0 <= index[dim] < size:
                    return None
        if rest:
            return None
        times = math.prod(self.shape[dim] for dim in self.expand)
        if self.windows:
            place = index[count]
            index[count] = max(0, -(-(place - self.shape[length] + 1) // self.windows))
            index[length] = place - index[count] * self.windows
            times *= min(self.shape[count] - 1, place // self.windows) - index[count] + 1
        return tuple(index), times

    def special_elements(self) -> dict[int, str]:
        """The elements of the storage that `cells` are in, with the names of the values."""
        sizes, strides = self.number_layout
        found: dict[int, str] = {}
        for position, name in self.cells:
            rest, number = position % self.numbers, 0
            for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
                rest, index = divmod(rest, size)
                number += index * stride
            element = self.offset + number // (2 if self.dtype.is_complex else 1)
            found[element] = f"{found[element]} {name}" if element in found else name
        return found

    def _repr_html_(self) -> str:
        from .. import display

        cells = math.prod(self._core[0]) if self.numel else 0
        facts = (
            f"strides {self.strides}; {counted(self.storage_bytes, 'byte')} of storage, "
            f"{cells * self.dtype.itemsize:,} of them the tensor's; {', '.join(self.kinds)}"
        )
        return display.page(display.heading(repr(self)), display.sentence(facts), display.memory(self).svg)

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """What is particular about the tensor, by name, for statistics; "dense" if its layout is plain."""
        present = {
            "empty": self.numel == 0,
            "scalar": not self.shape,
            "permuted": self._order != tuple(range(len(self.shape))),
            "stepped": any(every > 1 and self.shape[dim] > 1 for dim, every in enumerate(self.step)),
            "padded": any(self.padding),
            "offset": self.offset > 0,
            "misaligned": self.misalignment > 0,
            "expanded": any(self.shape[dim] > 1 for dim in self.expand),
            "overlapping": self.windows > 0,
            "channels_last": self.memory_format is not torch.contiguous_format,
            "unit_stride": self.unit_stride is not None and 1 in self.shape,
            "conj": self.conj,
            "neg": self.neg,
            "special": bool(self.cells),
            self.grad: self.grad != "none",
        }
        found = [kind for kind, holds in present.items() if holds]
        plain = {"empty", "scalar", "special", *GRADS}
        return tuple(found if set(found) - plain else ["dense", *found])

    def build(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor, on `device`."""
        return self.build_guarded(device, guard=0).tensor

    def to_code(self, language: str = "python", name: str = "x", device: str = "cpu") -> str:
        """A program text that needs torch alone and makes this tensor.

        Args:
            language: "python", for statements that leave the tensor in `name`; "cpp", for a function
                `name` that returns it.
            name: of the tensor.
            device: where the tensor is.

        Raises:
            ValueError: another language.
        """
        from . import reproducer

        return reproducer.tensor(self, language, name, device)

    def build_guarded(self, device: torch.device | str = "cpu", *, guard: int = 256, poison: int = 0xFF) -> Guarded:
        """The tensor with `guard` bytes or more of other memory before and behind its storage.

        Args:
            device: where; on meta there is no memory to guard.
            guard: bytes on each side, rounded up to keep the alignment.
            poison: the byte in the guards and in cells of the storage that the tensor doesn't have.

        Returns:
            The tensor, and a uint8 tensor of everything around it.
        """
        device = torch.device(device)
        size = self.storage_bytes
        start = -(-guard // _ALIGNMENT) * _ALIGNMENT + self.misalignment
        behind = -(-guard // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(self.grad == "inference"), torch.no_grad():
            if device.type == "meta":
                base = torch.empty(start + size + behind, dtype=torch.uint8, device=device)
                storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
            else:
                base = torch.empty(start + size + behind, dtype=torch.uint8)
                self._fill(base.numpy(), start, poison)
                base = base.to(device)
                # Its own storage, so that the tensor's storage_offset() is `offset` and no more.
                storage = (torch.from_dlpack(base[start : start + size]) if start or behind else base).untyped_storage()
            tensor = self._view(storage)
        if self.grad in ("leaf", "nonleaf"):
            tensor = tensor.detach().requires_grad_()
        if self.grad == "nonleaf":
            with torch.enable_grad():
                tensor = torch.ops.aten.alias(tensor)
        return Guarded(tensor, base, start, start + size)

    def _view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in a storage that is there, whatever its values."""
        if self.dtype is torch.complex32:
            _take_note_of_complex32()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = tensor.set_(storage, self.offset, self.shape, self.strides)
        if self.conj:
            tensor = torch.conj(tensor)
        return torch._neg_view(tensor) if self.neg else tensor

    def _fill(self, base: np.ndarray, start: int, poison: int) -> None:
        # By numpy: torch's own copies wait for a thread on every core, which a busy machine hasn't got.
        if not self.numel:
            base.fill(poison)
            return
        sizes, strides = self.number_layout
        width, count = values.number(self.dtype).itemsize, self.numbers
        dense = _is_dense(sizes, strides)
        if not dense or base.nbytes != count * width:
            base.fill(poison)
        first = start + self.offset * self.dtype.itemsize
        integer = f"i{width}"
        flat = np.ndarray(count, integer, base, first) if dense else np.empty(count, integer)
        values.fill(flat, self.dtype, self.seed)
        names = values.specials(self.dtype)
        for position, name in self.cells:
            flat[position] = names[name]
        # The bits that are seen through the conjugate and negative bit are the ones drawn.
        sign = -(1 << (width * 8 - 1))
        if self.neg:
            flat ^= sign
        if self.conj:
            flat[1::2] ^= sign
        if not dense:
            steps = tuple(stride * width for stride in strides)
            np.ndarray(sizes, integer, base, first, steps)[...] = flat.reshape(sizes)


@dataclasses.dataclass(frozen=True)
class SharedStorage:
    """Tensors in one storage: they may overlap in part or wholly, or lie side by side.

    The storage holds the values of the first plan's seed, one behind the other; each plan says where
    its tensor lies in it.

    Args:
        plans: of one dtype, without special cells or gradients.

    Raises:
        ValueError: the plans can't share a storage; the sentence names the field.

    Example::

        >>> import torch
        >>> first, second = SharedStorage((TensorPlan((3,)), TensorPlan((3,), offset=1))).build()
        >>> torch.equal(first[1:], second[:2])
        True
    """

    plans: tuple[TensorPlan, ...]

    def __post_init__(self) -> None:
        plans = tuple(self.plans)
        object.__setattr__(self, "plans", plans)
        if not plans:
            raise ValueError("SharedStorage: plans must hold a plan or more, got ()")
        for name in ("dtype", "misalignment"):
            found = list(dict.fromkeys(getattr(plan, name) for plan in plans))
            if len(found) > 1:
                raise ValueError(f"SharedStorage: plans must agree in {name}, got {found}")
        for plan in plans:
            if plan.cells or plan.grad != "none":
                raise ValueError(f"SharedStorage: plans must be without cells and grad, got {plan}")

    @property
    def row(self) -> TensorPlan:
        """The tensor that fills the storage."""
        first = self.plans[0]
        elements = max(plan.storage_bytes for plan in self.plans) // first.dtype.itemsize
        return TensorPlan((elements,), first.dtype, misalignment=first.misalignment, seed=first.seed)

    def build(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
        """The tensors, on `device`."""
        return self.build_guarded(device, guard=0)[0]

    def build_guarded(
        self, device: torch.device | str = "cpu", *, guard: int = 256, poison: int = 0xFF
    ) -> tuple[tuple[torch.Tensor, ...], Guarded]:
        """The tensors, and their storage as `TensorPlan.build_guarded` makes it of `row`."""
        row = self.row.build_guarded(device, guard=guard, poison=poison)
        return tuple(plan._view(row.tensor.untyped_storage()) for plan in self.plans), row


@functools.cache
def _take_note_of_complex32() -> None:
    """torch says once that complex32 is experimental; who checks a kernel with it knows."""
    with warnings.catch_warnings(action="ignore"):
        torch.empty(0, dtype=torch.complex32)


def _is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the cells lie one behind the other in logical order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
