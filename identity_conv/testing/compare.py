"""How an operator's output is compared with its reference's: bit for bit, by units in the last place, or closely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..wording import counted

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Comparison:
    """A rule that says where two dense tensors of equal shape and dtype differ.

    Calling it gives None where they agree, else half a sentence:
    ``at [3] expected 1.0, got 0.0; differs in 2 of 64 elements``. `exact`, `ulp` and `close` make the usual ones.

    Args:
        name: how a report calls it.
        differs: takes the actual and the expected tensor, returns a bool tensor that is true where they differ.
        made_by: a function at the top level of a module, and its arguments, by which the rule is pickled to the
            processes that check.
    """

    name: str
    differs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    made_by: tuple[Any, ...] = ()  # a function and its arguments, by which it is pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made_by[0], self.made_by[1:]

    def __repr__(self) -> str:
        return self.name

    def __call__(self, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        actual, expected = dense(actual), dense(expected)
        if same_bytes(raw(actual), raw(expected)):
            return None
        mask = self.differs(actual, expected)
        if mask.is_complex() or mask.dtype is not torch.bool:
            raise TypeError(f"{self.name}: a comparison gives a mask of bool, got {mask.dtype}")
        count = int(mask.sum())
        if not count:
            return None
        flat = int(mask.reshape(-1).to(torch.uint8).argmax())
        index = [int(each) for each in torch.unravel_index(torch.tensor(flat), actual.shape)] if actual.dim() else []
        was, got = (_show(_flat(each)[flat]) for each in (expected, actual))
        return f"at {index} expected {was}, got {got}; differs in {count:,} of {counted(actual.numel(), 'element')}"


def exact() -> Comparison:
    """Every bit equal: the sign of zero and the payload of a NaN count."""
    return Comparison("exact()", _bits_differ, (exact,))


def ulp(n: int) -> Comparison:
    """Floating-point numbers at most `n` representable numbers apart; any NaN equals any NaN, -0.0 equals 0.0.

    Complex numbers are compared by part, integers and bool exactly.

    Args:
        n: how many, 0 or more.

    Raises:
        ValueError: `n` is negative.
    """
    if n < 0:
        raise ValueError(f"ulp: n must be at least 0, got {n}")

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        if actual.is_complex():
            return differs(_parts(actual), _parts(expected)).any(-1)
        if not actual.is_floating_point():
            return _bits_differ(actual, expected)
        nan = (_is_nan(actual), _is_nan(expected))
        first, second = _ordered(actual), _ordered(expected)
        # A float64 and its opposite are further apart than an int64 counts: then the signs tell.
        opposite = (first < 0) != (second < 0)
        near = torch.where(opposite, (first.abs() <= n) & (second.abs() <= n), True) & ((first - second).abs() <= n)
        infinite = torch.isinf(actual.to(torch.float64)) | torch.isinf(expected.to(torch.float64))
        near &= ~infinite | (first == second)
        return torch.where(nan[0] | nan[1], nan[0] != nan[1], ~near)

    return Comparison(f"ulp({n})", differs, (ulp, n))


def close(rtol: float | None = None, atol: float | None = None) -> Comparison:
    """As ``torch.isclose`` with equal NaNs: ``|actual - expected| <= atol + rtol * |expected|``.

    Args:
        rtol: by default eight times the dtype's epsilon.
        atol: by default as much as `rtol`.
    """

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        if not (actual.is_floating_point() or actual.is_complex()):
            return _bits_differ(actual, expected)
        relative = 8 * torch.finfo(actual.dtype).eps if rtol is None else rtol
        wide = torch.complex128 if actual.is_complex() else torch.float64
        return ~torch.isclose(
            actual.to(wide),
            expected.to(wide),
            rtol=relative,
            atol=relative if atol is None else atol,
            equal_nan=True,
        )

    given = [f"{name}={value}" for name, value in (("rtol", rtol), ("atol", atol)) if value is not None]
    return Comparison(f"close({', '.join(given)})", differs, (close, rtol, atol))


def dense(x: torch.Tensor) -> torch.Tensor:
    """A row-major copy of `x`'s values (`x` itself where it is that), with no conj or neg bit."""
    x = x.detach()
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a row-major tensor, flat."""
    return _flat(x).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8, device=x.device)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors of bytes are equal; several times faster than torch.equal on CPU."""
    if one.device.type == "cpu":
        return np.array_equal(one.numpy(), other.numpy())
    return torch.equal(one, other)


def are_all(flat: torch.Tensor, byte: int) -> bool:
    """Whether every one of a flat tensor's bytes is `byte`."""
    return bool(((flat.numpy() if flat.device.type == "cpu" else flat) == byte).all())


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A row-major tensor in one dimension, of stride 1 whatever the strides of sizes of 1 are."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def _parts(x: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of a row-major complex tensor, in a last dimension of two."""
    return torch.view_as_real(_flat(x)).reshape(*x.shape, 2)


def _bits_differ(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if actual.is_complex():
        return _bits_differ(_parts(actual), _parts(expected)).any(-1)
    width = _BITS[actual.element_size()]
    return _flat(actual).view(width).ne(_flat(expected).view(width)).reshape(actual.shape)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers as integers that count representable numbers, 0 for both zeros."""
    bits = 8 * x.element_size()
    integers = _flat(x).view(_BITS[x.element_size()]).reshape(x.shape).to(torch.int64)
    magnitude = integers & ((1 << (bits - 1)) - 1)
    negative = integers < 0 if bits != 8 else integers >= 128
    return torch.where(negative, -magnitude, magnitude)


def _is_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.isnan(x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32))


def _show(cell: torch.Tensor) -> str:
    value: object = cell.item() if cell.dtype is not torch.complex32 else complex(cell.to(torch.complex64).item())
    if not (cell.is_floating_point() or cell.is_complex()):
        return str(value)
    code = bytes(cell.cpu().reshape(1).view(torch.uint8).tolist())[::-1].hex()
    return f"{value} (0x{code})"
