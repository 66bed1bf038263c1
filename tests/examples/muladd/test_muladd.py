import muladd
import pytest
import torch

from identity_conv.testing import close


@pytest.mark.kernel_spec(
    muladd.ops.muladd,
    muladd.reference,
    dtypes=[torch.float32, torch.float64, torch.float16, torch.bfloat16],
    compare=close(),
)
def test_equals_its_reference(check_kernel):
    check_kernel()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"a": torch.ones(3, dtype=torch.int64)}, "a must be float32, float64, float16 or bfloat16, got Long"),
        ({"b": torch.ones(3).double()}, "b must have the dtype of a, Float, got Double"),
        ({"a": torch.ones(3).to_sparse()}, r"a must be a dense \(strided\) tensor, got sparse_coo"),
    ],
)
def test_what_does_not_fit_is_named(changes, sentence):
    with pytest.raises((ValueError, NotImplementedError), match=f"muladd: {sentence}"):
        muladd.ops.muladd(**{"a": torch.ones(3), "b": torch.ones(3), "c": 1.0} | changes)
