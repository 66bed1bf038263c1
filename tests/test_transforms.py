"""The operator and the model under what torch does to functions and modules: right, or refused with a sentence."""

from __future__ import annotations

import copy
import io
import multiprocessing

import pytest
import torch
from support_build import run_python
from torch._dynamo.testing import CompileCounter

import identity_conv

op = identity_conv.identity_conv
func = torch.func


def square(x: torch.Tensor) -> torch.Tensor:
    return (op(x) ** 2).sum()


def test_func(device: str) -> None:
    x = torch.randn(2, 3, device=device)
    eye = torch.eye(6, device=device).view(2, 3, 2, 3)
    assert torch.equal(func.grad(square)(x), 2 * x)
    assert torch.equal(func.vjp(op, x)[1](x)[0], x)
    assert torch.equal(func.jvp(op, (x,), (x + 1,))[1], x + 1)
    assert torch.equal(func.jacrev(op)(x), eye)
    assert torch.equal(func.jacfwd(op)(x), eye)
    assert torch.equal(func.hessian(square)(x), 2 * eye)
    assert torch.equal(func.grad(lambda t: func.grad(square)(t).sin().sum())(x), 2 * (2 * x).cos())


@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
def test_vmap(device: str, in_dim: int, out_dim: int) -> None:
    x = torch.randn(2, 3, 4, device=device)
    assert torch.equal(func.vmap(op, in_dim, out_dim)(x), func.vmap(torch.clone, in_dim, out_dim)(x))
    nested = func.vmap(func.vmap(op, in_dims=0), in_dims=in_dim)
    assert torch.equal(nested(x), func.vmap(func.vmap(torch.clone, in_dims=0), in_dims=in_dim)(x))
    assert torch.equal(func.vmap(func.grad(square), in_dim)(x), 2 * x.movedim(in_dim, 0))
    both = func.vmap(lambda a, b: op(a) * op(b), in_dims=(in_dim, None))
    assert torch.equal(both(x, x[0, 0, 0]), x.movedim(in_dim, 0) * x[0, 0, 0])


def test_vmap_of_the_class(device: str) -> None:
    layer = identity_conv.IdentityConvCustomClass(3)
    x = torch.randn(5, 2, 3, 4, 4, device=device)
    assert torch.equal(func.vmap(layer)(x), x)
    assert torch.equal(func.grad(lambda t: (layer(t) ** 2).sum())(x[0]), 2 * x[0])


def test_forward_mode_through_the_class(device: str) -> None:
    layer = identity_conv.IdentityConvCustomClass(3)
    x = torch.randn(2, 3, 4, 4, device=device)
    assert torch.equal(func.jvp(layer, (x,), (x + 1,))[1], x + 1)
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, x + 2))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(y).tangent, x + 2)
    small = torch.randn(1, 3, 1, 1, dtype=torch.double, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(layer, small, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(layer, small)


def test_transforms_of_the_class_in_a_graph() -> None:
    layer = identity_conv.IdentityConvCustomClass(3)
    x = torch.randn(2, 3, 4, 4)
    program = identity_conv.export(layer, (x,)).module()
    xs = torch.randn(5, 2, 3, 4, 4)
    assert torch.equal(func.vmap(program)(xs), xs)
    assert torch.equal(func.grad(lambda t: (program(t) ** 2).sum())(x), 2 * x)
    assert torch.equal(func.jvp(program, (x,), (x + 1,))[1], x + 1)
    for name, call in {"vmap": func.vmap(lambda t: layer(t)), "grad": func.grad(lambda t: layer(t).sum())}.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=rf"my_ops::IdentityConvClass\.forward: torch\.func\.{name} of a method"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(xs if name == "vmap" else x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_keeps_the_dtype(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 4, device=device, dtype=dtype)
    with torch.autocast(device, torch.bfloat16):
        assert op(x).dtype == dtype
        assert identity_conv.IdentityConvCustomClass(3)(x).dtype == dtype
        assert torch.equal(op(x), x)


def test_dynamic_shapes_compile_once_without_a_break(device: str) -> None:
    torch._dynamo.reset()
    frames = CompileCounter()
    model = identity_conv.IdentityModel().to(device)
    compiled = torch.compile(model, backend=frames, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n, h in ((2, 5), (3, 7), (4, 9)):
            x = torch.randn(n, 3, h, h + 1, device=device)
            torch.testing.assert_close(compiled(x), x, rtol=1e-2, atol=1e-2)
    assert frames.frame_count == 1


def test_reduce_overhead(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: op(t) + 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(5, 6, device=device)
        assert torch.equal(compiled(x).clone(), x + 1)


def test_make_fx() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(2, 3)
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda t: op(t) * 2, tracing_mode=mode)(x)
        assert "my_ops.identity_conv_op.default" in str(graph.graph)
        assert torch.equal(graph(x), 2 * x)
    graph = make_fx(func.grad(square))(x)
    assert torch.equal(graph(x), 2 * x)


def test_export() -> None:
    x = torch.randn(2, 3, 4, 4)
    program = torch.export.export(identity_conv.IdentityModel(), (x,))
    for each in (program, program.run_decompositions(), program.run_decompositions({})):
        assert "call_torchbind" in str(each.graph)
        assert "torch.ops.my_ops.identity_conv_op.default" in str(each.graph)
        assert torch.equal(each.module()(x), x)


def test_strict_export_of_the_operator() -> None:
    x = torch.randn(2, 3, 4, 4)
    program = torch.export.export(identity_conv.IdentityConvCustomOp(), (x,), strict=True)
    assert torch.equal(program.module()(x), x)


def test_strict_export_of_the_class() -> None:
    def export(x: torch.Tensor) -> torch.export.ExportedProgram:
        free = ({0: torch.export.Dim("n")},)
        return torch.export.export(identity_conv.IdentityModel(), (x,), dynamic_shapes=free, strict=True)

    x, other = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 4, 4)
    if torch.__version__ < (2, 13):
        with pytest.raises(NotImplementedError, match=r"IdentityConvClass: torch 2\.11.* strict=True: use"):
            export(x)
        return
    program = export(x)
    assert "call_torchbind" in str(program.graph)
    assert not [each for each in program.constants.values() if not isinstance(each, torch.ScriptObject)]
    assert torch.equal(program.module()(other), other)
    assert torch.equal(program.run_decompositions({}).module()(other), other)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(other), other)


def test_deepcopy_keeps_state_apart() -> None:
    model = identity_conv.IdentityModel(4)
    other = copy.deepcopy(model)
    assert other.custom_class.conv == model.custom_class.conv
    assert other.custom_class.conv is not model.custom_class.conv
    x = torch.randn(1, 4, 2, 2)
    assert torch.equal(other(x), x)


def test_state_dict_has_the_object_where_asked(tmp_path) -> None:
    model = identity_conv.IdentityModel(4)
    assert list(model.state_dict()) == ["native1.weight", "native2.weight"]
    model.load_state_dict(model.state_dict())

    identity_conv.keep_in_state_dict(model.custom_class, "conv")
    assert model.state_dict()["custom_class.conv"] == (1, ("channels", 4))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")  # weights_only

    other = identity_conv.IdentityModel(4)
    other.custom_class = identity_conv.IdentityConvCustomClass(7)
    identity_conv.keep_in_state_dict(other.custom_class, "conv")
    other.load_state_dict(state)
    assert other.custom_class.conv == model.custom_class.conv
    assert list(state) == list(model.state_dict())  # loading takes nothing out of the caller's

    del state["custom_class.conv"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"custom_class\.conv"'):
        other.load_state_dict(state)
    file = io.BytesIO()
    torch.save(other, file)  # the hooks are pickled with it
    with pytest.raises(TypeError, match=r"keep_in_state_dict: name must be an attribute .* got 'native1', Conv2d"):
        identity_conv.keep_in_state_dict(model, "native1")


def _work(queue, model, x) -> None:
    queue.put(bool(torch.equal(model(x), x)))


def test_a_spawned_process_takes_the_model() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_work, args=(queue, identity_conv.IdentityModel(), torch.randn(1, 3, 2, 2)))
    process.start()
    assert queue.get(timeout=120)
    process.join()
    assert process.exitcode == 0


OTHER_DEVICE = """
import torch, identity_conv
torch.utils.backend_registration._setup_privateuseone_for_python_backend("toy")
class Toy(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        made = torch._C._acc.create_empty_tensor(data.size(), data.dtype)
        made.__class__ = cls
        return made
    def __init__(self, data):
        self.values = data
seen = []
@torch.library.impl("aten::clone", "privateuseone")
def clone(x, memory_format=None):
    seen.append("clone")
    return Toy(x.values.clone())
values = torch.arange(6.0).view(1, 3, 2, 1)
x = Toy(values)
assert x.device.type == "toy"
for call in (identity_conv.identity_conv, identity_conv.IdentityConvCustomClass(3)):
    y = call(x)
    assert y.device.type == "toy" and torch.equal(y.values, values) and y.values is not values
assert seen == ["clone", "clone"]
"""


def test_a_device_without_a_kernel_gets_its_own_copy() -> None:
    done = run_python("-c", OTHER_DEVICE)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_cuda_graphs_of_the_model() -> None:
    model = identity_conv.IdentityModel().cuda()
    x = torch.zeros(2, 3, 8, 8, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, x, rtol=4e-3, atol=4e-3)
