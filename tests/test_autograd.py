"""autograd.h: a backward in C++, and from it every mode and order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_fakes import FIXTURES

from identity_conv import CompileError, Extension


@pytest.fixture(scope="module")
def ops():
    return Extension("test_node", [FIXTURES / "node.cpp"]).load().ops


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


CALLS = {
    "copy": lambda ops: (ops.copy, [numbers(2, 3)]),
    "wave": lambda ops: (lambda x, y: ops.wave(x, y, None, 1.5), [numbers(2, 3), numbers(2, 3)]),
    "wave, optional": lambda ops: (lambda x, y, z: ops.wave(x, y, z, 1.5), [numbers(3), numbers(3), numbers(3)]),
    "wave, one side": lambda ops: (lambda x: ops.wave(x, torch.ones(3, dtype=torch.double), None, 2.0), [numbers(3)]),
    "parts": lambda ops: (lambda x: ops.parts(x)[:2], [numbers(3)]),
    "one of the parts": lambda ops: (lambda x: ops.parts(x)[1], [numbers(3)]),
    "squares": lambda ops: (lambda x, y: tuple(ops.squares([x, y])), [numbers(3), numbers(2)]),
    "product": lambda ops: (lambda x, y: ops.product([x, None, y]), [numbers(3), numbers(3)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_reverse_forward_and_second_order(ops, name: str) -> None:
    call, inputs = CALLS[name](ops)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms(ops) -> None:
    wave = lambda x: ops.wave(x, x.cos(), None, 2.0).sum()  # noqa: E731
    plain = lambda x: (x.sin() * x.cos() * 2).sum()  # noqa: E731
    x = torch.randn(3, dtype=torch.double)
    func = torch.func
    for transform in (func.grad, func.hessian, func.jacrev, func.jacfwd, lambda f: func.jacrev(func.jacfwd(f))):
        torch.testing.assert_close(transform(wave)(x), transform(plain)(x))
    t = torch.randn_like(x)
    torch.testing.assert_close(func.jvp(wave, (x,), (t,)), func.jvp(plain, (x,), (t,)))
    xs = torch.randn(4, 3, dtype=torch.double)
    torch.testing.assert_close(func.vmap(func.grad(wave))(xs), func.vmap(func.grad(plain))(xs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(ops, backend: str) -> None:
    torch._dynamo.reset()
    call = lambda x, y: ops.wave(x, y, y, 1.5) + ops.parts(x)[0]  # noqa: E731
    inputs = [numbers(2, 3), numbers(2, 3)]
    expected = torch.autograd.grad(call(*inputs).sum(), inputs)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected)


def test_a_node_has_its_name_and_keeps_nothing_it_does_not_need(ops) -> None:
    x = numbers(3)
    assert ops.wave(x, x, None, 1.0).grad_fn.name() == "WaveBackward"
    y = ops.copy(x)
    assert y.grad_fn.name() == "test_node::copy backward"
    y.sum().backward(retain_graph=True)
    x.detach().add_(1)  # copy's backward doesn't look at x
    y.sum().backward()


def test_what_it_kept_is_released_and_watched(ops) -> None:
    x = numbers(3)
    y = ops.wave(x, x, None, 1.0).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()
    z = ops.wave(x, x, None, 1.0).sum()
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_no_node_where_no_grad_is_wanted(ops) -> None:
    with torch.no_grad():
        assert ops.copy(numbers(3)).grad_fn is None
    assert ops.copy(torch.ones(3)).grad_fn is None
    assert not ops.parts(numbers(3))[2].requires_grad


def test_mistakes_are_named(ops) -> None:
    with pytest.raises(ValueError, match="wave: x and y must have one shape"):
        ops.wave(numbers(3), numbers(2), None, 1.0)
    for op in (ops.same, ops.view):
        with pytest.raises(RuntimeError, match=r"test_node::\w+ returns one of its arguments, or a view of it"):
            op(numbers(3))
    with pytest.raises(NotImplementedError, match=r"test_node::twice_in_place: .* must leave its arguments alone"):
        ops.twice_in_place(torch.ones(3))
    y = ops.few(numbers(3), numbers(3))
    with pytest.raises(RuntimeError, match=r"test_node::few: backward must return 2 gradients, .* got 1"):
        y.sum().backward()


def test_a_backward_that_takes_other_arguments_is_named_with_its_line(tmp_path: Path) -> None:
    source = tmp_path / "short.cpp"
    source.write_text(
        """#include <identity_conv/autograd.h>
struct Short {
  static constexpr auto kOperator = "test_short::scale";
  using Signature = at::Tensor(const at::Tensor&);
  static at::Tensor backward(const at::Tensor& grad, const at::Tensor& x, double factor) { return grad; }
};
TORCH_LIBRARY_IMPL(test_short, Autograd, m) { m.impl("scale", identity_conv::differentiable<Short>()); }
"""
    )
    with pytest.raises(CompileError) as caught:
        Extension("test_short", [source]).build()
    assert "backward must take the gradient of each output, and after them nothing, or every" in str(caught.value)
    assert f"required from {source}:7:" in str(caught.value)


def test_tensors_that_would_lose_their_gradients_do_not_compile() -> None:
    with pytest.raises(CompileError, match="identity_conv::differentiable: tensors among the arguments are"):
        Extension("test_bad_gradient", [FIXTURES / "bad_gradient.cpp"]).build()
