"""The numbers in a planned tensor: the same on every device and every torch, from a seed alone."""

from __future__ import annotations

import functools

import numpy as np
import torch

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
#: Of each floating dtype its bits of exponent and of mantissa.
_FLOATS = {
    torch.float32: (8, 23),
    torch.float64: (11, 52),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
    torch.float8_e4m3fnuz: (4, 3),
    torch.float8_e5m2fnuz: (5, 2),
    torch.float8_e8m0fnu: (8, 0),
}
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}

#: Every dtype that a plan can have: those that ``torch.clone`` copies, the dullest first.
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8,
    torch.int16, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.complex32,
)  # fmt: skip

#: Those that torch can negate lazily, as the imaginary part of a conjugate is.
NEGATABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *_COMPLEX)

# The stream of random words repeats after PERIOD * 4 of them. PERIOD is a prime, so that an index that is wrong by a
# power of two, or by a tile, meets another value.
PERIOD = 262_139
SPREAD = 0x9E3779B1  # a prime too, so that neighbouring seeds begin far from each other
MULTIPLIER = 0x45D9F3B

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def number(dtype: torch.dtype) -> torch.dtype:
    """The signed integer as wide as one number of `dtype`, of which a complex element has two."""
    return _BITS[_COMPLEX.get(dtype, dtype).itemsize]


def first_word(seed: int) -> int:
    """Where in the stream the values of `seed` begin; a multiple of 16 bytes, so of any number's size."""
    return (seed + 1) * SPREAD % PERIOD * 4


def masks(dtype: torch.dtype) -> tuple[int, int]:
    """Bits to keep of a random number and bits to set, for an ordinary value of `dtype`.

    A floating number keeps sign, mantissa and the lowest bit of its exponent, and is set to a
    magnitude of about 1; an integer keeps everything.
    """
    dtype = _COMPLEX.get(dtype, dtype)
    every = (1 << dtype.itemsize * 8) - 1
    if dtype is torch.bool:
        return 1, 0
    if dtype not in _FLOATS:
        return every, 0
    exponent, mantissa = _FLOATS[dtype]
    fixed = ((1 << exponent) - 2) << mantissa
    return every ^ fixed, ((1 << exponent - 1) - 2) << mantissa


@functools.cache
def specials(dtype: torch.dtype) -> dict[str, int]:
    """The special values of `dtype` by name, as the bits of a signed integer; the dullest first."""
    dtype = _COMPLEX.get(dtype, dtype)
    bits = dtype.itemsize * 8
    sign = 1 << bits - 1
    if dtype is torch.bool:
        named = {"1": 1, "0": 0}
    elif dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        named = {"1": 1, "max": 2 * sign - 1, "0": 0, "half": sign}
    elif dtype in _INTEGERS:
        named = {"1": 1, "max": sign - 1, "0": 0, "-1": 2 * sign - 1, "min": sign}
    else:
        exponent, mantissa = _FLOATS[dtype]
        one = ((1 << exponent - 1) - 1) << mantissa
        inf, quiet, tiny = ((1 << exponent) - 1) << mantissa, 1 << mantissa >> 1, 1 << mantissa
        finite = {"0": 0, "-0": sign, "subnormal": 1, "-subnormal": sign | 1}
        if dtype is torch.float8_e8m0fnu:  # powers of two alone, without a sign
            named = {"1": one, "nan": 0xFF, "max": 0xFE, "tiny": 0}
        elif dtype is torch.float8_e4m3fn:
            named = {"1": one, "nan": 0x7F, "max": 0x7E, "tiny": tiny, "min": 0xFE, **finite, "-nan": 0xFF}
        elif dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):  # the exponent's bias is one more, -0 is NaN
            named = {"1": one + tiny, "nan": 0x80, "max": 0x7F, "tiny": tiny, "min": 0xFF, **finite}
            del named["-0"]
        else:
            named = {
                "1": one, "nan": inf | quiet, "max": inf - 1, "tiny": tiny, "min": sign | inf - 1, **finite,
                "-nan": sign | inf | quiet, "inf": inf, "-inf": sign | inf, "payload": inf | quiet | 1, "snan": inf | 1,
            }  # fmt: skip
    return {name: signed(value, bits) for name, value in named.items()}


def signed(value: int, bits: int) -> int:
    """`value`, below two to the `bits`, as the signed integer of the same bits."""
    return value - (1 << bits) if value >> bits - 1 else value


@functools.cache
def _stream() -> np.ndarray:
    """The stream of random words."""
    word: np.ndarray = np.arange(PERIOD * 4, dtype=np.uint32)
    for _ in range(2):
        word = (word ^ word >> 16) * np.uint32(MULTIPLIER)
    return word ^ word >> 16


@functools.cache
def _block(width: int, keep: int, put: int) -> np.ndarray:
    """The stream as numbers of `width` bytes, each with bits taken away and set."""
    numbers = _stream().view(f"i{width}")
    if put == 0 and keep == (1 << width * 8) - 1:
        return numbers
    return (numbers & signed(keep, width * 8)) | signed(put, width * 8)


def fill(flat: np.ndarray, dtype: torch.dtype, seed: int) -> None:
    """Fills a one-dimensional array of integers, as wide as ``number(dtype)``, with the values of `seed`."""
    block = _block(flat.itemsize, *masks(dtype))
    first = first_word(seed) * 4 // flat.itemsize
    period, count = block.size, flat.size
    head = min(count, period - first)
    flat[:head] = block[first : first + head]
    for begin in range(head, count, period):
        flat[begin : begin + period] = block[: count - begin]
