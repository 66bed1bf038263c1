"""What each rank of a torchrun does in tests/test_distributed.py: every scenario, its outcome into a file.

torchrun --standalone --nproc-per-node N distributed_worker.py cpu|cuda FOLDER
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import identity_conv
from identity_conv import IdentityModel, sharding

# The tests import this file for the names of the scenarios alone.
DEVICE, FOLDER = (sys.argv[1], Path(sys.argv[2])) if __name__ == "__main__" else ("cpu", Path())
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def meshes() -> list[DeviceMesh]:
    shapes = [(WORLD,)] if WORLD < 4 else [(WORLD,), (2, WORLD // 2)]
    return [init_device_mesh(DEVICE, shape) for shape in shapes]


def tensor(*shape: int) -> torch.Tensor:
    """The same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def placed(x: torch.Tensor, mesh: DeviceMesh, placements: tuple) -> DTensor:
    if any(each.is_partial() for each in placements):
        return DTensor.from_local(x.clone(), mesh, placements, run_check=False)
    return distribute_tensor(x, mesh, placements)


def identity_operator_keeps_every_placement() -> None:
    # Sizes that no mesh divides, and one that is less than any.
    x = tensor(5, 6, 7, 1)
    kinds = [Replicate(), *map(Shard, range(4)), Partial("sum"), Partial("max")]
    for mesh in meshes():
        for placements in itertools.product(kinds, repeat=mesh.ndim):
            if len({each.reduce_op for each in placements if each.is_partial()}) > 1:
                continue  # DTensor itself knows no such thing
            given = placed(x, mesh, placements).requires_grad_()
            with CommDebugMode() as seen:
                y = torch.ops.my_ops.identity_conv_op(given)
            assert seen.get_total_counts() == 0, placements
            assert y.placements == given.placements
            assert torch.equal(y.to_local(), given.to_local())
            with CommDebugMode() as seen:
                y.backward(y.detach())
            assert seen.get_total_counts() == 0, placements
            assert torch.equal(given.grad.to_local(), given.to_local())


def class_method_keeps_placements() -> None:
    obj = torch.classes.my_ops.IdentityConvClass(6)
    for mesh in meshes():
        given = distribute_tensor(tensor(5, 6, 7, 2), mesh, [Shard(dim) for dim in range(mesh.ndim)])
        with CommDebugMode() as seen:
            y = obj.forward(given)
        assert seen.get_total_counts() == 0
        assert y.placements == given.placements
        assert torch.equal(y.full_tensor(), given.full_tensor())


def authors_operators_take_one_line() -> None:
    def scaled(x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return 2 * x if shift is None else 2 * x + shift

    scale = torch.library.custom_op("test_shard::scale", mutates_args=())(scaled)
    scale.register_fake(scaled)
    totals = {"last": lambda x: x.sum(-1), "middle": lambda x: x.sum(1), "kept": lambda x: x.sum(1, keepdim=True)}
    for name, total in totals.items():
        torch.library.define(f"test_shard::{name}", "(Tensor x) -> Tensor")
        torch.library.impl(f"test_shard::{name}", "CompositeExplicitAutograd", total)
    sharding.pointwise("test_shard::scale", keeps_partial=["sum", "avg"])
    sharding.reduces("test_shard::last", -1, partial="sum")
    sharding.reduces("test_shard::middle", 1, partial="sum")
    sharding.reduces("test_shard::kept", 1, keepdim=True, partial="sum")
    x = tensor(5, 6, 7)
    for mesh in meshes():
        for placement in [Replicate(), Shard(0), Shard(1), Shard(2), Partial("sum")]:
            placements = [placement] * mesh.ndim
            given = placed(x, mesh, placements)
            with CommDebugMode() as seen:
                y = torch.ops.test_shard.scale(given)
            assert seen.get_total_counts() == 0, placements
            assert y.placements == given.placements
            torch.testing.assert_close(y.full_tensor(), 2 * given.full_tensor())
            for name, total in totals.items():
                with CommDebugMode() as seen:
                    y = getattr(torch.ops.test_shard, name)(given)
                if not placement.is_partial():
                    assert seen.get_total_counts() == 0, placements
                torch.testing.assert_close(y.full_tensor(), total(given.full_tensor()))
        # A shift of lower rank that is sharded alike, and one that is broadcast along the sharded dimension.
        given = distribute_tensor(x, mesh, [Shard(1)] * mesh.ndim)
        for shift, dim in [(tensor(6, 7), 0), (tensor(1, 7), None), (tensor(1, 7), 0)]:
            placement = Replicate() if dim is None else Shard(dim)
            beside = distribute_tensor(shift, mesh, [placement] * mesh.ndim)
            with CommDebugMode() as seen:
                y = torch.ops.test_shard.scale(given, beside)
            assert seen.get_total_counts() == (shift.shape[0] == 1 and dim == 0) * mesh.ndim
            torch.testing.assert_close(y.full_tensor(), 2 * x + shift)
        # A sum of tensors doesn't keep a partial one: it is summed up first.
        part = placed(x, mesh, (Partial("sum"),) * mesh.ndim)
        y = torch.ops.test_shard.scale(part, distribute_tensor(x, mesh, [Replicate()] * mesh.ndim))
        torch.testing.assert_close(y.full_tensor(), 2 * part.full_tensor() + x)


def _one_process(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = copy.deepcopy(model)
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def _full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _agrees(model: nn.Module, loss: torch.Tensor, expected: tuple[torch.Tensor, list[torch.Tensor]], over: int) -> None:
    """Loss is summed, gradients are averaged over `over` ranks."""
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
    found = [_full(parameter.grad) * over for parameter in model.parameters()]
    torch.testing.assert_close(found, expected[1], rtol=1e-4, atol=1e-4)


def _model() -> IdentityModel:
    torch.backends.cudnn.allow_tf32 = False
    return IdentityModel(channels=3).to(DEVICE)


def _data_parallel(wrap, compile_with: str | None) -> None:
    model, x = _model(), tensor(2 * WORLD, 3, 4, 5)
    expected = _one_process(model, x)
    wrapped = wrap(model)
    run = torch.compile(wrapped, backend=compile_with) if compile_with else wrapped
    loss = run(x[2 * RANK : 2 * RANK + 2]).square().sum()
    loss.backward()
    _agrees(model, loss.detach(), expected, WORLD)


def _fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (WORLD,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp() -> None:
    _data_parallel(nn.parallel.DistributedDataParallel, None)


def ddp_compiled() -> None:
    _data_parallel(nn.parallel.DistributedDataParallel, "aot_eager")


def fsdp2() -> None:
    _data_parallel(_fully_sharded, None)


def fsdp2_compiled() -> None:
    _data_parallel(_fully_sharded, "aot_eager")


class Block(nn.Module):
    """Two linear layers with the identity operator on what tensor parallelism shards between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(identity_conv.identity_conv(self.up(x)).relu())


def _tensor_parallel(compile_with: str | None) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, x = Block().to(DEVICE), tensor(4, 6)
    expected = _one_process(model, x)
    mesh = init_device_mesh(DEVICE, (WORLD,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    run = torch.compile(model, backend=compile_with) if compile_with else model
    loss = run(x).square().sum()
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close([_full(parameter.grad) for parameter in model.parameters()], expected[1])


def tensor_parallel() -> None:
    _tensor_parallel(None)


def tensor_parallel_compiled() -> None:
    _tensor_parallel("aot_eager")


def identity_model_on_sharded_input() -> None:
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh(DEVICE, (WORLD,))
    model, x = _model(), tensor(2 * WORLD, 3, 4, 5)
    expected = _one_process(model, x)
    model = distribute_module(model, mesh)
    y = model(distribute_tensor(x, mesh, [Shard(0)]))
    assert y.placements == (Shard(0),)
    loss = y.square().sum()
    loss.backward()
    torch.testing.assert_close(loss.full_tensor().detach(), expected[0])
    torch.testing.assert_close([_full(each.grad) for each in model.parameters()], expected[1])


def pipeline_parallel() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole, x = _model(), tensor(4, 3, 4, 5)
    loss, gradients = _one_process(whole, x)
    layers = list(whole.children())
    per_stage = -(-len(layers) // WORLD)
    own = nn.Sequential(*layers[RANK * per_stage : (RANK + 1) * per_stage])
    stage = PipelineStage(
        own, RANK, WORLD, torch.device(DEVICE, torch.cuda.current_device() if DEVICE == "cuda" else None)
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
    losses: list[torch.Tensor] = []
    if RANK == 0:
        schedule.step(x)
    elif RANK == WORLD - 1:
        schedule.step(target=torch.zeros(4, device=DEVICE), losses=losses)
        torch.testing.assert_close(sum(losses), loss)
    else:
        schedule.step()
    before = sum(len(list(layer.parameters())) for layer in layers[: RANK * per_stage])
    found = [parameter.grad for parameter in own.parameters()]
    torch.testing.assert_close(found, gradients[before : before + len(found)])


def checkpoint_is_read_by_another_layout() -> None:
    import torch.distributed.checkpoint as dcp

    saved, read = _fully_sharded(_model()), _model()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.mul_(3)
    folder = str(FOLDER / "checkpoint")
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = read.state_dict()
    dcp.load(state, checkpoint_id=folder)
    read.load_state_dict(state)
    x = tensor(2, 3, 4, 5)
    torch.testing.assert_close(read(x), 9 * x)


SCENARIOS = [
    identity_operator_keeps_every_placement,
    class_method_keeps_placements,
    authors_operators_take_one_line,
    ddp,
    ddp_compiled,
    fsdp2,
    fsdp2_compiled,
    tensor_parallel,
    tensor_parallel_compiled,
    identity_model_on_sharded_input,
    pipeline_parallel,
    checkpoint_is_read_by_another_layout,
]


def main() -> None:
    torch.set_num_threads(1)
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if DEVICE == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    # NCCL is told the rank's GPU, which it guesses else. One rank that fails leaves the others waiting for it.
    backend, timeout = "nccl" if gpu is not None else "gloo", datetime.timedelta(seconds=60)
    dist.init_process_group(backend, timeout=timeout, device_id=gpu)
    outcomes = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            outcomes[scenario.__name__] = traceback.format_exc()
        else:
            outcomes[scenario.__name__] = "ok"
        (FOLDER / f"{RANK}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
