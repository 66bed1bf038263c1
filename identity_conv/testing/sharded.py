"""Checks of an operator on DTensors: every placement of its inputs, on two ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .call import Call, tensors_in
from .eager import difference
from .examine import Bench, describe
from .plan import TensorPlan
from .registry import stage

_LIMIT_S = 60.0
_MOST = 120  # combinations of placements for one call

#: Of each kind of Partial the parts that two ranks hold of a whole: none is what the whole is, and only what the kind
#: stands for makes it of them. A mask alternates between 0 and 1.
_PARTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "sum": lambda x, mask: (x + x, -x),
    "avg": lambda x, mask: (x + x + x, -x),
    "product": lambda x, mask: (x + x, torch.full_like(x, 0.5)),
    "max": lambda x, mask: (x - mask, x - (1 - mask)),
    "min": lambda x, mask: (x + mask, x + (1 - mask)),
}


@stage("dtensor", tiers=("dtensor",))
def distributed(bench: Bench, start: int) -> None:
    """Replicated, sharded and partial inputs, each placement with each: on two ranks, on a GPU on one."""
    if bench.subject.writes:
        return
    ranks = 2 if bench.device == "cpu" else 1
    if ranks == 1:
        bench.tell("on one rank, which has everything of every shard")
    with tempfile.TemporaryDirectory() as folder:
        bench.about_to(None, _LIMIT_S)
        other = os.fork() if ranks == 2 else None
        if other == 0:
            with contextlib.suppress(BaseException):
                for _ in _outcomes(bench, 1, ranks, folder):
                    pass
            os._exit(0)
        noted: set[str] = set()
        try:
            for call, text, violated in _outcomes(bench, 0, ranks, folder):
                if violated:
                    bench.violate("dtensor", text, call)
                    return
                if text not in noted:
                    noted.add(text)
                    bench.tell(text)
        finally:
            if other:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)


def _outcomes(bench: Bench, rank: int, ranks: int, folder: str) -> Iterator[tuple[Call, str, bool]]:
    """What one rank sees: of a call a sentence, and whether it is a violation or a note. All ranks see the same."""
    from torch import distributed as dist

    type_ = torch.device(bench.device).type
    dist.init_process_group(
        "gloo" if type_ == "cpu" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        device_id=None if type_ == "cpu" else torch.device(type_, torch.cuda.current_device()),
    )
    try:
        mesh = dist.init_device_mesh(type_, (ranks,))
        for call in _calls(bench):
            args, kwargs = call.build(bench.device)
            for each in tensors_in((args, kwargs)):
                if each.dtype.is_floating_point and not each.requires_grad:
                    each.mul_(8).round_()  # so that parts add up to the whole exactly
            try:
                bench.expected(args, kwargs)
                expected = tensors_in(bench.run(args, kwargs))
            except Exception:  # refused, or told by `accepts`
                continue
            tensors = tensors_in((args, kwargs))
            choices = itertools.product(*(_placements(each, ranks) for each in tensors))
            for placements in itertools.islice(choices, _MOST):
                bench.about_to(call, _LIMIT_S)
                shown = ", ".join(map(str, placements))
                placed = iter([_placed(x, mesh, each, rank) for x, each in zip(tensors, placements, strict=True)])
                given, named = pytree.tree_map(
                    lambda leaf, placed=placed: next(placed) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
                )
                try:
                    outputs = tensors_in(bench.subject.run(given, named))
                    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in outputs]
                except Exception as error:
                    yield call, f"refused by torch: {describe(error)[:160]}", False
                    continue
                if text := difference(bench, whole, expected):
                    yield call, f"{shown}: {text}", True
        dist.barrier()  # gloo may end a process whose peers have left
    finally:
        dist.destroy_process_group()


def _calls(bench: Bench) -> list[Call]:
    if bench.settings.given_calls is not None:
        return list(bench.settings.given_calls[:2])
    allowed = bench.settings.dtypes
    dtype = next((each for each in (torch.float32, torch.float64) if each in allowed), allowed[0])
    plans = (TensorPlan((4, 6), dtype), TensorPlan((5, 3), dtype, permutation=(1, 0)), TensorPlan((2, 3, 4), dtype))
    return [bench.subject.call(plan) for plan in plans]


def _placements(x: torch.Tensor, ranks: int) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    partial = [Partial(kind) for kind in _PARTS] if ranks == 2 and x.dtype.is_floating_point else []
    return [Replicate(), *(Shard(dim) for dim in range(x.dim())), *partial]


def _placed(x: torch.Tensor, mesh: Any, placement: Any, rank: int) -> Any:
    """`x` as a DTensor."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not placement.is_partial():
        return distribute_tensor(x, mesh, [placement])
    mask = (torch.arange(x.numel(), device=x.device) % 2).reshape(x.shape).to(x.dtype)
    return DTensor.from_local(_PARTS[placement.reduce_op](x, mask)[rank], mesh, [placement])
