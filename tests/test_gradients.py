"""Gradients through class methods and operators with objects: eager's, in every mode, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_fakes import FIXTURES, Calls
from torch import nn
from torch._library.fake_class_registry import (
    deregister_fake_class,
    global_fake_class_registry,
    register_fake_class,
)
from torch.utils.checkpoint import checkpoint

import identity_conv
from identity_conv import Extension


@pytest.fixture(scope="module")
def foreign():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the class that can't be traced
        return Extension("test_foreign", [FIXTURES / "foreign.cpp"]).load()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Net(nn.Module):
    """A class's method, or any function, between layers with parameters."""

    def __init__(self, call: Callable, channels: int = 3, obj=None):
        super().__init__()
        self.before, self.after, self.obj = nn.Linear(channels, channels), nn.Linear(channels, channels), obj
        self.call = call

    def forward(self, x):
        return self.after(self.call(self.obj, self.before(x)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager backend": lambda m: torch.compile(m, backend="eager", fullgraph=True),
    "aot_eager": lambda m: torch.compile(m, backend="aot_eager", fullgraph=True),
    "inductor": lambda m: torch.compile(m, backend="inductor", fullgraph=True),
    "inductor, dynamic": lambda m: torch.compile(m, backend="inductor", fullgraph=True, dynamic=True),
    "checkpoint": lambda m: Checkpointed(m, False),
    "reentrant checkpoint": lambda m: Checkpointed(m, True),
    "checkpoint, aot_eager": lambda m: torch.compile(Checkpointed(m, False), backend="aot_eager", fullgraph=True),
    "checkpoint, inductor": lambda m: torch.compile(Checkpointed(m, False), backend="inductor", fullgraph=True),
}  # fmt: skip
AOT = ("aot_eager", "inductor", "checkpoint, aot_eager")


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    module(x).sin().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(each is not None for each in found)
    return [each.clone() for each in found]


def check(module: nn.Module, x: torch.Tensor, mode: str) -> None:
    eager = gradients(module, x)
    for one, other in zip(eager, gradients(MODES[mode](module), x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["IdentityModel", "IdentityConvCustomClass", "IdentityConvCustomOp"])
def test_the_worked_example(device: str, mode: str, layer: str) -> None:
    layers = {
        "IdentityModel": lambda: identity_conv.IdentityModel(),
        "IdentityConvCustomClass": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), identity_conv.IdentityConvCustomClass(3)),
        "IdentityConvCustomOp": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), identity_conv.IdentityConvCustomOp()),
    }
    check(layers[layer]().to(device), torch.randn(2, 3, 4, 5, device=device), mode)


CALLS: dict[str, tuple[str, Callable]] = {
    "several tensors, a tuple": ("Several", lambda o, t: o.pair(t, t + 1)[0] * o.pair(t.cos(), t)[1]),
    "one of a tuple": ("Several", lambda o, t: o.pair(t, t + 1)[1]),
    "tensors in a list, a list": ("Several", lambda o, t: sum(o.each([t, t.cos()], t.shape[0]))),
    "an optional, by keyword": ("Several", lambda o, t: o.maybe(t, y=t.cos()) + o.maybe(x=t)),
    "state that is a tensor": ("Learned", lambda o, t: o.forward(t)),
    "an operator with an object": ("Learned", lambda o, t: torch.ops.test_foreign.apply(o, t)),
}


def make(foreign, kind: str):
    return {
        "Several": lambda: foreign.classes.Several(3.0),
        "Learned": lambda: foreign.classes.Learned(torch.arange(3.0) + 1),
    }[kind]()


@pytest.mark.parametrize("mode", ["eager backend", *AOT, "inductor, dynamic"])
@pytest.mark.parametrize("call", CALLS)
def test_a_class_of_somebody_else(foreign, call: str, mode: str) -> None:
    kind, function = CALLS[call]
    check(Net(function, obj=make(foreign, kind)), torch.randn(4, 3), mode)


def test_state_is_read_when_the_graph_runs(foreign) -> None:
    obj = foreign.classes.Several(3.0)
    net = Net(lambda o, t: o.pair(t, t)[1], obj=obj)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 3)
    for factor in (3.0, 5.0, -1.0):
        obj.set(factor)
        for one, other in zip(gradients(net, x), gradients(compiled, x), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", AOT)
def test_a_fake_written_by_hand_changes_no_gradient(foreign, mode: str) -> None:
    derived = global_fake_class_registry.get_impl("__torch__.torch.classes.test_foreign.Learned")

    @register_fake_class("test_foreign::Learned")
    class Mine:
        @classmethod
        def __obj_unflatten__(cls, flattened):
            fake = cls()
            fake.__dict__.update(dict(flattened))  # dynamo reads the fields
            return fake

        def forward(self, x):
            return torch.empty_like(x)

    try:
        check(Net(lambda o, t: o.forward(t), obj=make(foreign, "Learned")), torch.randn(4, 3), mode)
    finally:
        deregister_fake_class("test_foreign::Learned")
        register_fake_class("test_foreign::Learned", derived)


@pytest.mark.parametrize("mode", AOT)
def test_a_parameter_in_the_state_gets_its_gradient(foreign, mode: str) -> None:
    weight = torch.arange(3.0).requires_grad_()
    net = Net(lambda o, t: o.forward(t), obj=foreign.classes.Learned(weight))
    x = torch.randn(4, 3)
    gradients(net, x)
    expected, weight.grad = weight.grad, None
    gradients(MODES[mode](net), x)
    torch.testing.assert_close(weight.grad, expected)


def test_a_gradient_asked_of_an_input_alone_leaves_the_state_alone(foreign) -> None:
    weight = torch.arange(3.0).requires_grad_()
    net = Net(lambda o, t: o.forward(t), obj=foreign.classes.Learned(weight))
    x = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(MODES["aot_eager"](net)(x).sum(), x), expected)
    assert weight.grad is None


def refusal(call: Callable, obj, x: torch.Tensor, mode: str = "aot_eager") -> str:
    with pytest.raises(Exception) as caught:  # each tracer wraps the error in its own
        gradients(MODES[mode](Net(call, obj=obj)), x)
    return str(caught.value)


x = torch.randn(4, 3)


@pytest.mark.parametrize("method", ["forward", "doubled"])
def test_a_parameter_in_the_state_alone_is_refused(foreign, method: str) -> None:
    obj = foreign.classes.Learned(torch.arange(3.0).requires_grad_())
    arguments = () if method == "doubled" else (x,)
    message = refusal(lambda o, t: t * getattr(o, method)(*arguments), obj, x)
    assert f"test_foreign::Learned.{method}: the field 'weight' of its object requires grad" in message


def test_a_method_that_changes_state_is_refused(foreign) -> None:
    obj = foreign.classes.Several(3.0)
    assert "test_foreign::Several.counted changes the state" in refusal(lambda o, t: o.counted(t), obj, x)
    assert dict(obj.__obj_flatten__()) == {"factor": 3.0}
    with torch.no_grad():  # where nothing is differentiated it may
        torch.compile(Net(lambda o, t: o.counted(t), obj=obj), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("method", ["in_place", "in_place_too"])
def test_a_method_that_changes_what_it_is_given_is_refused(foreign, method: str) -> None:
    def call(o, t):
        t = t * 1
        getattr(o, method)(t)
        return t

    obj = foreign.classes.Several(3.0)
    assert f"test_foreign::Several.{method} changes a tensor that it is given" in refusal(call, obj, x)
    with torch.no_grad(), pytest.raises(Exception, match="changes a tensor that it is given, which no graph"):
        torch.compile(Net(call, obj=obj), backend="aot_eager", fullgraph=True, dynamic=True)(x)
    with pytest.raises(NotImplementedError, match="changes a tensor that it is given, which no graph"):
        identity_conv.export(Net(call, obj=obj), (x,))


def test_a_change_that_a_hand_written_fake_hides_is_found_in_backward(foreign) -> None:
    derived = global_fake_class_registry.get_impl("__torch__.torch.classes.test_foreign.Several")

    @register_fake_class("test_foreign::Several")
    class Mine:
        @classmethod
        def __obj_unflatten__(cls, flattened):
            fake = cls()
            fake.__dict__.update(dict(flattened))
            return fake

        def add_to(self, total, x):
            return torch.empty_like(x)

    try:
        total = torch.zeros(4, 3)
        message = refusal(lambda o, t: o.add_to(total, t), foreign.classes.Several(3.0), x)
        assert "test_foreign::Several.add_to changes a tensor that it is given" in message
    finally:
        deregister_fake_class("test_foreign::Several")
        register_fake_class("test_foreign::Several", derived)


def test_a_method_that_draws_random_numbers_is_refused(foreign) -> None:
    message = refusal(lambda o, t: o.random(t), foreign.classes.Several(3.0), x)
    assert "test_foreign::Several.random draws random numbers" in message


def test_a_method_without_gradients_is_refused(foreign) -> None:
    message = refusal(lambda o, t: o.detached(t), foreign.classes.Several(3.0), x)
    assert "test_foreign::Several.detached isn't differentiable" in message


def test_state_changed_before_backward_is_refused(foreign) -> None:
    obj = foreign.classes.Several(3.0)
    y = torch.compile(Net(lambda o, t: o.pair(t, t)[0], obj=obj), backend="aot_eager", fullgraph=True)(x)
    obj.set(4.0)
    with pytest.raises(RuntimeError, match=r"test_foreign::Several\.pair: the state of its object changed"):
        y.sum().backward()


def test_a_graph_keeps_its_object(foreign) -> None:
    net = Net(lambda o, t: o.pair(t, t)[0], obj=foreign.classes.Several(3.0))
    expected = gradients(net, x)
    y = torch.compile(net, backend="aot_eager", fullgraph=True)(x).sin().sum()
    net.obj = None
    net.zero_grad()
    y.backward()
    torch.testing.assert_close(net.before.weight.grad, expected[1])


@pytest.mark.parametrize("mode", ["eager", "eager backend"])
def test_second_order(foreign, mode: str) -> None:
    net = Net(lambda o, t: o.pair(t, t)[0], obj=foreign.classes.Several(3.0)).double()
    run = MODES[mode](net) if mode != "eager" else net
    assert torch.autograd.gradgradcheck(run, torch.randn(2, 3, dtype=torch.double, requires_grad=True))


def test_export_is_never_refused(foreign) -> None:
    obj = foreign.classes.Several(3.0)
    for call in (lambda o, t: o.counted(t), lambda o, t: o.pair(t, t)[0], lambda o, t: o.detached(t)):
        net = Net(call, obj=obj)
        program = identity_conv.export(net, (x,))
        assert "call_torchbind" in str(program.graph)
        assert "call_torchbind" in str(program.run_decompositions({}).graph)
    obj = foreign.classes.Learned(torch.arange(3.0).requires_grad_())
    program = identity_conv.export(Calls(obj), (x,))
    assert "call_torchbind" in str(program.graph)


def test_an_exported_program_trains(foreign) -> None:
    net = Net(lambda o, t: o.pair(t, t)[0], obj=foreign.classes.Several(3.0))
    module = identity_conv.export(net, (x,)).module()
    for one, other in zip(gradients(net, x), gradients(module, x), strict=True):
        torch.testing.assert_close(one, other)


# --- the table: python tests/test_gradients.py [cuda] ---


def derivatives(module: nn.Module, x: torch.Tensor, order: int) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    value = module(x).sin().sum()
    if order == 2:
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        value = (first**2).sum()
    value.backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


def print_table(device: str) -> None:
    """What each layer's gradients are in each mode, beside those of plain torch in eager."""
    import warnings

    warnings.simplefilter("ignore")
    conv = nn.Conv2d(3, 3, 1)
    ext = Extension("test_foreign", [FIXTURES / "foreign.cpp"]).load()
    obj = ext.classes.Several(3.0)
    layers: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
        "IdentityModel": (identity_conv.IdentityModel, lambda: nn.Sequential(*_natives(identity_conv.IdentityModel()))),
        "class layer": (lambda: nn.Sequential(conv, identity_conv.IdentityConvCustomClass(3)), lambda: conv),
        "operator layer": (lambda: nn.Sequential(conv, identity_conv.IdentityConvCustomOp()), lambda: conv),
        "an author's class": (lambda: Author(conv, obj), lambda: Plain(conv)),
    }
    x = torch.randn(2, 3, 4, 5, device=device)
    print(f"torch {torch.__version__}, {device}\n\n| mode | order | {' | '.join(layers)} |")
    print(f"| --- | --- |{' --- |' * len(layers)}")
    for mode, prepare in {"eager": lambda m: m, **MODES}.items():
        for order in (1, 2):
            cells = []
            for make_layer, make_plain in layers.values():
                torch._dynamo.reset()
                expected = derivatives(make_plain().to(device), x, order)
                try:
                    found = derivatives(prepare(make_layer().to(device)), x, order)
                    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                    cells.append("right")
                except AssertionError as error:
                    cells.append(f"WRONG: {str(error).splitlines()[0]}")
                except Exception as error:
                    cells.append(f"refused: {str(error).strip().splitlines()[0]}")
            print(f"| {mode} | {order} | {' | '.join(cells)} |", flush=True)


def _natives(model: nn.Module) -> list[nn.Module]:
    return [model.native1, model.native2]


class Author(nn.Module):
    def __init__(self, conv: nn.Module, obj):
        super().__init__()
        self.conv, self.obj = conv, obj

    def forward(self, x):
        y = self.conv(x)
        return self.obj.pair(y, y.cos())[0]


class Plain(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        y = self.conv(x)
        return y * y.cos()


if __name__ == "__main__":
    import sys

    print_table(sys.argv[1] if len(sys.argv) > 1 else "cpu")
