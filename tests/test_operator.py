"""my_ops::identity_conv_op: the values, sizes and strides of torch.clone, for whatever a tensor can be.

`check_op` looks for everything that it knows; what stands here beside it is particular to this operator.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import identity_conv
from identity_conv.testing import Call, TensorPlan, check_op, sweep
from identity_conv.testing.registry import CHECKS

op = identity_conv.identity_conv


def raw_bytes(x: torch.Tensor) -> bytes:
    dense = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return bytes(dense.reshape(-1).view(torch.uint8).numpy())


def check(x: torch.Tensor) -> None:
    """For what no plan describes: the same bytes and strides as torch.clone."""
    y, reference = op(x), torch.clone(x)
    assert (y.dtype, y.device, y.shape, y.stride()) == (x.dtype, x.device, reference.shape, reference.stride())
    assert raw_bytes(y) == raw_bytes(reference)


def test_it_is_torch_clone(device: str) -> None:
    check_op("my_ops::identity_conv_op", torch.clone, devices=[device])


@pytest.mark.night
def test_it_is_torch_clone_at_full() -> None:
    check_op("my_ops::identity_conv_op", torch.clone, devices=["cpu"], tier="full")


@pytest.mark.night
@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["full", "huge"])
def test_it_is_torch_clone_at_full_on_a_gpu(tier: str) -> None:
    check_op("my_ops::identity_conv_op", torch.clone, devices=["cuda"], tier=tier)


def test_layouts_large_enough_for_threads_and_tails(device: str) -> None:
    calls = [Call((plan,)) for plan in sweep.large([torch.uint8, torch.bfloat16, torch.complex128])]
    kept = {"values", "layout", "sizes", "strides", "bounds", "inputs_untouched"}
    skip = dict.fromkeys(CHECKS.keys() - kept, "looked at with smaller tensors")
    check_op("my_ops::identity_conv_op", torch.clone, devices=[device], inputs=calls, skip=skip)


def test_rows_of_every_length_once_and_repeated(device: str) -> None:
    calls = [
        Call((plan,))
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)
        for length in (*range(1, 70), 127, 1000, 4097, 20_011)
        for plan in (
            TensorPlan((3, length), dtype, padding=(0, 3), offset=1),
            TensorPlan((3, length), dtype, step=(1, 3)),
            TensorPlan((length,), dtype, expand=(0,)),
            TensorPlan((11, length), dtype, expand=(0,)),
            TensorPlan((length, 11), dtype, expand=(1,)),
        )
    ]
    kept = {"values", "layout", "bounds", "inputs_untouched"}
    skip = dict.fromkeys(CHECKS.keys() - kept, "looked at with other tensors")
    check_op("my_ops::identity_conv_op", torch.clone, devices=[device], inputs=calls, skip=skip)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
def test_a_large_output_is_in_huge_pages() -> None:
    y = identity_conv.identity_conv(torch.zeros(16 << 20, dtype=torch.uint8))
    middle = y.data_ptr() + y.nbytes // 2
    # A mapping's lines in smaps start with its range and end with its flags; "hg" is the advice.
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(number, 16) for number in mapping.split()[0].split("-"))
        if begin <= middle < end:
            assert " hg" in mapping.split("VmFlags:")[1]
            return
    raise AssertionError("the output is in no mapping")


def test_an_element_off_its_natural_boundary_is_copied() -> None:
    memory = torch.randint(0, 256, (81,), dtype=torch.uint8)
    x = torch.frombuffer(memory.numpy(), dtype=torch.float64, offset=1, count=10)
    assert x.data_ptr() % 8 != 0
    check(x)


def _sparse() -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    eye = torch.eye(4)
    return {
        "sparse_coo": eye.to_sparse(),
        "sparse_csr": eye.to_sparse_csr(),
        "sparse_csc": eye.to_sparse_csc(),
        "sparse_bsr": eye.to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([eye, eye]),
        "jagged": torch.nested.nested_tensor([eye, eye], layout=torch.jagged),
        **({"mkldnn": eye.to_mkldnn()} if torch.backends.mkldnn.is_available() else {}),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode], ids=["grad", "inference"])
def test_a_tensor_that_is_not_strided_is_refused_by_name(grad: type) -> None:
    with grad():
        for layout, x in _sparse().items():
            if layout == "jagged" and grad is torch.inference_mode:
                # A Python subclass, which torch itself asks first; it names the operator.
                with pytest.raises(NotImplementedError, match="identity_conv_op"):
                    op(x)
                continue
            name = "nested" if layout == "jagged" else layout
            with pytest.raises(ValueError) as caught:
                op(x)
            assert str(caught.value).startswith(f"identity_conv_op: x must be a dense (strided) tensor, got {name}")


def test_a_node_is_made_only_where_grad_is_wanted(device: str) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    with torch.no_grad():
        assert op(x).grad_fn is None
    assert op(x.detach()).grad_fn is None
    assert not op(torch.ones(2, dtype=torch.int64, device=device)).requires_grad
    assert op(x).grad_fn.name() == "IdentityConvBackward"


def test_it_allocates_its_output_and_nothing_else() -> None:
    for fields in (
        {},
        {"permutation": (1, 0)},
        {"padding": (0, 3)},
        {"step": (3, 5)},
        {"expand": (0,)},
        {"conj": True},
    ):
        x = TensorPlan((301, 517), torch.complex64, **fields).build()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            y = op(x)
        allocated = sum(
            event.nbytes()
            for event in profile.profiler.kineto_results.events()
            if event.name() == "[memory]" and event.nbytes() > 0
        )
        assert allocated == y.numel() * y.element_size(), fields


#: More bytes than the kernel copies by its narrow vectors.
LARGE = (2 << 20) + 1


@pytest.mark.gpu
class TestOnCuda:
    def test_more_than_2_to_the_31_elements(self) -> None:
        x = torch.arange(256, dtype=torch.uint8, device="cuda").repeat((2**32 >> 8) + 3)
        for view in (
            x,
            x[1:],
            x[: 2**32].view(2, -1)[:, :-1],
            x[: 2**32].view(2, -1)[:, ::1][:, 1:],
            x.view(-1, 256)[:, :255].t()[::2],
        ):
            y = op(view)
            assert torch.equal(y, view)
            assert y.stride() == torch.clone(view).stride()
            del y
        del x
        far = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(2**33 >> 8).view(-1, 8)[:, 1:3]
        assert torch.equal(op(far), far)

    def test_memory_of_the_output_and_nothing_else(self) -> None:
        for view in (lambda x: x, lambda x: x[1:, ::2], lambda x: x.conj()):
            x = view(torch.zeros(1024, 1024, dtype=torch.complex64, device="cuda"))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = op(x)
            size = y.numel() * y.element_size()
            # The allocator hands out a block whole whose rest would be under 1 MiB.
            assert size <= torch.cuda.max_memory_allocated() - before < size + (1 << 20)
            del y

    @pytest.mark.parametrize("offset", range(17))
    @pytest.mark.parametrize("width", [1, 2, 3, 15, 16, 17, 31, 64, 255])
    def test_every_alignment_of_start_pitch_and_width(self, offset: int, width: int) -> None:
        for pitch in (width, width + 1, width + 5, width + 16):
            for rows in (40_000 // pitch, LARGE // width + 3):
                memory = torch.randint(0, 256, (offset + rows * pitch,), dtype=torch.uint8, device="cuda")
                x = memory[offset:].view(rows, pitch)[:, :width]
                y = op(x)
                assert torch.equal(y, x)
                assert y.stride() == torch.clone(x).stride()

    @pytest.mark.parametrize("bits", [22, 26])
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128], ids=str)
    def test_every_way_of_reading_elements_that_lie_far_apart(self, dtype: torch.dtype, bits: int) -> None:
        numbers = torch.randint(0, 127, [dtype.itemsize << bits], dtype=torch.uint8, device="cuda").view(dtype)
        in_2s = numbers.view([2] * bits)
        for name, x in {
            "one of many": numbers[5::37],
            "short rows": numbers.view(-1, 64)[1:, 3:6],
            "rows of a few lines": numbers.view(-1, 1024)[1:, 3:43],
            "6 dimensions": numbers.view(-1, 8, 8, 16, 16, 64)[:, 1:, 1:, 1:, 1:, 1:3],
            "11 dimensions and more": in_2s.permute(*range(0, bits, 2), *range(1, bits, 2))[(0,) * (bits // 2)],
            "columns": numbers.view(-1, 1024)[:, 1:].t()[::7],
            "each thrice": numbers[::9].unsqueeze(1).expand(-1, 3),
            "a few again and again": numbers.view(-1, 1024)[:261, 5].expand(9001, -1),
        }.items():
            y = op(x)
            assert torch.equal(y, x), name
            assert y.stride() == torch.clone(x).stride(), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_rank_beyond_the_usual(self, dtype: torch.dtype) -> None:
        x = torch.randn([4] * 9, dtype=dtype, device="cuda")[:, 1:, ::2, 1:, :, :-1, ::3, 1:, 1:]
        check(x)
