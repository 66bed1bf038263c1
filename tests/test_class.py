"""my_ops::IdentityConvClass: what it accepts, and its state through every way of keeping it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

import identity_conv
from identity_conv.testing import Call, TensorPlan, check_class


def make(channels: int = 3):
    return torch.classes.my_ops.IdentityConvClass(channels=channels)


def through_torch_save(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
    "torch.save": through_torch_save,
}


def test_it_copies_and_keeps_its_state(device: str) -> None:
    calls = [
        Call((TensorPlan((2, 5, 3, 4), dtype, **fields),))
        for dtype in (torch.float32, torch.float64, torch.int32)
        for fields in (
            {},
            {"permutation": (3, 1, 0, 2)},
            {"padding": (0, 0, 0, 3)},
            {"memory_format": torch.channels_last},
        )
    ]
    check_class(
        "my_ops.IdentityConvClass", "forward", torch.clone, state={"channels": 5}, inputs=calls, devices=[device]
    )
    assert make(5) == make(5)
    assert make(5) != make(4)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_it_survives(way: str) -> None:
    model = WAYS[way](identity_conv.IdentityModel(channels=4))
    x = torch.randn(1, 4, 2, 2)
    assert torch.equal(model(x), x)
    assert model.custom_class.conv.channels == 4


def test_flattened_state_is_named() -> None:
    assert make(7).__obj_flatten__() == (("channels", 7),)


@pytest.mark.parametrize("channels", [0, -1])
def test_channels_must_be_positive(channels: int) -> None:
    with pytest.raises(ValueError, match=f"IdentityConvClass: channels must be at least 1, got {channels}"):
        make(channels)


def _message(call: Callable) -> str:
    with pytest.raises(Exception) as caught:  # each tracer wraps the error in its own
        call()
    return str(caught.value)


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (3, 8, 8), (2, 3, 8, 8, 1), (), (0, 2, 1, 1)], ids=str)
def test_wrong_shapes_get_the_same_sentence_everywhere(shape: tuple[int, ...], device: str) -> None:
    torch._dynamo.reset()  # what an earlier shape taught it would make these sizes symbolic
    layer, x = identity_conv.IdentityConvCustomClass(3), torch.zeros(shape, device=device)
    got = str(list(shape))
    sentence = f"IdentityConvClass.forward: x must have shape (N, 3, H, W), got {got}"
    assert _message(lambda: make(3).forward(x)).startswith(sentence)
    assert _message(lambda: layer(x)).startswith(sentence)
    assert sentence in _message(lambda: identity_conv.export(layer, (x,)))
    assert sentence in _message(lambda: torch.compile(layer, backend="eager", fullgraph=True)(x))


def test_another_layout_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"IdentityConvClass.forward: x must be a dense \(strided\) tensor, got sparse_coo"
    ):
        make(3).forward(torch.zeros(1, 3, 2, 2).to_sparse())


def test_it_reaches_the_operator_through_the_dispatcher() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        make(3).forward(torch.zeros(1, 3, 2, 2))
    assert "my_ops.identity_conv_op.default" in seen.ops
