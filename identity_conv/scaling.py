"""How throughput grows with the ranks of a torchrun, each step beside the same step on one of them.

::

    torchrun --standalone --nproc-per-node 2 -m identity_conv.scaling cuda

`identity-conv bench scaling` starts it with a rank for each GPU, or two on the CPU, and reads the comparisons
that rank 0 prints, a JSON document a line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import identity_conv

from .bench import Comparison, compare
from .wording import counted

_STEPS = 10  # for one time: the ranks' meeting before and after costs as much as a small step


class _Block(nn.Module):
    """The operator on what tensor parallelism shards, between the two linear layers of a transformer's block."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(identity_conv.identity_conv(self.up(x)).relu())


class _Ranks:
    """The device of this rank, and steps that all ranks or rank 0 alone take."""

    def __init__(self, device: str):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else "cpu"
        self.on_gpu = device == "cuda"

    def timed(self, step: Callable[[], object], *, alone: bool = False) -> Callable[[], float]:
        """Seconds of a step, from the moment when all are there to the one when the last is done."""

        def seconds() -> float:
            self._wait()
            begin = time.perf_counter()
            if not alone or self.rank == 0:
                step()
            if not alone:
                self._wait()
            elif self.on_gpu:
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - begin
            dist.barrier()
            return elapsed

        return seconds

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        if self.on_gpu:
            torch.cuda.synchronize()


def _train(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(_STEPS):
            model.zero_grad()
            model(x).square().mean().backward()

    return steps


def _data_parallel(ranks: _Ranks) -> Comparison:
    channels, shape = (512, (128, 512, 56, 56)) if ranks.on_gpu else (16, (8, 16, 32, 32))
    model = identity_conv.IdentityModel(channels).to(ranks.device)
    alone = identity_conv.IdentityModel(channels).to(ranks.device)
    x = torch.randn(shape, device=ranks.device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return compare(
        f"IdentityModel under DDP, {counted(ranks.world, 'rank')}: time for as many samples",
        "one rank",
        _per_rank(ranks, ranks.timed(_train(wrapped, x))),
        ranks.timed(_train(alone, x), alone=True),
        pairs=11,
    )


def _per_rank(ranks: _Ranks, seconds: Callable[[], float]) -> Callable[[], float]:
    return lambda: seconds() / ranks.world


def _tensor_parallel(ranks: _Ranks) -> Comparison:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    width, tokens = (16384, 8192) if ranks.on_gpu else (256, 512)
    dtype = torch.bfloat16 if ranks.on_gpu else torch.float32
    with torch.device(ranks.device):
        model, alone = _Block(width).to(dtype), _Block(width).to(dtype)
        x = torch.randn(tokens, width, dtype=dtype)
    mesh = init_device_mesh("cuda" if ranks.on_gpu else "cpu", (ranks.world,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return compare(
        f"operator between tensor parallel layers, {counted(ranks.world, 'rank')}: time of ten steps",
        "one rank",
        ranks.timed(_train(model, x)),
        ranks.timed(_train(alone, x), alone=True),
        pairs=11,
    )


def _packages(ranks: _Ranks) -> Comparison:
    shape = (32, 512, 56, 56) if ranks.on_gpu else (8, 16, 32, 32)
    x = torch.randn(shape, device=ranks.device)
    with tempfile.TemporaryDirectory() as folder:
        # Compiled once, by rank 0; the others read its file.
        paths = [folder]
        dist.broadcast_object_list(paths)
        path = Path(paths[0]) / "model.pt2"
        if ranks.rank == 0:
            model = identity_conv.IdentityModel(shape[1]).to(ranks.device)
            identity_conv.compile_package(identity_conv.export(model, (x,)), path, sample=False)
        dist.barrier()
        package = identity_conv.load_package(path, device=ranks.device)
        dist.barrier()

    def calls() -> None:
        for _ in range(20):
            package(x)

    return compare(
        f"one package on each of {counted(ranks.world, 'rank')}: time of as many calls",
        "on one rank",
        _per_rank(ranks, ranks.timed(calls)),
        ranks.timed(calls, alone=True),
        pairs=11,
    )


def run(device: str) -> Iterator[Comparison]:
    """The comparisons; every rank of the group runs it, and rank 0's are the ones to read."""
    ranks = _Ranks(device)
    yield _data_parallel(ranks)
    yield _tensor_parallel(ranks)
    yield _packages(ranks)


def main() -> None:
    """What each rank of the torchrun does."""
    device = sys.argv[1]
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    # NCCL is told the rank's GPU; else it guesses it at the first barrier, and warns.
    dist.init_process_group("nccl" if gpu is not None else "gloo", device_id=gpu)
    for comparison in run(device):
        if dist.get_rank() == 0:
            print(json.dumps(asdict(comparison)), flush=True)
    dist.barrier()  # gloo may end a process whose peers have left
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
