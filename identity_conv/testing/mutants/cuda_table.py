"""The part of the table that needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .kernels import Kernel
from .witness import (
    behind_a_wait,
    breaks,
    device_left,
    differs,
    disturbs_the_next,
    fails,
    fenced_on_gpu,
    keeps_gpu_memory,
    leaves_memory_as_it_was,
    marks_on_gpu,
    on_other_gpu,
    remembers,
    returns_late,
    two_streams_differ,
)


def _on_gpu(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: make().cuda()


def _mutant(
    name: str, kind: str, bug: str, checks: tuple[str, ...], witness: Callable[[Any], bool], **fields: Any
) -> Kernel:
    return Kernel(name, kind, bug, checks, witness, device="cuda", **fields)


ON_CUDA: tuple[Kernel, ...] = (
    _mutant("strides_ignored", "strides", "strides are ignored", ("layout",),
            differs(lambda: torch.arange(12.0, device="cuda").view(3, 4)[:, :3])),
    _mutant("offset_ignored", "offset", "the offset into the storage is ignored", ("layout",),
            differs(lambda: torch.arange(5.0, device="cuda")[2:])),
    _mutant("tail_lost", "tail", "what a vector of 16 bytes doesn't fill is never written",
            ("values", "sizes", "written"), leaves_memory_as_it_was(1.0, 1001, "cuda")),
    _mutant("unaligned", "unaligned access", "vectors of 16 bytes, whatever the alignment",
            ("values", "layout", "sizes"), breaks(lambda: torch.ones(41, device="cuda")[1:])),
    _mutant("subnormal", "value classes", "subnormal float32 numbers become zero", ("values",),
            differs(_on_gpu(lambda: torch.tensor([1e-40])))),
    _mutant("nan_payload", "value classes", "a float32 NaN loses its payload", ("values",),
            differs(_on_gpu(lambda: torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)))),
    _mutant("grid_y", "grid limits", "the grid lies over a dimension with 65 535 blocks at most",
            ("sizes", "accepts", "launch_errors"), fails(lambda: torch.ones(1 << 23, device="cuda"))),
    _mutant("few_blocks", "grid limits", "there are 64 blocks, whatever the size", ("sizes", "written"),
            differs(lambda: torch.full((70_000,), 3.25, device="cuda"))),
    _mutant("overflow_32", "overflow", "elements are counted in 32 bits", ("sizes",),
            differs(lambda: torch.ones((1 << 31) + 11, dtype=torch.uint8, device="cuda")),
            tier="full", needs="24 GPU-GiB"),
    _mutant("block_too_large", "unseen launch failures", "too many threads aren't seen to fail",
            ("sizes", "launch_errors"), differs(lambda: torch.full((2000,), 3.25, device="cuda"))),
    _mutant("shared_too_large", "unseen launch failures", "too much shared memory isn't seen to fail",
            ("sizes", "launch_errors"), differs(lambda: torch.full((70_000,), 3.25, device="cuda"))),
    _mutant("unseen", "unseen launch failures", "a launch fails, and the next one is blamed", ("launch_errors",),
            disturbs_the_next),
    _mutant("no_barrier", "thread races", "no barrier between writing shared memory and reading it",
            ("values", "sizes", "deterministic"), differs(lambda: torch.arange(1.0, 1e5, device="cuda"), times=20)),
    _mutant("default_stream", "wrong stream", "the stream is the default one", ("stream",),
            behind_a_wait),
    _mutant("tail_on_default_stream", "wrong stream", "the last byte is copied on the default stream", ("stream",),
            behind_a_wait),
    _mutant("waits", "host sync", "the host waits for the GPU", ("no_sync",),
            returns_late),
    _mutant("through_host", "host sync", "the first byte takes the way through the host", ("capture", "no_sync"),
            returns_late),
    _mutant("no_guard", "no guard", "the current device isn't set to the input's", ("device_guard",),
            on_other_gpu, needs="2 GPUs"),
    _mutant("device_left", "no guard", "the input's device stays the current one", ("device_guard",),
            device_left, needs="2 GPUs"),
    _mutant("writes_behind", "out of bounds", "a byte behind the output is written", ("bounds",),
            marks_on_gpu(4)),
    _mutant("reads_behind", "out of bounds", "a byte behind the input is read", ("bounds",),
            breaks(fenced_on_gpu)),
    _mutant("unwritten", "uninitialised", "the last of several bytes is never written", ("written",),
            leaves_memory_as_it_was(1.0, 1000, "cuda")),
    _mutant("shared_scratch", "thread races", "calls on several streams share memory", ("two_streams",),
            two_streams_differ),
    _mutant("cache_by_address", "earlier calls", "an input at the address of an earlier one is taken for it",
            ("no_memory",), lambda op: remembers(op, "cuda")),
    _mutant("leak", "leak", "memory isn't given back", ("leak",),
            keeps_gpu_memory, tier="full"),
)  # fmt: skip

RIGHT_ON_CUDA: tuple[Kernel, ...] = (
    Kernel("right", "CUDA with a gradient", device="cuda"),
    Kernel("aten::clone", "torch's own", device="cuda"),
    Kernel("aten::neg", "torch's own", device="cuda", reference=torch.neg),
)
