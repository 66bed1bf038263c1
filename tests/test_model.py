"""IdentityModel and its layers: the identity, with gradients, in eager and compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import identity_conv


@pytest.fixture(autouse=True)
def _exact_convolutions():
    """TF32, CUDA's default for convolutions, keeps 10 bits of the mantissa."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    channels_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_output_equals_input(device: str, shape, dtype, channels_last: bool, seed: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    model = identity_conv.IdentityModel(channels=shape[1]).to(device, dtype)
    with torch.no_grad():
        assert torch.equal(model(x), x)


def test_the_model_is_native_class_native_op() -> None:
    kinds = [type(layer).__name__ for layer in identity_conv.IdentityModel().children()]
    assert kinds == ["Conv2d", "IdentityConvCustomClass", "Conv2d", "IdentityConvCustomOp"]


@pytest.mark.gpu
def test_tf32_stays_within_its_mantissa() -> None:
    torch.backends.cudnn.allow_tf32 = True
    x = torch.randn(2, 64, 16, 16, device="cuda")
    y = identity_conv.IdentityModel(channels=64).cuda()(x)
    torch.testing.assert_close(y, x, rtol=4e-3, atol=4e-3)


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    (model(x) * torch.arange(x.numel(), device=x.device).view_as(x)).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_the_eager_ones(device: str, backend: str) -> None:
    torch._dynamo.reset()
    model = identity_conv.IdentityModel().to(device)
    x = torch.randn(2, 3, 4, 4, device=device)
    eager = gradients(model, x)
    compiled = gradients(torch.compile(model, backend=backend, fullgraph=True), x)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other)


def test_the_class_layer_alone_keeps_gradients_when_compiled(device: str) -> None:
    torch._dynamo.reset()
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), identity_conv.IdentityConvCustomClass(3)).to(device)
    x = torch.randn(2, 3, 4, 4, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(layer, x), gradients(compiled, x), strict=True):
        torch.testing.assert_close(one, other)


def test_layers_show_themselves() -> None:
    assert repr(identity_conv.IdentityConvCustomClass(5)) == "IdentityConvCustomClass(channels=5)"
