"""torch's own operators on the CPU, each held against a formula: a night's work, in which nothing false may be said."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from identity_conv.testing import CheckFailure, check_op, close, memory

PAGE = Path(__file__).parent.parent / "docs" / "testing.md"

#: What most formulas are meant for.
FLOATS = (torch.float32, torch.float64)
#: What operators that give truth values take, though not always uint16 or a float8.
USUAL = (
    *FLOATS, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16, torch.bool,
)  # fmt: skip
OWN_STRIDES = {"strides": "the formula lays its result out in another way"}

Case = tuple[Callable[..., Any], dict[str, Any]]


def near(reference: Callable[..., Any], **options: Any) -> Case:
    """Floating-point numbers, as near to the formula's as rounding lets them be."""
    return reference, {"dtypes": FLOATS, "compare": close(1e-5, 1e-5), **options}


def alike(reference: Callable[..., Any], **options: Any) -> Case:
    """The formula's numbers bit for bit, in every dtype that it takes."""
    return reference, options


def clamped(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    if min is None and max is None:
        raise ValueError("one of both must be there")
    x = x if min is None else x.maximum(torch.full_like(x, min))
    return x if max is None else x.minimum(torch.full_like(x, max))


def interpolated(x: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
    return x + weight * (y - x) if abs(weight) < 0.5 else y - (1 - weight) * (y - x)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    below = x - x.amax(dim, keepdim=True)
    return below - below.exp().sum(dim, keepdim=True).log()


def log_sum_exp(x: torch.Tensor, dim: list[int]) -> torch.Tensor:
    most = x.amax(dim, keepdim=True)
    most = torch.where(most.isinf(), 0.0, most)
    total = (x - most).exp().sum(dim, keepdim=True).log() + most
    return total.reshape(x.sum(dim).shape)


def repeated(x: torch.Tensor, repeats: list[int]) -> torch.Tensor:
    if len(repeats) < x.dim():
        raise ValueError("there must be a number for each dimension")
    return x.tile(repeats)


def lower(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    return x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(diagonal + 1), 0)


CASES: dict[str, Case] = {
    # one element each
    "abs": near(lambda x: torch.where(x < 0, -x, x)),
    "acos": near(lambda x: math.pi / 2 - x.asin()),
    "ceil": near(lambda x: -(-x).floor()),
    "clamp": near(clamped),
    "clone": alike(lambda x: torch.empty_like(x).copy_(x)),
    "cos": near(lambda x: 1 - 2 * (x / 2).sin() ** 2),
    "cosh": near(lambda x: (x.exp() + (-x).exp()) / 2),
    "elu": near(lambda x: torch.where(x > 0, x, x.clamp(max=0).expm1())),
    "erfc": near(lambda x: 1 - x.erf()),
    "exp2": near(lambda x: (x * math.log(2)).exp()),
    "frac": near(lambda x: x - x.trunc()),
    "gelu": near(lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2),
    "hardswish": near(lambda x: x * (x + 3).clamp(0, 6) / 6),
    "hardtanh": near(lambda x: x.clamp(-1, 1)),
    "isinf": alike(lambda x: x.abs() == math.inf, dtypes=USUAL),
    "isnan": alike(lambda x: x != x),
    "leaky_relu": near(lambda x, negative_slope=0.01: torch.where(x > 0, x, negative_slope * x)),
    "log10": near(lambda x: x.log() / math.log(10)),
    "log1p": near(lambda x: (1 + x).log()),
    "log2": near(lambda x: x.log() / math.log(2)),
    "logical_not": alike(lambda x: x == 0, dtypes=USUAL),
    "mish": near(lambda x: x * functional.softplus(x).tanh()),
    "nan_to_num": near(
        lambda x: torch.where(x.isnan(), 0.0, x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max))
    ),
    "neg": near(lambda x: 0 - x),
    "ones_like": alike(lambda x: torch.empty_like(x).fill_(1)),
    "reciprocal": near(lambda x: 1 / x),
    "relu": near(lambda x: x.clamp(min=0)),
    "rsqrt": near(lambda x: 1 / x.sqrt()),
    "rsub.Scalar": near(lambda x, other: -(x - other)),
    "sigmoid": near(lambda x: 1 / (1 + (-x).exp())),
    "sign": near(lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype)),
    "silu": near(lambda x: x * x.sigmoid()),
    "softplus": near(lambda x: torch.where(x > 20, x, x.exp().log1p())),
    "square": near(lambda x: x * x),
    "tan": near(lambda x: x.sin() / x.cos()),
    "tanh": near(lambda x: 2 * (2 * x).sigmoid() - 1),
    "threshold": near(lambda x, threshold, value: torch.where(x <= threshold, value, x)),
    "trunc": near(lambda x: torch.where(x < 0, x.ceil(), x.floor())),
    # several tensors
    "add.Tensor": near(lambda x, y: -(-x - y), skip=OWN_STRIDES),
    "addcdiv": near(lambda x, y, z: x + y / z, skip=OWN_STRIDES),
    "addcmul": near(lambda x, y, z: x + y * z, skip=OWN_STRIDES),
    "atan2": near(lambda y, x: torch.complex(x, y).angle(), skip=OWN_STRIDES),
    "bitwise_and.Tensor": alike(lambda x, y: (x | y) ^ (x ^ y)),
    "copysign.Tensor": near(lambda x, y: torch.where(y.signbit(), -x.abs(), x.abs()), skip=OWN_STRIDES),
    "eq.Tensor": alike(lambda x, y: ~(x != y)),
    "fmax": near(lambda x, y: torch.where((x > y) | y.isnan(), x, y)),
    "fmin": near(lambda x, y: torch.where((x < y) | y.isnan(), x, y)),
    "ge.Tensor": alike(lambda x, y: (x > y) | (x == y)),
    "hypot": near(lambda x, y: torch.complex(x, y).abs(), skip=OWN_STRIDES),
    "lerp.Scalar": near(interpolated, skip=OWN_STRIDES),
    "logaddexp": near(lambda x, y: torch.stack(torch.broadcast_tensors(x, y)).logsumexp(0), skip=OWN_STRIDES),
    "logical_xor": alike(lambda x, y: (x != 0) != (y != 0), dtypes=USUAL, skip=OWN_STRIDES),
    "maximum": near(lambda x, y: torch.where((x > y) | x.isnan(), x, y)),
    "minimum": near(lambda x, y: torch.where((x < y) | x.isnan(), x, y)),
    "mul.Tensor": near(lambda x, y: torch.addcmul(torch.zeros_like(x), x, y), skip=OWN_STRIDES),
    "sub.Tensor": near(lambda x, y: x + (-y)),
    "where.self": alike(
        lambda condition, x, y: torch.where(condition == 0, y, x), dtypes=(torch.bool, torch.uint8), skip=OWN_STRIDES
    ),
    # along dimensions
    "_log_softmax": near(log_softmax, inputs={"half_to_float": False}, skip=OWN_STRIDES),
    "_softmax": near(
        lambda x, dim, half_to_float: log_softmax(x, dim, half_to_float).exp(),
        inputs={"half_to_float": False},
        skip=OWN_STRIDES,
    ),
    "amax": near(lambda x, dim: -(-x).amin(dim)),
    "any.dim": alike(lambda x, dim: (x != 0).sum(dim) > 0, dtypes=(torch.bool, *FLOATS)),
    "count_nonzero.dim_IntList": alike(lambda x, dim: (x != 0).sum(dim), dtypes=USUAL),
    "logsumexp": near(log_sum_exp),
    "mean.dim": near(lambda x, dim: x.sum(dim) / torch.ones_like(x).sum(dim)),
    "sum.dim_IntList": near(lambda x, dim: -(-x).sum(dim)),
    # where elements lie
    "cat": alike(lambda tensors: torch.concatenate(tensors)),
    "constant_pad_nd": alike(lambda x, pad: functional.pad(x, pad)),
    "flip": alike(lambda x, dims: x.flip(dims)),
    "repeat": alike(repeated),
    "roll": alike(lambda x, shifts: x.flatten().roll(shifts, 0).view(x.shape)),
    "select_copy.int": alike(lambda x, dim, index: x.narrow(dim, index, 1).squeeze(dim).contiguous().clone()),
    "stack": alike(lambda tensors: torch.cat([each.unsqueeze(0) for each in tensors]), skip=OWN_STRIDES),
    "transpose_copy.int": alike(lambda x, dim0, dim1: x.transpose(dim0, dim1).contiguous().clone()),
    "tril": alike(lower, shapes={"self": ("...", "M", "N")}),
    "unsqueeze_copy": alike(lambda x, dim: x.unsqueeze(dim).contiguous().clone()),
    # products
    "addmm": near(
        lambda c, a, b: c + a @ b,
        shapes={"self": ("M<=64", "N<=64"), "mat1": ("M", "K<=64"), "mat2": ("K", "N")},
        skip=OWN_STRIDES,
    ),
    "bmm": near(
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        shapes={"self": ("B<=32", "M<=32", "K<=32"), "mat2": ("B", "K", "N<=32")},
        skip=OWN_STRIDES,
    ),
    "dot": near(lambda a, b: (a * b).sum(), shapes={"self": ("N<=300",), "tensor": ("N",)}),
    "mm": near(
        lambda a, b: torch.einsum("ij,jk->ik", a, b), shapes={"self": ("M<=32", "K<=32"), "mat2": ("K", "N<=32")}
    ),
    "mv": near(lambda a, b: (a * b).sum(-1), shapes={"self": ("M<=300", "K<=300"), "vec": ("K",)}),
    "outer": near(lambda a, b: a.unsqueeze(-1) * b, shapes={"self": ("M<=300",), "vec2": ("N<=300",)}),
}

#: What is found and true: by operator the checks that may say it, and what a caller may not expect.
FACTS: dict[str, tuple[set[str], str]] = {
    "_log_softmax": ({"sizes", "grad"}, "its sum of 70,000 float32 numbers and more has lost digits"),
    "addcmul": ({"values"}, "it rounds once: what overflows in between does not there"),
    "addmm": ({"values"}, "under autocast the sum too is of bfloat16"),
    "cat": ({"compile"}, "compiled by inductor it keeps the strides of a single tensor"),
    "fmax": ({"values"}, "a signaling NaN isn't passed over"),
    "fmin": ({"values"}, "a signaling NaN isn't passed over"),
    "gelu": ({"values", "accepts"}, "of infinity it is NaN in some lengths, and it takes no more than 12 dimensions"),
    "lerp.Scalar": ({"values"}, "it rounds once: what overflows in between does not there"),
    "mm": ({"values", "layout"}, "where a sum overflows depends on its order"),
    "mv": ({"values", "layout"}, "where a sum overflows depends on its order"),
    "select_copy.int": ({"accepts", "grad", "second_order"}, "it has no gradient of complex numbers"),
    "stack": ({"compile"}, "compiled by inductor it keeps the strides of a single tensor"),
    "where.self": ({"fake"}, "the fake refuses a condition of uint8, which the operator takes"),
}


@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_nothing_false_is_said_of_an_operator_of_torch(name: str) -> None:
    memory.guarded_allocator(build=True)
    reference, options = CASES[name]
    found: set[str] = set()
    try:
        check_op(f"aten::{name}", reference, tier="full", **options)
    except CheckFailure as failure:
        print(failure)
        found = {each.check for each in failure.violations}
    true = FACTS.get(name, (set(), ""))[0]
    assert found <= true
    assert bool(found) == bool(true)  # how far it gets into an operator that is wrong depends on the machine


def test_the_page_counts_them() -> None:
    page = " ".join(PAGE.read_text().split())
    assert f"{len(CASES)} operators of `aten` on CPU" in page
    assert f"{len(CASES) - len(FACTS)} pass" in page
    assert all(f"`{name.partition('.')[0]}`" in page for name in FACTS)
