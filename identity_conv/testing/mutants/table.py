"""The table of all kernels: the mutants, and the right ones beside them."""

from __future__ import annotations

from typing import Any

import torch

from ..compare import close
from .cuda_table import ON_CUDA, RIGHT_ON_CUDA
from .kernels import Kernel
from .witness import (
    by_method,
    changes,
    changes_gradient,
    differs,
    differs_with,
    earlier_changes,
    ends,
    fails,
    fixes_sizes,
    foretold_alias,
    foretold_wrong,
    foretold_wrong_with,
    from_threads,
    in_inference_mode,
    keeps_memory,
    leaves_memory_as_it_was,
    marks,
    no_gradient,
    no_second_gradient,
    other_gradient_again,
    remembers,
    shares,
    state_lost,
    state_shared,
    steps_beside,
    undefined_gradient,
    with_threads,
    wrong_factor,
    wrong_gradient,
    wrong_tangent,
)


def _sum_of(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    return x + y if z is None else x + y + z


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _with_negative(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), -x


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def _clipped(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return x.clamp(low, high)


def _rolled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.roll(by)


def _flipped(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.flip(dims)


def _summed(x: torch.Tensor, keepdim: bool) -> torch.Tensor:
    return x.sum(-1, keepdim=keepdim)


# Each with the witness in few words: what shows it, or the input that does.

_LAYOUT = (
    Kernel("strides_ignored", "strides", "strides are ignored", ("layout",),
           differs(lambda: torch.arange(12.0).view(3, 4)[:, :3])),
    Kernel("strides_ignored_3d", "strides", "strides are ignored from three dimensions on", ("layout",),
           differs(lambda: torch.arange(24.0).view(2, 3, 4)[:, :2])),
    Kernel("innermost_stride", "strides", "the innermost stride is taken for 1", ("layout",),
           differs(lambda: torch.arange(10.0)[::2])),
    Kernel("stride_zero", "strides", "the last element of an expanded tensor is another", ("layout",),
           differs(lambda: torch.arange(3.0).expand(2, 3))),
    Kernel("overlap", "strides", "the last element is another where windows overlap", ("layout",),
           differs(lambda: torch.arange(5.0).unfold(0, 3, 1))),
    Kernel("unit_stride", "strides", "the stride of a dimension of size 1 is believed", ("layout",),
           differs(lambda: torch.ones(9).as_strided((1, 4), (9, 1)))),
    Kernel("offset_ignored", "offset", "the offset into the storage is ignored", ("layout",),
           differs(lambda: torch.arange(5.0)[2:])),
    Kernel("alignment_assumed", "offset", "a start that isn't aligned is rounded down", ("layout",),
           differs(lambda: torch.arange(9.0)[5:])),
    Kernel("conj_ignored", "lazy bits", "a conjugate bit is ignored", ("layout",),
           differs(lambda: torch.tensor([1 + 2j]).conj())),
    Kernel("neg_ignored", "lazy bits", "a negative bit is ignored", ("layout",),
           differs(lambda: torch._neg_view(torch.ones(2)))),
    Kernel("row_major", "output's strides", "the output is row-major", ("strides",),
           differs(lambda: torch.arange(6.0).view(2, 3).t())),
    Kernel("channels_last_lost", "output's strides", "a channels-last input gives a row-major output", ("strides",),
           differs(lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))),
)  # fmt: skip

_VALUES = (
    Kernel("nan_payload", "value classes", "a NaN loses its payload", ("values",),
           differs(lambda: torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32))),
    Kernel("negative_zero", "value classes", "minus zero becomes zero", ("values",),
           differs(lambda: torch.tensor([-0.0]))),
    Kernel("subnormal", "value classes", "subnormal numbers become zero", ("values",),
           differs(lambda: torch.tensor([1e-40]))),
    Kernel("infinity", "value classes", "infinity becomes the largest number", ("values",),
           differs(lambda: torch.tensor([torch.inf]))),
    Kernel("int64_by_double", "dtype paths", "an int64 is copied through a double", ("values",),
           differs(lambda: torch.tensor([(1 << 53) + 1]))),
    Kernel("float64_by_float32", "dtype paths", "a float64 is copied through a float32", ("values",),
           differs(lambda: torch.tensor([0.1], dtype=torch.float64))),
    Kernel("int16_path", "dtype paths", "the second element of int16 is another", ("values",),
           differs(lambda: torch.ones(2, dtype=torch.int16))),
    Kernel("float8_path", "dtype paths", "the second element of float8 is another", ("values",),
           differs(lambda: torch.ones(2).to(torch.float8_e5m2))),
    Kernel("complex128_path", "dtype paths", "the first element of complex128 is another", ("values",),
           differs(lambda: torch.ones(1, dtype=torch.complex128))),
    Kernel("float16_widened", "dtype paths", "a float16 comes out as float32", ("dtype",),
           differs(lambda: torch.ones(1, dtype=torch.float16))),
    Kernel("int8_silent", "dtype paths", "an int8 is refused without a word", ("accepts",),
           fails(lambda: torch.ones(1, dtype=torch.int8), "")),
    Kernel("inference_mode", "modes", "the first element is another in inference mode", ("values",),
           in_inference_mode),
)  # fmt: skip

_SIZES = (
    Kernel("tail_lost", "tail", "what a vector of 32 bytes doesn't fill is zero", ("values", "sizes"),
           differs(lambda: torch.ones(9))),
    Kernel("tail_lost_large", "tail", "from 4097 elements on the last one is another", ("sizes",),
           differs(lambda: torch.ones(4097))),
    Kernel("overflow_16", "overflow", "elements are counted in 16 bits", ("sizes",),
           differs(lambda: torch.ones(65_537))),
    Kernel("overflow_32", "overflow", "elements are counted in 32 bits", ("sizes",),
           differs(lambda: torch.ones((1 << 31) + 1, dtype=torch.uint8)), tier="full", needs="20 GiB"),
    Kernel("empty_aborts", "empty", "an empty tensor ends the process", ("sizes",),
           ends(lambda: torch.ones(0))),
    Kernel("empty_hangs", "empty", "an empty tensor never returns", ("sizes",),
           ends(lambda: torch.ones(0))),
    Kernel("hangs", "sizes", "thirteen elements never return", ("values", "sizes"),
           ends(lambda: torch.ones(13))),
    Kernel("exits", "rank", "five dimensions end the process as if all were well", ("values", "layout", "sizes"),
           ends(lambda: torch.ones(1, 1, 1, 1, 1))),
    Kernel("scalar_refused", "rank", "a tensor of no dimension is refused", ("accepts", "sizes"),
           fails(lambda: torch.ones(()))),
    Kernel("scalar_as_row", "rank", "a tensor of no dimension gets one", ("values", "sizes"),
           differs(lambda: torch.ones(()))),
    Kernel("rank_7", "rank", "there is room for the strides of six dimensions", ("sizes", "layout"),
           differs(lambda: torch.ones(1, 1, 1, 1, 1, 1, 2))),
)  # fmt: skip

_MEMORY = (
    Kernel("alias_single", "alias", "a single element is given back, not copied", ("alias",),
           shares(lambda: torch.ones(1))),
    Kernel("alias_row", "alias", "a dense row is given back, not copied", ("alias",),
           shares(lambda: torch.ones(3))),
    Kernel("alias_earlier", "alias", "the output of the call before is given again", ("alias",),
           earlier_changes),
    Kernel("writes_input", "out of bounds", "the input's first element is changed", ("inputs_untouched",),
           changes(lambda: torch.ones(9))),
    Kernel("writes_gap", "out of bounds", "what lies between the elements of a row is changed",
           ("inputs_untouched", "bounds"), changes(lambda: torch.ones(6)[::2])),
    Kernel("reads_behind", "out of bounds", "a byte behind the input is read", ("bounds",),
           steps_beside(before=False)),
    Kernel("reads_before", "out of bounds", "a byte before the input is read", ("bounds",),
           steps_beside(before=True)),
    Kernel("writes_behind", "out of bounds", "an element behind the output is written", ("bounds",),
           marks(4, 4)),
    Kernel("writes_before", "out of bounds", "a byte before the output is written", ("bounds",),
           marks(-1, 1)),
    Kernel("unwritten", "uninitialised", "the last of several elements is never written", ("written",),
           leaves_memory_as_it_was(1.0)),
    Kernel("zeros_unwritten", "uninitialised", "zeros are never written", ("written",),
           leaves_memory_as_it_was(0.0)),
    Kernel("second_call", "earlier calls", "the second call is wrong", ("deterministic", "no_memory"),
           differs(lambda: torch.ones(3), times=2)),
    Kernel("hundredth_call", "earlier calls", "every hundredth call is wrong", ("deterministic", "no_memory"),
           differs(lambda: torch.ones(3), times=100)),
    Kernel("cache_by_address", "earlier calls", "an input at the address of an earlier one is taken for it",
           ("no_memory",), remembers),
    Kernel("shared_scratch", "threads", "calls from several threads share memory", ("threads",),
           from_threads(4, 200_000, 200)),
    Kernel("shared_row", "threads", "the threads of one call share memory", ("threads", "sizes", "deterministic"),
           with_threads(200_000, 4)),
    Kernel("border_lost", "threads", "a thread leaves out the first element of its part", ("threads", "sizes"),
           with_threads(100_000, 4)),
    Kernel("first_thread", "threads", "another thread than the one that called first is wrong", ("threads",),
           from_threads(2, 3, 1)),
    Kernel("leak", "leak", "memory isn't given back", ("leak",),
           keeps_memory, tier="full"),
)  # fmt: skip

_FAKES = (
    Kernel("fake_missing", "fake", "there is no fake", ("fake",),
           fails(lambda: torch.ones(3, device="meta"))),
    Kernel("fake_dtype", "fake", "the fake says float32", ("fake",),
           foretold_wrong(lambda: torch.ones(3, dtype=torch.int64))),
    Kernel("fake_dtype_half", "fake", "the fake of float16 says float32", ("fake",),
           foretold_wrong(lambda: torch.ones(3, dtype=torch.float16))),
    Kernel("fake_row_major", "fake", "the fake is always row-major", ("fake",),
           foretold_wrong(lambda: torch.ones(2, 3).t())),
    Kernel("fake_flat", "fake", "the fake has one dimension", ("fake",),
           foretold_wrong(lambda: torch.ones(2, 3))),
    Kernel("fake_row_more", "fake", "the fake has a row more than there is", ("fake",),
           foretold_wrong(lambda: torch.ones(2, 3))),
    Kernel("fake_fixed", "fake", "the fake fixes sizes", ("symbolic",),
           fixes_sizes),
    Kernel("fake_alias", "fake", "the fake shares its input's memory", ("fake",),
           foretold_alias),
)  # fmt: skip

_DERIVATIVES = (
    Kernel("grad_missing", "gradient", "there is no gradient", ("grad",),
           no_gradient),
    Kernel("grad_twice", "gradient", "the gradient is twice the right one", ("grad",),
           wrong_gradient(lambda: torch.ones(3))),
    Kernel("grad_expanded", "gradient", "it is wrong where it comes in expanded", ("grad",),
           wrong_gradient(lambda: torch.ones(1).expand(3))),
    Kernel("grad_dense", "gradient", "its own strides are ignored", ("grad",),
           wrong_gradient(lambda: torch.arange(6.0).view(2, 3).t())),
    Kernel("grad_scalar", "gradient", "that of a tensor of no dimension is wrong", ("grad",),
           wrong_gradient(lambda: torch.ones(())), tier="full"),
    Kernel("grad_bfloat16", "gradient", "that of bfloat16 is wrong", ("grad",),
           wrong_gradient(lambda: torch.ones(3, dtype=torch.bfloat16)), tier="full"),
    Kernel("grad_conjugated", "gradient", "that of a complex number is conjugated", ("grad",),
           wrong_gradient(lambda: torch.tensor([1 + 2j])), tier="full"),
    Kernel("grad_undefined", "gradient", "an undefined one is taken for one", ("grad",),
           undefined_gradient),
    Kernel("grad_once", "second order", "the gradient has no gradient", ("second_order",),
           no_second_gradient),
    Kernel("grad_again", "gradient", "a second backward of the same graph is wrong", ("grad",),
           other_gradient_again),
    Kernel("grad_zeroing", "gradient", "the one that comes in is zero afterwards", ("grad", "inputs_untouched"),
           changes_gradient),
    Kernel("tangent_lost", "forward mode", "the tangent is lost", ("forward_ad",),
           wrong_tangent),
    Kernel("tangent_zero", "forward mode", "the tangent is zero", ("forward_ad",),
           wrong_tangent),
)  # fmt: skip

_CLASSES = (
    Kernel("Forgets", "state", "pickling loses a field", ("state",),
           state_lost),
    Kernel("Rounds", "state", "pickling gives a tensor in another dtype", ("state",),
           state_lost),
    Kernel("PickledOnce", "state", "pickling changes the object", ("state",),
           state_lost),
    Kernel("Counts", "tracing", "flattening, as tracing does it, changes the object", ("state", "traced"),
           state_lost),
    Kernel("Shared", "state", "all objects have one tensor, the latest", ("state",),
           state_shared),
    Kernel("Strides", "output's strides", "the method's output is row-major", ("strides",),
           by_method(differs(lambda: torch.arange(6.0).view(2, 3).t()))),
)  # fmt: skip

_NUMBERS = (
    Kernel("scaled_unsigned", "numbers", "the factor's sign is ignored", ("values",),
           differs_with(_scaled, lambda: torch.ones(3), -1.0), reference=_scaled, compare=close()),
    Kernel("scaled_whole", "numbers", "the factor's fraction is lost", ("values",),
           differs_with(_scaled, lambda: torch.ones(3), 1.5), reference=_scaled, compare=close()),
    Kernel("scaled_by_float32", "numbers", "the factor is kept as a float32", ("values",),
           differs_with(_scaled, lambda: torch.ones(3, dtype=torch.float64), 0.1), reference=_scaled, compare=close()),
    Kernel("scaled_by_zero", "numbers", "a factor of 0 gives 0, of infinity and NaN too", ("values",),
           differs_with(_scaled, lambda: torch.tensor([torch.inf]), 0.0), reference=_scaled,
           compare=close()),
    Kernel("scaled_by_infinity", "numbers", "a factor of infinity is taken for the largest number", ("values",),
           differs_with(_scaled, lambda: torch.ones(3), torch.inf), reference=_scaled, compare=close()),
    Kernel("clipped_swapped", "numbers", "bounds in the wrong order are swapped", ("values",),
           differs_with(_clipped, lambda: torch.arange(5.0), 3.0, 1.0), reference=_clipped),
    Kernel("clipped_nan", "numbers", "a bound of NaN is taken for none", ("values",),
           differs_with(_clipped, lambda: torch.arange(5.0), torch.nan, 1.0), reference=_clipped),
    Kernel("rolled_forward", "numbers", "it is never rolled backwards", ("values",),
           differs_with(_rolled, lambda: torch.arange(5.0), -1), reference=_rolled),
    Kernel("rolled_32", "numbers", "the places are counted in 32 bits", ("values",),
           differs_with(_rolled, lambda: torch.arange(5.0), 1 << 31), reference=_rolled),
    Kernel("flipped_first", "numbers", "of several dimensions the first alone is turned", ("values",),
           differs_with(_flipped, lambda: torch.arange(6.0).view(2, 3), [0, 1]), reference=_flipped),
    Kernel("flipped_negative", "numbers", "a dimension counted from the end isn't turned", ("values",),
           differs_with(_flipped, lambda: torch.arange(6.0).view(2, 3), [-1]), reference=_flipped),
    Kernel("summed_fake", "fake", "the fake never keeps the dimension", ("fake",),
           foretold_wrong_with(lambda: torch.ones(2, 3), True), reference=_summed, compare=close()),
    Kernel("scaled_gradient", "gradient", "the gradient forgets the factor", ("grad",),
           wrong_factor(1.5), reference=_scaled, compare=close()),
    Kernel("scaled_gradient_unsigned", "gradient", "the gradient ignores the factor's sign", ("grad",),
           wrong_factor(-1.0), reference=_scaled, compare=close()),
)  # fmt: skip

#: Every mutant: of CPU, then of CUDA.
MUTANTS: tuple[Kernel, ...] = (
    *_LAYOUT, *_VALUES, *_SIZES, *_MEMORY, *_FAKES, *_DERIVATIVES, *_CLASSES, *_NUMBERS, *ON_CUDA,
)  # fmt: skip


def _right(name: str, kind: str, reference: Any = torch.clone, **fields: Any) -> Kernel:
    return Kernel(name, kind, reference=reference, **fields)


#: What a checker must let pass: of CPU, then of CUDA.
RIGHT: tuple[Kernel, ...] = (
    _right("copied", "C++ with a gradient"),
    _right("copied_by_threads", "several threads"),
    _right("copied_by_strides", "element by element"),
    _right("composed", "made of torch's operators"),
    _right("scaled", "a number, <identity_conv/autograd.h>", _scaled, compare=close()),
    _right("clipped", "two numbers", _clipped),
    _right("rolled", "an integer", _rolled),
    _right("flipped", "a list of integers", _flipped),
    _right("summed", "a truth value", _summed, compare=close()),
    _right("sum_of", "several tensors, an optional one", _sum_of),
    _right("with_negative", "two outputs", _with_negative),
    _right("row_sums", "a reduction", _row_sums, compare=close()),
    _right("Kept", "a class"),
    _right("aten::clone", "torch's own"),
    _right("aten::neg", "torch's own", torch.neg),
    _right("aten::maximum", "torch's own", torch.maximum),
    *RIGHT_ON_CUDA,
)
