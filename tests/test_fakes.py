"""Fakes that nobody writes: as the C++ class does, of a copy that is proved, or refused by name."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from support_build import run_python
from torch._dynamo.testing import CompileCounter
from torch._library.fake_class_registry import (
    deregister_fake_class,
    global_fake_class_registry,
    register_fake_class,
)

import identity_conv
from identity_conv import Extension

FIXTURES = Path(__file__).parent / "extensions"
NO_FLATTEN = "test_foreign::Opaque has no __obj_flatten__"
UNNAMED = r"test_foreign::Unnamed has an __obj_flatten__ that returns Tuple\[float\]"


@pytest.fixture(scope="module")
def foreign():
    with warnings.catch_warnings():
        for message in (NO_FLATTEN, UNNAMED):
            warnings.filterwarnings("ignore", message=message)
        return Extension("test_foreign", [FIXTURES / "foreign.cpp"]).load().classes


class Calls(torch.nn.Module):
    """A module that calls a method of an object."""

    def __init__(self, obj, method: str = "forward"):
        super().__init__()
        self.obj, self.method = obj, method

    def forward(self, *args):
        return getattr(self.obj, self.method)(*args)


def traced(obj, *args, method: str = "forward", dynamic: bool = False):
    """What the method gives in an exported program, and in a compiled function."""
    module = Calls(obj, method)
    shapes = (tuple({0: torch.export.Dim("n")} if isinstance(each, torch.Tensor) else None for each in args),)
    program = identity_conv.export(module, args, dynamic_shapes=shapes if dynamic else None)
    assert "call_torchbind" in str(program.graph)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    return program.module()(*args), compiled(*args)


def refusal(obj, *args, method: str = "forward", dynamic: bool = False) -> str:
    with pytest.raises(Exception) as caught:  # each tracer wraps the error in its own
        traced(obj, *args, method=method, dynamic=dynamic)
    return str(caught.value)


x = torch.arange(3.0)


def test_a_class_that_can_not_be_traced_is_named_once(foreign) -> None:
    code = f"""
import warnings
from identity_conv import Extension
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        Extension("test_foreign", [{str(FIXTURES / "foreign.cpp")!r}]).load()
print(*(each.message for each in caught), sep="\\n")
"""
    done = run_python("-c", code)
    assert done.stdout.count(NO_FLATTEN) == 1, done.stderr
    assert len(re.findall(UNNAMED, done.stdout)) == 1, done.stdout


def test_a_constructor_without_names_is_called_in_order(foreign) -> None:
    obj = foreign.Ordered(2, 5)
    for y in traced(obj, x, dynamic=True):
        assert torch.equal(y, 2 * x + 5)


def test_two_fields_of_one_type_do_not_swap_in_silence(foreign) -> None:
    message = refusal(foreign.Swapped(x, x + 1), x)
    assert "test_foreign::Swapped: no fake can be derived" in message
    assert "__obj_flatten__" in message
    assert "state.h" in message


def test_a_copy_made_by_setstate(foreign) -> None:
    obj = foreign.Stated.of(x.clone(), x + 1)
    for y in traced(obj, x):
        assert torch.equal(y, x * x + x + 1)


def test_a_static_method_is_no_method_of_the_fake(foreign) -> None:
    fake = global_fake_class_registry.get_impl("__torch__.torch.classes.test_foreign.Stated")
    assert hasattr(fake, "forward")
    assert not hasattr(fake, "same")


def test_every_class_of_the_library_has_a_fake_with_its_methods(foreign) -> None:
    for obj in (foreign.Several(2.0), foreign.Learned(x), foreign.Ordered(1, 2)):
        name = obj._type().qualified_name()
        fake = global_fake_class_registry.get_impl(name)
        left_out = {"__init__", "__obj_flatten__", "__getstate__", "__setstate__", "__eq__", "__ne__"}
        assert {each for each in obj._method_names() if not hasattr(fake, each)} <= left_out


@pytest.mark.parametrize("method", ["sized", "read"])
def test_a_method_that_looks_at_a_traced_tensor_is_named(foreign, method: str) -> None:
    message = refusal(foreign.Looking(0), x, method=method, dynamic=True)
    assert f"test_foreign::Looking.{method} asks for the sizes, strides or data of a tensor" in message
    assert "use sym_size" in message


def test_sizes_stay_symbolic_through_a_tuple(foreign) -> None:
    module = Calls(foreign.Several(2.0), "pair")
    free = {0: torch.export.Dim("n"), 1: torch.export.Dim("m"), 2: torch.export.Dim("k")}
    given = torch.randn(2, 3, 4)
    program = identity_conv.export(module, (given, given + 1), dynamic_shapes=((free, free),))
    torch._dynamo.reset()
    frames = CompileCounter()
    compiled = torch.compile(module, backend=frames, fullgraph=True, dynamic=True)
    for shape in ((2, 3, 4), (5, 7, 6)):
        compiled(torch.ones(shape), torch.ones(shape))
    assert frames.frame_count == 1
    y = torch.ones(5, 7, 6)
    for one, other in zip(program.module()(y, y), module(y, y), strict=True):
        assert torch.equal(one, other)


def test_a_field_of_a_derived_fake_may_have_any_name(foreign) -> None:
    assert [field for field, _ in foreign.Ordered(2, 5).__obj_flatten__()] == ["_copy", "_real"]
    for y in traced(foreign.Ordered(2, 5), x):
        assert torch.equal(y, 2 * x + 5)


def test_a_fake_written_by_hand_replaces_the_derived_one_without_a_word(foreign, caplog) -> None:
    derived = global_fake_class_registry.get_impl("__torch__.torch.classes.test_foreign.Looking")

    @register_fake_class("test_foreign::Looking")
    class Mine:
        @classmethod
        def __obj_unflatten__(cls, flattened):
            return cls()

        def read(self, x):
            return torch.empty_like(x)

    try:
        assert not caplog.records
        program = identity_conv.export(Calls(foreign.Looking(0), "read"), (x,))
        assert torch.equal(program.module()(x + 2), (x + 2) * 2)
    finally:
        deregister_fake_class("test_foreign::Looking")
        register_fake_class("test_foreign::Looking", derived)


def test_changing_state_while_traced_leaves_the_real_object(foreign) -> None:
    obj = foreign.Several(1.0)
    identity_conv.export(Calls(obj, "counted"), (x,))
    assert dict(obj.__obj_flatten__()) == {"factor": 1.0}


def test_a_method_takes_other_objects(foreign) -> None:
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = foreign.Several(2.0), foreign.Several(5.0)

        def forward(self, x):
            return getattr(self.one, "with")(self.other, x)

    assert torch.equal(identity_conv.export(Both(), (x,)).module()(x), 10 * x)
    with torch.no_grad():
        assert torch.equal(torch.compile(Both(), backend="aot_eager", fullgraph=True)(x), 10 * x)


def test_what_a_graph_can_not_carry_is_named(foreign) -> None:
    obj = foreign.Several(2.0)
    assert "test_foreign::Several.another returns an object of a class" in refusal(obj, method="another")
    assert torch.equal(identity_conv.export(Calls(obj, "named"), (x,)).module()(x)["sine"], x.sin())
    assert "test_foreign::Several.named returns a dict, which torch.compile can't carry" in refusal(
        obj, x, method="named"
    )


def test_a_method_that_autocast_changes_is_refused(foreign) -> None:
    several, small = foreign.Several(2.0), torch.randn(2, 3)
    sentence = r"test_foreign::Several\.product calls operators that torch\.autocast changes"
    with torch.autocast("cpu", torch.bfloat16):
        assert "Several.product calls operators that torch.autocast" in refusal(several, small, method="product")
        with pytest.raises(Exception, match=sentence):
            torch.compile(Calls(several, "product"), backend="aot_eager", fullgraph=True)(small)
        for y in traced(foreign.Ordered(2, 5), small):  # one that it leaves alone
            assert torch.equal(y, 2 * small + 5)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(traced(several, small, method="product")[1], several.product(small))


# --- operators ---


@pytest.fixture(scope="module")
def scale():
    return Extension("test_unfaked", [FIXTURES / "unfaked.cpp"]).load()


def test_an_operator_without_a_fake_is_named_with_what_to_write(scale) -> None:
    for trace in (
        lambda: torch.compile(lambda t: scale.ops.twice(t), backend="eager", fullgraph=True)(x),
        lambda: torch.export.export(Calls(scale.ops, "twice"), (x,)),
    ):
        with pytest.raises(Exception) as caught:
            trace()
        message = str(caught.value)
        assert "test_unfaked::twice has no Meta kernel and no fake" in message
        assert 'identity_conv::output_like(m, "twice", "x")' in message
        assert 'extension.output_like("twice", "x")' in message


def test_one_line_says_that_an_output_is_like_an_argument(scale) -> None:
    # In C++ the fixture says so for "thrice".
    scale.output_like("half", "x")
    for op, factor in ((scale.ops.thrice, 3), (scale.ops.half, 0.5)):
        program = torch.export.export(Calls(op, "__call__"), (x,), dynamic_shapes=(({0: torch.export.Dim("n")},),))
        assert torch.equal(program.module()(torch.ones(7)), torch.full((7,), factor * 1.0))
        torch.library.opcheck(op.default, (x.view(1, 3).t(),), test_utils=["test_schema", "test_faketensor"])


def test_output_like_names_what_is_wrong(scale) -> None:
    with pytest.raises(ValueError, match="argument must be one of its tensors, x; got 'y'"):
        scale.output_like("twice", "y")
    with pytest.raises(
        AttributeError, match="there is no operator test_unfaked::twise, or is test_unfaked::twice meant"
    ):
        scale.output_like("twise", "x")
    with pytest.raises(ValueError, match="only an operator that returns one tensor"):
        scale.output_like("both", "x")
