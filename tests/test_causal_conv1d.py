"""A depthwise causal convolution built as an author's extension: from its values and gradients to its package."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch.export import Dim

import identity_conv
from identity_conv import Extension
from identity_conv.errors import InputError
from identity_conv.testing import check_op, close

SOURCES = Path(__file__).parent / "extensions" / "causal_conv1d"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}
LENGTHS = [0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 100, 255, 256, 257, 768, 1000, 1023, 1025, 2056, 3001]


@pytest.fixture(scope="module")
def ext() -> Extension:
    return Extension("causal_conv1d", sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.cu")])).load()


def reference(x, weight, bias=None, state=None, silu=False):
    if state is None:
        state = x.new_zeros(*x.shape[:2], weight.shape[1] - 1)
    padded = torch.cat([state, x], 2)
    y = F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[1]) if x.shape[2] else x * 1
    return F.silu(y) if silu else y, padded[..., padded.shape[2] - weight.shape[1] + 1 :]


def columns(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values and strides, `offset` elements behind an aligned address."""
    return x.new_empty(x.numel() + offset).as_strided(x.shape, x.stride(), offset).copy_(x)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, name
    if want.numel():
        error = (got.detach().cpu().double() - want).abs().max()
        assert error <= TOLERANCE[got.dtype] * (1 + want.abs().max()), f"{name}: {error}"


def formula(x, weight, bias=None, initial_state=None, silu=False):
    """As causal_conv1d.h has it, in the order and the precision of the kernels: it overflows where they do."""
    state = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if initial_state is None else initial_state
    padded = torch.cat([state, x], 2)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x, dtype=wide)
    if bias is not None:
        y = y + bias[:, None]
    for k in range(weight.shape[1]):
        # A product of floats is exact in double: this is their fused multiplication and addition.
        y = (y + padded[..., k : k + x.shape[2]].double() * weight[:, k, None].double()).to(wide)
    y = (F.silu(y) if silu else y).to(x.dtype)
    in_columns = not x.is_contiguous() and x.stride(1) == 1
    return columns(y) if in_columns else y.contiguous(), padded[..., x.shape[2] :].contiguous()


def check(ext: Extension, width: int, **options) -> None:
    check_op(
        ext.ops.forward,
        formula,
        shapes={
            "x": ("N", "C", "L"),
            "weight": ("C", width),
            "bias": ("C",),
            "initial_state": ("N", "C", width - 1),
        },
        dtypes=[*TOLERANCE],
        compare=close(),
        **options,
    )


@pytest.mark.parametrize("width", [2, 3, 4])
def test_it_is_the_formula(ext: Extension, device: str, width: int) -> None:
    check(ext, width, devices=[device])


@pytest.mark.night
@pytest.mark.parametrize("width", [2, 3, 4])
def test_it_is_the_formula_at_full(ext: Extension, device: str, width: int) -> None:
    check(ext, width, devices=[device], tier="full")


def test_silu_where_its_tail_has_ended(ext: Extension, device: str) -> None:
    x = torch.tensor([-3e38, -1e38, -1e20, -200.0, -100.0, -89.0, -88.0, -1.0, 88.0], device=device)
    mine, theirs = (x[None, :, None].clone().requires_grad_() for _ in range(2))
    y, _ = ext.ops.forward(mine, torch.tensor([[0.0, 1.0]], device=device).expand(len(x), 2), silu=True)
    assert_close("y", y, F.silu(theirs.double()).cpu())
    y.sum().backward()
    F.silu(theirs).sum().backward()
    assert_close("dx", mine.grad, theirs.grad.double().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "in_columns"), [((8, 2048, 2304), False), ((16, 4096, 1600), True)], ids=["rows", "columns"]
)
def test_backward_of_so_much_that_the_walks_are_as_long_as_they_get(ext: Extension, shape, in_columns: bool) -> None:
    x, dy = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.randn(shape[1], 4, dtype=torch.bfloat16, device="cuda")
    wanted = [each.float().requires_grad_() for each in (x, weight)]
    torch.autograd.backward(reference(*wanted, silu=True)[0], dy.float())
    if in_columns:
        x, dy = columns(x), columns(dy)
    found = ext.ops.backward(dy, None, x, weight, None, None, True)[:2]
    for name, mine, theirs in zip(("dx", "dweight"), found, wanted, strict=True):
        error = (mine.float() - theirs.grad).abs().max()
        assert error <= TOLERANCE[mine.dtype] * (1 + theirs.grad.abs().max()), f"{name}: {error}"


@pytest.mark.parametrize("seed", range(60))
def test_values_and_gradients(ext: Extension, device: str, seed: int) -> None:
    draw = random.Random(seed)
    dtype = [torch.float32, torch.float16, torch.bfloat16, torch.float64][seed % 4]
    batch, channels, steps = draw.choice([1, 2, 3, 5]), draw.choice([1, 3, 4, 8, 33, 64, 130]), draw.choice(LENGTHS)
    width, silu, in_columns = draw.choice([2, 3, 4]), draw.random() < 0.5, draw.random() < 0.5
    torch.manual_seed(seed)
    x, weight = torch.randn(batch, channels, steps), torch.randn(channels, width)
    bias = torch.randn(channels) if draw.random() < 0.5 else None
    state = torch.randn(batch, channels, width - 1) if draw.random() < 0.5 else None
    given = [None if each is None else each.to(dtype) for each in (x, weight, bias, state)]
    wanted = [None if each is None else each.double().requires_grad_() for each in given]
    grads = [torch.randn(batch, channels, steps).to(dtype), torch.randn(batch, channels, width - 1).to(dtype)]
    used = 2 if steps == 0 or draw.random() < 0.7 else 1  # of the outputs
    wanted_y, wanted_final = reference(*wanted, silu)
    torch.autograd.backward([wanted_y, wanted_final][:used], [grad.double() for grad in grads[:used]])

    if in_columns:
        given[0] = columns(given[0])
    given = [None if each is None else each.to(device) for each in given]
    given[0] = misaligned(given[0], draw.choice([0, 0, 1, 2]))
    given = [None if each is None else each.detach().requires_grad_() for each in given]
    y, final = ext.ops.forward(*given, silu)
    assert_close("y", y, wanted_y)
    assert torch.equal(final.detach().cpu(), wanted_final.detach().to(dtype))
    torch.autograd.backward([y, final][:used], [grad.to(device) for grad in grads[:used]])
    for name, mine, theirs in zip(("x", "weight", "bias", "state"), given, wanted, strict=True):
        if mine is not None:
            assert_close(f"d{name}", mine.grad, torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)
    if in_columns and channels > 1 and steps > 1:
        assert y.stride(1) == given[0].grad.stride(1) == 1
    else:
        assert y.is_contiguous()


def test_channels_of_a_wider_tensor_and_other_layouts(ext: Extension, device: str) -> None:
    wide = torch.randn(2, 40, 96, device=device)
    weight = torch.randn(64, 4, device=device)
    for x in (
        wide.transpose(1, 2)[:, 8:72],  # channels side by side, rows apart
        torch.randn(2, 64, 80, device=device)[..., ::2],
        torch.randn(64, 2, 40, device=device).transpose(0, 1),
        torch.randn(2, 64, 1, device=device).expand(2, 64, 40),
    ):
        y, final = ext.ops.forward(x, weight, silu=True)
        wanted_y, wanted_final = reference(x.double(), weight.double(), silu=True)
        assert_close("y", y, wanted_y.cpu())
        assert torch.equal(final.double(), wanted_final)


def test_a_sequence_in_pieces_is_the_sequence(ext: Extension, device: str) -> None:
    x, weight = torch.randn(2, 5, 23, device=device), torch.randn(5, 4, device=device)
    whole, last = ext.ops.forward(x, weight, silu=True)
    state, pieces = None, []
    for piece in x.split([1, 2, 9, 11], dim=2):
        y, state = ext.ops.forward(piece, weight, None, state, True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 2), whole)
    assert torch.equal(state, last)


def test_equal_inputs_give_equal_bits(ext: Extension, device: str) -> None:
    for x in (torch.randn(3, 96, 3000, device=device), columns(torch.randn(3, 96, 3000, device=device))):
        weight = torch.randn(96, 4, device=device)
        first = ext.ops.backward(x, None, x, weight, None, None, True)
        again = ext.ops.backward(x, None, x, weight, None, None, True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("in_columns", [False, True])
def test_more_rows_than_a_grid_has(ext: Extension, in_columns: bool) -> None:
    x = torch.randn(2, 70_001, 24, device="cuda")
    x = columns(x) if in_columns else x
    weight = torch.randn(70_001, 4, device="cuda")
    assert_close(
        "y", ext.ops.forward(x, weight, silu=True)[0], reference(x.double(), weight.double(), silu=True)[0].cpu()
    )


@pytest.mark.parametrize("silu", [False, True])
def test_every_order_of_gradient(ext: Extension, silu: bool) -> None:
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    inputs = make(2, 3, 5), make(3, 3), make(3), make(2, 3, 2)
    call = lambda *args: ext.ops.forward(*args, silu)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_what_torch_asks_of_an_operator(ext: Extension, device: str) -> None:
    for x in (torch.randn(2, 4, 9, device=device), columns(torch.randn(2, 4, 9, device=device))):
        weight = torch.randn(4, 3, device=device, requires_grad=True)
        torch.library.opcheck(torch.ops.causal_conv1d.forward.default, (x.requires_grad_(), weight, None, None, True))


def test_the_class_carries_a_sequence_on(ext: Extension, device: str) -> None:
    conv = ext.classes.CausalConv1d(weight=torch.randn(4, 3, device=device))
    x = torch.randn(2, 4, 9, device=device)
    y, state = conv.forward_with_state(x[..., :5])
    torch.testing.assert_close(torch.cat([y, conv.forward(x[..., 5:], state)], 2), conv.forward(x))


class Layer(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return self.conv.forward(x * 2)


def test_the_class_is_exported_with_free_sizes(ext: Extension, device: str) -> None:
    weight, bias = torch.randn(4, 3, device=device), torch.randn(4, device=device)
    layer = Layer(ext.classes.CausalConv1d(weight=weight, bias=bias, silu=True))
    free = ({0: Dim("n", max=8), 2: Dim("l", max=64)},)
    program = torch.export.export(layer, (torch.randn(2, 4, 9, device=device),), dynamic_shapes=free)
    assert "call_torchbind" in str(program.graph)
    x = torch.randn(5, 4, 31, device=device)
    torch.testing.assert_close(program.module()(x), reference(2 * x, weight, bias, silu=True)[0])


def test_the_class_keeps_gradients_when_compiled(ext: Extension) -> None:
    layer = Layer(ext.classes.CausalConv1d(weight=torch.randn(4, 3)))
    x = torch.randn(2, 4, 9, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).sin().sum(), x)[0]
    got = torch.autograd.grad(torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sin().sum(), x)[0]
    torch.testing.assert_close(got, wanted)


class Model(torch.nn.Module):
    """The class, and the operator with both of its outputs."""

    def __init__(self, conv, weight):
        super().__init__()
        self.conv = conv
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return torch.ops.causal_conv1d.forward(self.conv.forward(x), self.weight, silu=True)


def test_a_package_of_both_runs_without_python(ext: Extension, device: str, program: Path, tmp_path: Path) -> None:
    weights = torch.randn(4, 3, device=device), torch.randn(4, 2, device=device)
    bias = torch.randn(4, device=device)
    model = Model(ext.classes.CausalConv1d(weight=weights[0], bias=bias, silu=True), weights[1]).requires_grad_(False)
    free = ({0: Dim("n", max=8), 2: Dim("l", max=64)},)
    exported = identity_conv.export(model, (torch.randn(2, 4, 9, device=device),), dynamic_shapes=free)
    path = identity_conv.compile_package(exported, tmp_path / "model.pt2")
    package = identity_conv.load_package(path)
    for n, steps in ((2, 9), (1, 1), (8, 64), (0, 5), (3, 0)):
        x = torch.randn(n, 4, steps, device=device)
        first = reference(x.double(), weights[0].double(), bias.double(), silu=True)[0]
        wanted = reference(first, weights[1].double(), silu=True)
        torch.save(x.cpu(), tmp_path / "x.pt")
        command = ["env", "-i", program, path, "--input", tmp_path / "x.pt", "--output", tmp_path / "y.pt"]
        subprocess.run(command, check=True, capture_output=True)
        for outputs in (package(x), torch.load(tmp_path / "y.pt")):
            for name, got, want in zip(("y", "final_state"), outputs, wanted, strict=True):
                assert_close(name, got, want.cpu())
    with pytest.raises(InputError, match="size of dimension 2 must be 0 to 64, got 65"):
        package(torch.randn(2, 4, 65, device=device))


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("causal_conv1d_benchmark", SOURCES / "benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_has_a_row_for_each_baseline(benchmark, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(benchmark.SIZES, "cpu", (torch.float32, [(1, 16, 8192)]))
    monkeypatch.setattr(benchmark, "PAIRS", 2)
    done = CliRunner().invoke(benchmark.main, ["cpu", "--json", str(tmp_path / "record.json")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(each["name"], each["baseline"]) for each in record["comparisons"]] == [
        (f"cpu {direction} {layout} (1, 16, 8192)", baseline)
        for layout in ("rows", "channels-last")
        for direction, copy in (("forward", "a copy of x"), ("backward", "a copy of 1.5 x"))
        for baseline in (copy, "torch eager")
    ]
    for each in record["comparisons"]:
        moved = (2 if "forward" in each["name"] else 3) * 16 * 8192 * 4
        assert each["terabytes_per_second"] == pytest.approx(moved / each["ours_us"] / 1e6)
        assert f"| {each['name']} |" in done.output


def test_the_benchmark_times_nothing_wrong(benchmark, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "eager", lambda x, weight: F.silu(x) + weight.sum())
    with pytest.raises(RuntimeError, match=r"cpu forward rows \(1, 4, 64\): output 0 is off by"):
        next(benchmark.comparisons("cpu", torch.float32, (1, 4, 64)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x": torch.randn(4, 5)}, r"x must have shape \(N, C, L\), got \[4, 5\]"),
        (
            {"x": torch.ones(2, 4, 5, dtype=torch.int64)},
            "x must have the dtype Float, Half, BFloat16 or Double, got Long",
        ),
        ({"x": torch.randn(2, 4, 5).to_sparse()}, r"x must be a dense \(strided\) tensor, got sparse_coo"),
        ({"weight": torch.randn(12)}, r"weight must have shape \(C, W\), got \[12\]"),
        ({"weight": torch.randn(4, 5)}, "weight must have a width W from 2 to 4, got 5"),
        ({"weight": torch.randn(3, 3)}, r"weight must have shape \(C, W\) = \[4, 3\], got \[3, 3\]"),
        ({"weight": torch.randn(4, 3).half()}, "weight must have the dtype of x, Float, got Half"),
        ({"weight": torch.randn(4, 3, device="meta")}, "weight must be on the device of x, cpu, got meta"),
        ({"bias": torch.randn(3)}, r"bias must have shape \(C,\) = \[4\], got \[3\]"),
        (
            {"initial_state": torch.randn(2, 4, 3)},
            r"initial_state must have shape \(N, C, W - 1\) = \[2, 4, 2\], got \[2, 4, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(ext: Extension, changes: dict, sentence: str) -> None:
    arguments = {"x": torch.randn(2, 4, 5), "weight": torch.randn(4, 3)} | changes
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        ext.ops.forward(**arguments)
