"""my_ops::identity_conv_op: the values, sizes and strides of torch.clone, for whatever a tensor can be."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import identity_conv

op = identity_conv.identity_conv

# Every dtype that torch.clone copies on this torch: integers of odd widths and quantized ones it refuses.
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Any bit pattern of the dtype: NaN payloads, infinities, subnormals and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator).bool().to(device)
    if not shape:
        return random_bits((1,), dtype, device, seed)[0]
    width = torch.empty(0, dtype=dtype).element_size()
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator)
    return numbers.to(device).view(dtype) if numbers.numel() else torch.empty(shape, dtype=dtype, device=device)


def raw_bytes(x: torch.Tensor) -> bytes:
    dense = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return bytes(dense.reshape(-1).view(torch.uint8).numpy())


def check(x: torch.Tensor) -> None:
    before = raw_bytes(x)
    y, reference = op(x), torch.clone(x)
    assert y.dtype == x.dtype
    assert y.device == x.device
    assert y.shape == reference.shape
    assert y.stride() == reference.stride()
    assert raw_bytes(y) == raw_bytes(reference)
    assert y.is_conj() == reference.is_conj()
    assert y.is_neg() == reference.is_neg()
    assert raw_bytes(x) == before
    if x.numel():
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@st.composite
def views(draw: st.DrawFn, device: str) -> torch.Tensor:
    """A view of random bits: sliced, stepped, permuted, expanded, conjugated, negated."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 7, 16, 33]), max_size=5)))
    if torch.Size(shape).numel() > 40_000:
        shape = shape[:3]
    x = random_bits(shape, dtype, device, draw(st.integers(0, 9)))
    if x.dim() and draw(st.booleans()):
        x = x[tuple(slice(draw(st.integers(0, size)), None, draw(st.integers(1, 3))) for size in x.shape)]
    if x.dim() > 1 and draw(st.booleans()):
        x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        x = x.unsqueeze(draw(st.integers(0, x.dim())))
        x = x.expand(
            [
                draw(st.integers(1, 4)) if stride == 0 or size == 1 else size
                for size, stride in zip(x.shape, x.stride(), strict=True)
            ]
        )
    if dtype.is_complex and draw(st.booleans()):
        x = x.conj()
        if dtype is not torch.complex32 and draw(st.booleans()):
            x = x.imag
    return x


@given(data=st.data())
def test_any_view_equals_its_clone_byte_for_byte(device: str, data: st.DataObject) -> None:
    check(data.draw(views(device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5), (1, 2, 1, 2, 1, 2, 1, 2), (100_003,)], ids=str
)
def test_every_dtype_and_rank(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(random_bits(shape, dtype, device))


LAYOUTS = {
    "rows with padding": lambda x: x[:, :-3],
    "rows with odd start": lambda x: x[:, 1:],
    "dense with odd start": lambda x: x.reshape(-1)[1:],
    "columns stepped": lambda x: x[:, ::2],
    "both stepped": lambda x: x[::3, ::5],
    "transposed slice": lambda x: x.t()[:, 1:],
    "narrow columns": lambda x: x[:, 4:7],
    "expanded rows": lambda x: x[:1].expand(64, -1),
    "expanded columns": lambda x: x[:, :1].expand(-1, 64),
    "channels last": lambda x: x[:120, :120].reshape(4, 30, 6, 20).to(memory_format=torch.channels_last),
    "channels last slice": lambda x: (
        x[:120, :120].reshape(4, 30, 6, 20).to(memory_format=torch.channels_last)[:, :, :, 3:]
    ),
    "overlapping windows": lambda x: x.reshape(-1).unfold(0, 5, 2),
    "5-d slice": lambda x: x[:120, :120].reshape(4, 6, 5, 8, 15)[:, 1:, 1:, :, 2:],
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_large_enough_for_threads_and_tails(device: str, dtype: torch.dtype, layout: str) -> None:
    check(LAYOUTS[layout](random_bits((301, 517), dtype, device)))


def test_conj_and_neg_views(device: str) -> None:
    z = random_bits((33, 5), torch.complex64, device)
    for view in (z.conj(), z.conj().imag, torch._neg_view(z), torch._neg_view(z.conj()), z.conj()[1:, ::2]):
        check(view)


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


def test_meta_and_fake_tensors_have_the_strides_of_the_real_ones(device: str) -> None:
    from torch._subclasses import FakeTensorMode

    for layout, view in LAYOUTS.items():
        x = view(random_bits((301, 517), torch.float32, device))
        y = op(x)
        meta = op(x.to("meta") if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), device="meta"))
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(x))
        assert meta.shape == fake.shape == y.shape, layout
        assert meta.stride() == fake.stride() == y.stride(), layout
        assert fake.device == y.device


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, 1:], lambda x: x[:0]])
def test_opcheck(device: str, view) -> None:
    x = view(torch.randn(3, 4, device=device)).requires_grad_()
    torch.library.opcheck(torch.ops.my_ops.identity_conv_op.default, (x,))


def test_gradients_of_every_mode(device: str) -> None:
    x = torch.randn(2, 3, dtype=torch.double, device=device, requires_grad=True)
    torch.autograd.gradcheck(op, x, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(op, x)
    square = lambda t: (op(t) ** 2).sum()  # noqa: E731
    with torch.no_grad():
        assert torch.equal(torch.func.grad(square)(x), 2 * x)
        assert torch.equal(torch.func.jvp(op, (x,), (x,))[1], x)
        assert torch.equal(torch.func.hessian(square)(x).reshape(6, 6), 2 * torch.eye(6, device=device, dtype=x.dtype))
        assert torch.equal(torch.func.vmap(torch.func.grad(square), in_dims=1)(x), 2 * x.t())


def test_a_node_is_made_only_where_grad_is_wanted(device: str) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    with torch.no_grad():
        assert op(x).grad_fn is None
    assert op(x.detach()).grad_fn is None
    assert not op(torch.ones(2, dtype=torch.int64, device=device)).requires_grad
    assert op(x).grad_fn.name() == "IdentityConvBackward"


def test_it_allocates_its_output_and_nothing_else() -> None:
    views = {name: view(random_bits((301, 517), torch.complex64)) for name, view in LAYOUTS.items()}
    views["conj"] = random_bits((301, 517), torch.complex64).conj()
    for layout, x in views.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            y = op(x)
        allocated = sum(
            event.nbytes()
            for event in profile.profiler.kineto_results.events()
            if event.name() == "[memory]" and event.nbytes() > 0
        )
        assert allocated == y.numel() * y.element_size(), layout


@pytest.mark.night
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.arange(256, dtype=torch.uint8).repeat((2**31 >> 8) + 3)[1:]
    assert x.numel() > 2**31
    assert torch.equal(op(x), x)
    wide = x[: 2 * 2**30].view(2, -1)[:, ::2]
    assert torch.equal(op(wide), wide)


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

    def test_runs_on_the_current_stream(self) -> None:
        stream, x = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            x.fill_(1)
            y = op(x)
        torch.cuda.current_stream().wait_stream(stream)
        assert bool((y == 1).all())

    def test_capture_and_replay(self) -> None:
        for view in (lambda x: x, lambda x: x[:, 1:], lambda x: x[:, ::2]):
            x = torch.zeros(64, 65, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = op(view(x))
            x.normal_()
            graph.replay()
            assert torch.equal(y, view(x))

    def test_a_tensor_of_another_device_than_the_current(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU")
        x = torch.randn(100, 101, device="cuda:1")
        for view in (x, x[:, 1:], x[:, ::2]):
            y = op(view)
            assert y.device == x.device
            assert torch.equal(y, view)
        assert torch.cuda.current_device() == 0

    @pytest.mark.parametrize("offset", range(17))
    @pytest.mark.parametrize("width", [1, 2, 3, 15, 16, 17, 31, 64, 255])
    def test_every_alignment_of_start_pitch_and_width(self, offset: int, width: int) -> None:
        memory = torch.arange(40_000, device="cuda").to(torch.uint8)
        for pitch in (width, width + 1, width + 5, width + 16):
            rows = (memory.numel() - offset) // pitch
            x = memory[offset : offset + rows * pitch].view(rows, pitch)[:, :width]
            check(x)

    def test_rank_beyond_the_usual(self) -> None:
        x = torch.randn([4] * 9, device="cuda")[:, 1:, ::2, 1:, :, :-1, ::3, 1:, 1:]
        check(x)
