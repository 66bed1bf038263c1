"""state.h: a class from its fields."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from test_fakes import FIXTURES, Calls

import identity_conv
from identity_conv import CompileError, Extension

weight = torch.arange(3.0)
VALUES = {
    "number": 1, "ratio": 2.5, "flag": True, "text": "some", "weight": weight,
    "device": torch.device("cpu"), "dtype": torch.float16, "numbers": [1, 2], "texts": [],
    "weights": [weight + 1, weight + 2], "nested": [[], [1, 2]], "named": {"a": weight + 3}, "sizes": {3: [1], 4: []},
}  # fmt: skip
DEFAULTS = {"bias": None, "limit": 7, "ratios": [0.5]}
OTHERS = {
    "number": 2, "ratio": 0.5, "flag": False, "text": "", "weight": weight + 9,
    "device": torch.device("meta"), "dtype": torch.float32, "numbers": [1], "texts": ["a"],
    "weights": [], "nested": [[1, 2], []], "named": {"a": weight}, "sizes": {3: [1]},
    "bias": weight, "limit": None, "ratios": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def cls():
    return Extension("test_fields", [FIXTURES / "fields.cpp"]).load().classes.Fields


def plain(value):
    """Comparable by ==."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def through_torch_save(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_export(obj):
    file = io.BytesIO()
    torch.export.save(identity_conv.export(Calls(obj), (weight,)), file)
    file.seek(0)
    loaded = torch.export.load(file)
    return next(each for each in loaded.constants.values() if isinstance(each, torch.ScriptObject))


def test_fields_are_keywords_accessors_and_named_pairs(cls) -> None:
    obj = cls(**VALUES)
    expected = {**VALUES, **DEFAULTS, "dtype": 5}  # torchbind reads a dtype as a number
    assert [name for name, _ in obj.__obj_flatten__()] == list(expected)
    for name, value in obj.__obj_flatten__():
        assert plain(value) == plain(expected[name]), name
        assert plain(getattr(obj, name)) == plain(expected[name]), name
    with pytest.raises(Exception, match="can't set attribute"):
        obj.number = 3


@pytest.mark.parametrize("field", OTHERS)
def test_objects_are_equal_by_every_field(cls, field: str) -> None:
    one, same, other = cls(**VALUES), cls(**VALUES), cls(**{**VALUES, field: OTHERS[field]})
    assert one == same
    assert (one != same) is False
    assert one != other
    assert (one == other) is False


@pytest.mark.parametrize("other", [weight.double(), weight.reshape(1, -1), weight[:1], weight.to_sparse()])
def test_tensors_are_equal_in_dtype_shape_and_layout_too(cls, other: torch.Tensor) -> None:
    assert (cls(**VALUES) == cls(**{**VALUES, "weight": other})) is False


def test_nothing_else_is_equal_and_an_object_is_true(cls) -> None:
    obj = cls(**VALUES)
    endless: list = []
    endless.append(endless)
    others = (
        None, 3, 2**70, "text", [1], [], {}, [1, "a"], endless, {"a": object()}, object(), torch, len, torch.nn.ReLU(),
        weight, identity_conv.IdentityConvCustomClass(3).conv,
    )  # fmt: skip
    for other in others:
        assert (obj == other) is False
        assert obj != other
        if not isinstance(other, torch.Tensor):  # whose comparison is its own
            assert (other == obj) is False
    assert obj
    assert identity_conv.IdentityConvCustomClass(3).conv


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj)), through_torch_save, through_export]
)
@pytest.mark.parametrize("values", [VALUES, OTHERS | {"device": torch.device("cpu")}], ids=["full", "empty"])
def test_state_survives(cls, way, values: dict) -> None:
    assert way(cls(**values)) == cls(**values)


def test_repr_shows_the_fields(cls) -> None:
    obj = identity_conv.IdentityConvCustomClass(3).conv
    assert repr(obj) == str(obj) == f"{obj}" == "IdentityConvClass(channels=3)"
    assert "flag=True, text='some', weight=Tensor([3], Float, cpu)" in repr(cls(**VALUES))
    assert "named={'a': Tensor([3], Float, cpu)}, sizes={3: [1], 4: []}, bias=None, limit=7" in repr(cls(**VALUES))


def restored(obj, change):
    state, name = obj.__getstate__()
    new = torch.ScriptObject.__new__(torch.ScriptObject)
    new.__setstate__((change(state), name))
    return new


def test_a_field_with_a_default_may_be_missing_and_no_other(cls) -> None:
    obj = cls(**VALUES)
    assert restored(obj, lambda state: tuple(each for each in state if each == 1 or each[0] != "limit")) == obj
    assert restored(obj, lambda state: (state[0], *reversed(state[1:]))) == obj  # names, not positions
    with pytest.raises(ValueError, match="Fields: kept state lacks the field text, which has no default"):
        restored(obj, lambda state: tuple(each for each in state if each == 1 or each[0] != "text"))


def test_wrong_state_is_refused_by_name(cls) -> None:
    obj = cls(**VALUES)

    def instead(name, value):
        return lambda state: (1, *((name, value) if each[0] == name else each for each in state[1:]))

    for change, sentence in (
        (lambda state: (*state, ("gone", 3)), "Fields: kept state has the field gone, which the class doesn't have"),
        (lambda state: (9, *state[1:]), "Fields: kept under state version 9, and this library's is 1"),
        (instead("number", "x"), "Fields: kept state has the field number as String"),
        (instead("numbers", 4), "Fields: kept state has the field numbers as Int"),
        (lambda state: 5, "Fields: kept state must be its version and pairs of name and value"),
        (lambda state: (1, 2), "Fields: kept state must be its version and pairs of name and value"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=sentence):
            restored(obj, change)


def test_state_is_checked_however_it_comes() -> None:
    with pytest.raises(ValueError, match="channels must be at least 1, got 0"):
        restored(identity_conv.IdentityConvCustomClass(3).conv, lambda state: (1, ("channels", 0)))


def test_the_state_version_can_be_asked_for(cls) -> None:
    assert cls.state_version() == 1


def test_it_is_exported_and_compiled(cls) -> None:
    module, x = Calls(cls(**VALUES)), torch.randn(3)
    assert torch.equal(identity_conv.export(module, (x,)).module()(x), x + weight)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), x + weight)


def test_a_field_that_cannot_be_carried_does_not_compile_and_says_so() -> None:
    extension = Extension("test_bad_field", [FIXTURES / "bad_field.cpp"])
    with pytest.raises(CompileError) as caught:
        extension.build()
    assert "identity_conv/state.h: a field must be an int64_t, double, bool, std::string, at::Tensor" in str(
        caught.value
    )
