"""Checks of what a GPU adds: streams, devices, graphs, errors that nobody looks at."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from .call import Call, tensors_in
from .eager import difference, right
from .examine import Bench, describe, extent
from .plan import TensorPlan
from .registry import BOTH, stage

_PENDING_CYCLES = 100_000_000  # of a GPU's clock: about 50 ms


def _calls(bench: Bench, *shapes: tuple[int, ...], **fields: Any) -> Iterator[tuple[Call, Any, Any]]:
    """Calls that the reference takes, built."""
    dtype = torch.float32 if torch.float32 in bench.settings.dtypes else bench.settings.dtypes[0]
    calls = bench.settings.given_calls or [bench.subject.call(TensorPlan(shape, dtype, **fields)) for shape in shapes]
    for call in calls[: max(len(shapes), 1)]:
        bench.about_to(call, 30.0)
        args, kwargs = call.build(bench.device)
        if right(bench, args, kwargs) is not None:
            yield call, args, kwargs


def _others(args: Any, kwargs: Any, call: Call, device: str) -> list[torch.Tensor]:
    """Other values for the tensors of a call, one for each."""
    return [each.clone() for each in tensors_in(call.replace(_reseeded(call)).build(device))]


def _reseeded(call: Call) -> list[TensorPlan]:
    fields = TensorPlan.__dataclass_fields__
    return [
        TensorPlan(**{**{name: getattr(plan, name) for name in fields if name != "_"}, "seed": plan.seed + 1000})
        for plan in call.plans
    ]


@stage("stream", devices=("cuda",), of=BOTH)
def side_stream(bench: Bench, start: int) -> None:
    """On a side stream, behind a producer that isn't done; and what is queued behind the call."""
    if bench.subject.writes:
        return
    for call, args, kwargs in _calls(bench, (1000,), (3, 5), (1 << 20,), (1 << 24,)):
        bench.subject.run(args, kwargs)  # what is done once is done
        new = _others(args, kwargs, call, bench.device)
        stream = torch.cuda.Stream(bench.device)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_PENDING_CYCLES)
            for old, fresh in zip(tensors_in((args, kwargs)), new, strict=True):
                old.copy_(fresh)
            output = bench.subject.run(args, kwargs)
            later = [each.clone() for each in tensors_in(output)]
        stream.synchronize()
        torch.cuda.synchronize()
        expected = right(bench, args, kwargs)
        if text := difference(bench, output, expected):
            bench.violate("stream", f"{text}; its input was still being made on the current, a side stream", call)
            return
        if text := difference(bench, later, tensors_in(expected)):
            bench.violate("stream", f"{text}; seen by what was queued behind it on the current, a side stream", call)
            return


@stage("two_streams", devices=("cuda",), of=BOTH)
def two_streams(bench: Bench, start: int) -> None:
    """Calls queued on two streams, which run at once."""
    if bench.subject.writes:
        return
    for call, args, kwargs in _calls(bench, (1 << 20,), (5000,)):
        other = call.replace(_reseeded(call)).build(bench.device)
        jobs = [(args, kwargs), other]
        expected = [right(bench, *job) for job in jobs]
        streams = [torch.cuda.Stream(bench.device) for _ in jobs]
        for turn in range(5):
            bench.about_to(call, 30.0)
            torch.cuda.synchronize()
            outputs: list[list[Any]] = [[], []]
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(_PENDING_CYCLES // 10)
            for _ in range(20):
                for stream, job, got in zip(streams, jobs, outputs, strict=True):
                    with torch.cuda.stream(stream):
                        got.append(bench.subject.run(*job))
            torch.cuda.synchronize()
            for got, want in zip(outputs, expected, strict=True):
                for output in got:
                    if text := difference(bench, output, want):
                        bench.violate(
                            "two_streams", f"{text}; another stream called at the same time, turn {turn}", call
                        )
                        return


@stage("device_guard", devices=("cuda",), of=BOTH)
def other_device(bench: Bench, start: int) -> None:
    """A tensor of a device that isn't the current one."""
    if bench.subject.writes:
        return
    if torch.cuda.device_count() < 2:
        bench.tell("not looked at: one GPU")
        return
    current = torch.cuda.current_device()
    there = f"cuda:{(current + 1) % torch.cuda.device_count()}"
    dtype = torch.float32 if torch.float32 in bench.settings.dtypes else bench.settings.dtypes[0]
    plans = [TensorPlan((1000,), dtype), TensorPlan((6, 7), dtype, permutation=(1, 0)), TensorPlan((0,), dtype)]
    for call in bench.settings.given_calls or [bench.subject.call(plan) for plan in plans]:
        bench.about_to(call, 30.0)
        args, kwargs = call.build(there)
        expected = right(bench, args, kwargs)
        if expected is None:
            continue
        try:
            output = bench.subject.run(args, kwargs)
            torch.cuda.synchronize(there)
        except Exception as error:
            bench.end_if_broken(error)
            bench.violate(
                "device_guard", f"raised {describe(error)} for a tensor on {there}, not the current device", call
            )
            return
        if any(each.device != torch.device(there) for each in tensors_in(output)):
            bench.violate("device_guard", f"its output isn't on {there}, where its input is", call)
            return
        if text := difference(bench, output, expected):
            bench.violate("device_guard", f"{text}; on {there}, not the current device", call)
            return
        if torch.cuda.current_device() != current:
            bench.violate("device_guard", f"it left {there} the current device", call)
            return


@stage("capture", devices=("cuda",), of=BOTH)
def captured(bench: Bench, start: int) -> None:
    """In a CUDA graph, replayed with other values."""
    if bench.subject.writes:
        return
    for index, (call, args, kwargs) in enumerate(_calls(bench, (1000,), (3, 5), (1 << 20,), (1,))):
        if index < start:
            continue
        bench.index = index
        warming = torch.cuda.Stream(bench.device)
        with torch.cuda.stream(warming):
            for _ in range(3):
                bench.subject.run(args, kwargs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = bench.subject.run(args, kwargs)
        except Exception as error:
            bench.violate("capture", f"can't be captured: {describe(error)}", call)
            bench.index = None  # nothing more of this stage
            bench.about_to(call)
            bench.end("the capture failed")
            return
        taken = [extent(each) for each in tensors_in((args, kwargs))]
        if any(a < d and c < b for a, b in taken for c, d in map(extent, tensors_in(output)) if d > c):
            continue  # told by `alias`
        for turn in range(2):
            bench.about_to(call, 30.0)
            for old, fresh in zip(tensors_in((args, kwargs)), _others(args, kwargs, call, bench.device), strict=True):
                old.copy_(fresh if turn else fresh.flip(tuple(range(fresh.dim()))))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            if text := difference(bench, output, right(bench, args, kwargs)):
                bench.violate("capture", f"{text}; after a replay with other values", call)
                return


@functools.cache
def _runtime() -> Any:
    """torch's CUDA runtime library, or None where it isn't found."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "libcudart" in line:
                return ctypes.CDLL(line.split()[-1])
    return None


@stage("launch_errors", devices=("cuda",), of=BOTH)
def launch_errors(bench: Bench, start: int) -> None:
    """The CUDA error that a call leaves for the next one to find."""
    runtime = _runtime()
    if runtime is None:
        bench.tell("not looked at: the CUDA runtime library isn't found")
        return
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    shapes = [
        (0,),
        (),
        (1,),
        (1000,),
        (0, 3),
        (3, 0),
        (65_537,),
        (70_000, 3),
        (3, 70_000),
        (2, 70_000, 3),
        (1 << 22,),
        (2,) * 8,
    ]
    for call, args, kwargs in _calls(bench, *shapes):
        torch.cuda.synchronize()
        runtime.cudaGetLastError()
        bench.subject.run(args, kwargs)
        if code := runtime.cudaGetLastError():
            text = runtime.cudaGetErrorString(code).decode()
            bench.violate("launch_errors", f"left the error {code} ({text}) unseen", call)
            return


@stage("no_sync", devices=("cuda",), of=BOTH)
def no_sync(bench: Bench, start: int) -> None:
    """How long a call takes while the GPU is busy."""
    if bench.subject.writes:
        return
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(_PENDING_CYCLES)
    torch.cuda.synchronize()
    busy = time.perf_counter() - began
    for call, args, kwargs in _calls(bench, (1000,), (1 << 20,)):
        held = [bench.subject.run(args, kwargs) for _ in range(5)]  # memory for what comes is in torch's hands
        del held
        waited = []
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda._sleep(_PENDING_CYCLES)
            began = time.perf_counter()
            output = bench.subject.run(args, kwargs)
            waited.append(time.perf_counter() - began)
            torch.cuda.synchronize()
            del output
        if min(waited) > busy / 2:
            bench.violate(
                "no_sync",
                f"returned after {min(waited) * 1e3:.0f} ms, when the GPU was done with what came before",
                call,
            )
            return
