import pytest
import rms_norm
import torch

from identity_conv.testing import close


@pytest.mark.kernel_spec(
    rms_norm.ops.rms_norm,
    rms_norm.reference,
    shapes={"x": ("...", "H"), "residual": ("...", "H"), "weight": ("H",)},
    dtypes=[torch.float32, torch.float64, torch.float16, torch.bfloat16],
    compare=close(),
    skip={"grad": "it is for inference"},
)
def test_equals_its_reference(check_kernel):
    check_kernel()


def test_the_residual_becomes_what_is_normalized():
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    total = x + residual
    out, inverse_rms = rms_norm.ops.rms_norm(x, residual, weight)
    assert torch.equal(residual, total)
    torch.testing.assert_close(inverse_rms, total.square().mean(-1).add(1e-6).rsqrt())
    torch.testing.assert_close(out, total * inverse_rms[:, None] * weight)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x": torch.tensor(1.0)}, r"x must have a dimension at least, got \[\]"),
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, "x must be float32, float64, float16 or bfloat16, got Int"),
        ({"residual": torch.ones(3)}, r"residual must have the shape of x, \[2, 3\], got \[3\]"),
        ({"residual": torch.ones(2, 3).half()}, "residual must have the dtype of x, Float, got Half"),
        ({"weight": torch.ones(2)}, r"weight must have the shape \[3\], got \[2\]"),
        ({"eps": -1.0}, "eps must be 0 or more, got -1"),
        ({"weight": torch.ones(3, device="meta")}, "weight must be on the device of x, cpu, got meta"),
    ],
)
def test_what_does_not_fit_is_named(changes, sentence):
    with pytest.raises((ValueError, NotImplementedError), match=f"rms_norm: {sentence}"):
        rms_norm.ops.rms_norm(**{"x": torch.ones(2, 3)} | changes)
