"""Checks of plain calls: their values, their memory, what they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..wording import counted
from . import corpus, memory, schema, sweep, values
from .call import Call, tensors_in
from .compare import are_all, close, dense, raw, same_bytes
from .examine import Bench, Refused, describe, extent, name_by_need
from .plan import TensorPlan
from .registry import BOTH, POINTWISE, stage

_MANY = 1000  # tensors of one result
_OTHERS = tuple(each for each in POINTWISE if each not in ("values", "layout", "sizes"))


def _widths(bench: Bench) -> list[torch.dtype]:
    """One allowed dtype of each width, floating first."""
    allowed = bench.settings.dtypes
    chosen = [dtype for dtype in sweep.WIDTHS if dtype in allowed]
    missing = {dtype.itemsize for dtype in allowed} - {dtype.itemsize for dtype in chosen}
    return chosen + [next(dtype for dtype in allowed if dtype.itemsize == width) for width in sorted(missing)]


def _calls(bench: Bench, plans: Iterator[TensorPlan], share: int = 1) -> Iterator[Call]:
    """The calls of plans, every `share`-th of them."""
    given = bench.settings.given_calls
    if given is not None:
        yield from given
        return
    for plan in itertools.islice(plans, 0, None, share):
        yield bench.settings.subject.call(plan)


def _global_state(device: str) -> dict[str, Any]:
    """What a call could change for everything that runs after it."""
    tiny = torch.tensor(1e-39)
    state = {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "whether subnormals are flushed": float(tiny * 1.0) == 0.0,
        "torch.get_rng_state()": torch.get_rng_state().tolist(),
    }
    if device != "cpu":
        state["torch.cuda.current_device()"] = torch.cuda.current_device()
    return state


@stage("no_memory", of=BOTH)
def global_state(bench: Bench, start: int) -> None:
    """What a call leaves behind in torch's own state, where the reference leaves it alone: before any other call."""
    for call in _usual(bench, (5,), (1000,), (0,)):
        bench.about_to(call)
        args, kwargs = _built(bench, call)
        states = [_global_state(bench.device)]
        expected = right(bench, args, kwargs)
        if expected is None:
            continue
        states.append(_global_state(bench.device))
        actual = bench.run(*_built(bench, call))
        states.append(_global_state(bench.device))
        if text := difference(bench, actual, expected):
            bench.violate("no_memory", f"{text}; one of the first calls of a process", call)
            return
        for name, was in states[0].items():
            if states[1][name] == was and states[2][name] != was:
                bench.violate("no_memory", f"a call changed {name}", call)
                return


@stage("values", *_OTHERS, of=BOTH)
def plain(bench: Bench, start: int) -> None:
    """Every dtype, every special value, every way autograd may see a tensor."""
    dtypes = bench.settings.dtypes
    plans = itertools.chain(sweep.plain(dtypes, full=bench.full), sweep.modes(dtypes))
    bench.look_at(_calls(bench, plans, 1 if bench.full else 2), start=start)


@stage("layout", *_OTHERS, of=BOTH)
def layouts(bench: Bench, start: int) -> None:
    """Every kind of layout, and pairs of them; in full also of large tensors."""
    if bench.settings.given_calls is not None:
        return  # `plain` looks at them
    dtypes = _widths(bench)
    if not bench.full:
        some = itertools.islice(sweep.layouts(dtypes[:3], full=False), 0, None, 4)
        bench.look_at(_calls(bench, itertools.chain(sweep.layouts_of_each(bench.settings.dtypes), some)), start=start)
        return
    every = sweep.layouts_of_each(bench.settings.dtypes)
    plans = itertools.chain(every, sweep.layouts(dtypes, full=True), sweep.large(dtypes))
    bench.look_at(_calls(bench, plans), start=start)


@stage("sizes", *_OTHERS, of=BOTH)
def sizes(bench: Bench, start: int) -> None:
    """Empty, 0-d, rank 8, every small length, edges of tiles, long dimensions."""
    if bench.settings.given_calls is not None:
        return  # `plain` looks at them
    dtypes = _widths(bench)
    plans = sweep.sizes(dtypes if bench.full else dtypes[:2], full=bench.full)
    if bench.full and bench.device != "cpu":
        plans = itertools.chain(plans, sweep.grids(dtypes[:2]))
    bench.look_at(_calls(bench, plans, 1 if bench.full else 2), start=start)


@stage("values", "layout", "sizes", *_OTHERS, of=BOTH)
def arguments(bench: Bench, start: int) -> None:
    """Tensors of a call that differ from each other, and other values of what isn't a Tensor."""
    if bench.settings.given_calls is None:
        bench.look_at(_differing(bench), start=start)


def _differing(bench: Bench) -> Iterator[Call]:
    subject, dtype = bench.subject, _usual_dtype(bench)
    count = 60 if bench.full else 24
    calls = [subject.call(TensorPlan((4, 6), dtype))]
    yield from _numbered(bench)
    if subject.varies:
        sizes = ((4, 6), (7,), (), (2, 3, 4), (300,), *(((40_000,),) if bench.full else ()))
        for seed in range(4 * count):
            plan = TensorPlan(sizes[seed % len(sizes)], dtype)
            if seed % 6 == 5:
                plan = TensorPlan((4, 6), dtype, permutation=(1, 0))
            calls.append(subject.varied(plan, seed))
            yield calls[-1]
    # The first of each number of tensors: of lists too.
    for call in {len(each.plans): each for each in reversed(calls)}.values():
        written = subject.written(call)
        for plans in sweep.several(len(call.plans), dtype, full=bench.full):
            if not any(may and (plan.expand or plan.windows) for may, plan in zip(written, plans, strict=True)):
                yield subject.fit(call.replace(plans))
        if len(call.plans) > 1 and not any(written):
            for place in sweep.places(len(call.plans), dtype):
                yield subject.fit(dataclasses.replace(call.replace(place), shared=True))


def _numbered(bench: Bench) -> Iterator[Call]:
    """Each number in turn, with tensors of the widths that numbers are kept in, and with special values."""
    subject, usual = bench.subject, _usual_dtype(bench)
    wide = [each for each in (torch.float64, torch.int64) if each in bench.settings.dtypes and each is not usual]
    for dtype in (usual, *wide):
        yield from subject.numbered(TensorPlan((4, 6), dtype), schema.ANY, bench.settings.large)
    # No zeros, whose sign an order of operands decides, and no NaN of bits of its own.
    names = [name for name in ("nan", "inf", "-inf", "max", "min", "subnormal") if name in values.specials(usual)]
    special = TensorPlan((3 * len(names),), usual, cells=tuple((3 * at, name) for at, name in enumerate(names)))
    yield from subject.numbered(special, schema.FINITE) if names else ()


@stage("values", "layout", "sizes", *_OTHERS, of=BOTH)
def mixtures(bench: Bench, start: int) -> None:
    """Calls drawn at random, or of a fixed corpus: several kinds of layout at once, special values, other arguments."""
    settings = bench.settings
    if settings.given_calls is not None or start:
        return
    count = 1000 if bench.full else 50
    drawing: dict[str, Any] = {
        "dtypes": settings.dtypes,
        "grads": ("none", "none", "none", "inference"),
        "given": settings.subject.given,
    }
    if settings.with_hypothesis:
        _by_hypothesis(bench, count, drawing)
        return
    drawn = corpus.calls(settings.subject.binding, count=count, max_numel=1024, **drawing)
    bench.look_at(map(settings.subject.fit, drawn))


def _by_hypothesis(bench: Bench, count: int, drawing: dict[str, Any]) -> None:
    import hypothesis

    from . import strategies

    drawing["given"] = {name: supplier.given for name, supplier in bench.subject.given.items()}
    calls = strategies.calls(bench.subject.binding, max_numel=1024, **drawing).map(bench.subject.fit)
    profile = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    for _ in range(5):  # one check's violation is enough, so the next run looks for others
        failing = _first_failing(bench, hypothesis.seed(bench.settings.seed), profile, hypothesis.given(calls))
        if failing is None:
            return
        bench.look_at([failing])
        if bench.new_findings(failing):
            return


def _first_failing(bench: Bench, seeded: Any, profile: Any, given: Any) -> Call | None:
    """The call that hypothesis shrinks to, or None where all are right."""
    import hypothesis

    failing: list[Call] = []

    @seeded
    @profile
    @given
    def looks_right(call: Call) -> None:
        if bench.new_findings(call):
            failing.append(call)
            raise AssertionError

    with contextlib.suppress(AssertionError, hypothesis.errors.Flaky):
        looks_right()
    return failing[-1] if failing else None


def _usual(bench: Bench, *shapes: tuple[int, ...], **fields: Any) -> list[Call]:
    """Calls of a floating dtype (of the first that is allowed, where none is), or the ones that were given."""
    if bench.settings.given_calls is not None:
        return list(bench.settings.given_calls)[: len(shapes)]
    dtype = _usual_dtype(bench)
    return [bench.subject.call(TensorPlan(shape, dtype, **fields)) for shape in shapes]


def _usual_dtype(bench: Bench) -> torch.dtype:
    allowed = bench.settings.dtypes
    return next((each for each in (torch.float32, torch.float64, torch.bfloat16) if each in allowed), allowed[0])


def _built(bench: Bench, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call.build(bench.device)


def right(bench: Bench, args: Any, kwargs: Any) -> Any:
    """What the reference says, or None where it refuses or gives so many tensors that one look at each is enough."""
    try:
        expected = bench.expected(args, kwargs)
    except Refused:
        return None
    return expected if len(tensors_in(expected)) <= _MANY else None


def difference(bench: Bench, actual: Any, expected: Any) -> str | None:
    """Where a result differs from what is expected, or None."""
    got, want = tensors_in(actual), tensors_in(expected)
    if len(got) != len(want):
        return f"gave {counted(len(got), 'tensor')}, expected {len(want)}"
    for mine, theirs in zip(got, want, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"expected {tuple(theirs.shape)} of {theirs.dtype}, got {tuple(mine.shape)} of {mine.dtype}"
        if text := bench.compare(mine, theirs):
            return text
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two results are of the same sizes, dtypes and bits."""
    got, want = tensors_in(one), tensors_in(other)
    return len(got) == len(want) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and same_bytes(raw(dense(a)), raw(dense(b)))
        for a, b in zip(got, want, strict=True)
    )


@stage("values", of=BOTH)
def surroundings(bench: Bench, start: int) -> None:
    """The values under no_grad, inference mode, autocast, another default dtype, deterministic algorithms."""
    device = bench.device

    @contextlib.contextmanager
    def default_dtype() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @contextlib.contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    around: dict[str, Callable[[], Any]] = {
        "torch.no_grad()": torch.no_grad,
        "torch.inference_mode()": torch.inference_mode,
        f"torch.autocast({device!r}, torch.bfloat16)": lambda: torch.autocast(device, torch.bfloat16),
        f"torch.autocast({device!r}, torch.float16)": lambda: torch.autocast(device, torch.float16),
        "torch.set_default_dtype(torch.float64)": default_dtype,
        # It imports the compiler the first time.
        **({"torch.use_deterministic_algorithms(True)": deterministic} if bench.full else {}),
        "torch.autograd.set_multithreading_enabled(False)": lambda: torch.autograd.set_multithreading_enabled(False),
    }
    wanted = [d for d in (torch.float32, torch.float16, torch.float64, torch.int64) if d in bench.settings.dtypes]
    plans = (
        plan
        for dtype in wanted
        for plan in (
            TensorPlan((3, 5), dtype),
            TensorPlan((3, 5), dtype, permutation=(1, 0)),
            TensorPlan((33,), dtype, grad="leaf" if dtype.is_floating_point else "none"),
        )
    )

    def seen(call: Call, enter: Callable[[], Any]) -> tuple[str, str] | None:
        """What is wrong, by the check that speaks of it."""
        bench.about_to(call)
        with enter():
            args, kwargs = _built(bench, call)
            expected = right(bench, args, kwargs)
            if expected is None:
                return None
            try:
                actual = bench.run(args, kwargs)
            except Exception as error:
                return "accepts", f"raised {describe(error)}"
        wrong = difference(bench, actual, expected)
        return ("values", wrong) if wrong else None

    # What is wrong without them too isn't theirs: others speak of it.
    calls = [call for call in _calls(bench, plans) if not seen(call, contextlib.nullcontext)]
    for text, enter in around.items():
        for call in calls:
            if found := seen(call, enter):
                check, sentence = found
                bench.violate(check, f"{sentence}; under {text}", call)
                break


@stage("alias", of=BOTH)
def repeated(bench: Bench, start: int) -> None:
    """Outputs that are held while the same call is made again."""
    if bench.subject.aliases:
        return
    shapes: tuple[tuple[int, ...], ...] = ((3,), (1,), (), (4, 5), (257,), (2, 2, 2, 2))
    if bench.full:
        shapes += ((70_000,), (1 << 20,), (1, 1), (64, 64), (1024,))
    for call in [
        *_usual(bench, *shapes),
        *_usual(bench, (4, 5), (3, 3), permutation=(1, 0)),
        *_usual(bench, (9,), step=(2,)),
    ]:
        bench.about_to(call)
        held: list[tuple[Any, list[torch.Tensor]]] = []
        for turn in range(4):
            args, kwargs = call.replace(dataclasses.replace(p, seed=p.seed + turn) for p in call.plans).build(
                bench.device
            )
            if right(bench, args, kwargs) is None:
                break
            output = bench.run(args, kwargs)
            held.append((output, [dense(each).clone() for each in tensors_in(output)]))
        for (first, _), (second, _) in itertools.combinations(held, 2):
            spans = [extent(each) for each in tensors_in(first) if each.numel()]
            later = [extent(each) for each in tensors_in(second) if each.numel()]
            if any(a < d and c < b for a, b in spans for c, d in later):
                bench.violate("alias", "an output shares memory with the output of an earlier call", call)
                return
        for output, was in held:
            now = [dense(each) for each in tensors_in(output)]
            if any(not same_bytes(raw(a), raw(b)) for a, b in zip(now, was, strict=True)):
                bench.violate("no_memory", "a later call changed the output of an earlier one", call)
                return


@stage("leak", of=BOTH)
def kept_inputs(bench: Bench, start: int) -> None:
    """Whether an input's memory is free again once nobody but the operator could hold it."""
    if bench.subject.aliases:
        return
    for call in _usual(bench, (5,), (1000,)):
        bench.about_to(call)
        args, kwargs = _built(bench, call)
        if right(bench, args, kwargs) is None:
            continue
        with torch.no_grad():
            output = bench.run(args, kwargs)
        shared = {each.untyped_storage().data_ptr() for each in tensors_in(output)}
        held = [
            StorageWeakRef(each.untyped_storage())
            for each in tensors_in((args, kwargs))
            if each.numel() and each.untyped_storage().data_ptr() not in shared
        ]
        del args, kwargs, output
        if not all(each.expired() for each in held):
            gc.collect()
        if not all(each.expired() for each in held):
            bench.violate("leak", "it keeps its input's memory", call)
            return


@stage("deterministic", of=BOTH)
def deterministic(bench: Bench, start: int) -> None:
    """The same call, many times over."""
    shapes = ((5,), (4, 9), (1000,), (70_000,)) if bench.full else ((5,), (1000,))
    for call in [*_usual(bench, *shapes), *_usual(bench, (6, 7), permutation=(1, 0))]:
        args, kwargs = _built(bench, call)
        if right(bench, args, kwargs) is None:
            continue
        first: list[torch.Tensor] | None = None
        for turn in range(150 if bench.full and call.plans[0].numel < 2000 else 20):
            bench.about_to(call)
            now = [each.clone() for each in tensors_in(bench.run(args, kwargs))]
            if first is not None and not _same(now, first):
                bench.violate("deterministic", f"call {turn + 1} with the same input gave other bits", call)
                return
            first = first or now


@stage("no_memory", of=BOTH)
def remembered(bench: Bench, start: int) -> None:
    """The same memory with other values, the same values elsewhere, the same shape, freed memory taken again."""
    generator = random.Random(bench.settings.seed)
    dtypes = [d for d in (torch.float32, torch.uint8, torch.float64) if d in bench.settings.dtypes] or [
        _usual_dtype(bench)
    ]
    shapes = ((5,), (3, 4), (), (1,), (1000,), *(((100_000,),) if bench.full else ()))
    for call in _calls(bench, (TensorPlan(shape, dtype) for dtype in dtypes for shape in shapes)):
        if any(plan.expand or plan.windows or plan.grad != "none" for plan in call.plans):
            continue  # what can't be written into
        args, kwargs = _built(bench, call)
        if right(bench, args, kwargs) is None:
            continue
        for turn, (at, tensor) in itertools.product(range(6), enumerate(tensors_in((args, kwargs)))):
            bench.about_to(call)
            other = dataclasses.replace(call.plans[at], seed=100 + turn).build(bench.device)
            if turn == 3 and tensor.numel() > 1 and tensor.is_contiguous():
                # One cell in the middle: neither the pointer, the size nor the edges tell.
                tensor.reshape(-1)[tensor.numel() // 2] = other.reshape(-1)[0]
            else:
                tensor.copy_(other)
            expected = right(bench, args, kwargs)
            if expected is not None and (text := difference(bench, bench.run(args, kwargs), expected)):
                bench.violate("no_memory", f"{text}; the input's values had changed since an earlier call", call)
                return
    if bench.settings.given_calls is not None:
        return
    # Many shapes and dtypes in an order that no cache expects, some of them again.
    earlier: list[TensorPlan] = []
    for turn in range(600 if bench.full else 120):
        if earlier and generator.random() < 0.4:
            plan = generator.choice(earlier)
        else:
            shape = tuple(generator.choice((1, 2, 3, 4, 8)) for _ in range(generator.randint(0, 3)))
            plan = TensorPlan(shape, generator.choice(dtypes), seed=generator.randint(0, 9))
            if len(shape) > 1 and generator.random() < 0.3:
                plan = dataclasses.replace(plan, permutation=tuple(reversed(range(len(shape)))))
            earlier.append(plan)
        call = bench.subject.call(plan)
        bench.about_to(call)
        args, kwargs = _built(bench, call)
        expected = right(bench, args, kwargs)
        if expected is None:
            continue
        if text := difference(bench, bench.run(args, kwargs), expected):
            bench.violate("no_memory", f"{text}; after {counted(turn, 'other call')}", call)
            return


@stage("threads", of=BOTH)
def threads(bench: Bench, start: int) -> None:
    """Calls from several threads at once, and several threads within a call."""
    _within_a_call(bench)
    # A long call is interrupted by another thread even where one core does all.
    shapes = ((7,), (300,), (20_000,), (200_000,), (2_000_000,)) if bench.full else ((7,), (200_000,))
    for call in _usual(bench, *shapes):
        bench.about_to(call, 30.0)
        jobs = []
        for seed in range(4):
            args, kwargs = call.replace(dataclasses.replace(p, seed=p.seed + 10 * seed) for p in call.plans).build(
                bench.device
            )
            expected = right(bench, args, kwargs)
            if expected is not None:
                jobs.append((args, kwargs, expected))
        turns = max(3, min(200 if bench.full else 25, 1_500_000 // max(call.plans[0].numel, 1)))
        barrier = threading.Barrier(max(len(jobs), 1))
        wrong: list[str] = []

        workers = [threading.Thread(target=_call_often, args=(bench, barrier, turns, wrong, *job)) for job in jobs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if wrong:
            bench.violate("threads", f"{wrong[0]}; {counted(len(jobs), 'thread')} called at once", call)
            return


def _call_often(
    bench: Bench, barrier: threading.Barrier, turns: int, wrong: list[str], args: Any, kwargs: Any, expected: Any
) -> None:
    """What one of several threads does: adds to `wrong` what it sees."""
    right_one: list[torch.Tensor] | None = None
    try:
        barrier.wait(10)
        for _ in range(turns):
            for output in [bench.run(args, kwargs) for _ in range(16)]:
                # Most are equal to the first, bit for bit, which is sooner seen than that they are close enough.
                if right_one is not None and _same(output, right_one):
                    continue
                kept = [each.clone() for each in tensors_in(output)]  # it may lie where another thread writes
                if text := difference(bench, kept, expected):
                    wrong.append(text)
                    return
                right_one = kept
    except Exception as error:
        wrong.append(f"raised {describe(error)}")


def _within_a_call(bench: Bench) -> None:
    if bench.device != "cpu":
        return
    before = torch.get_num_threads()
    shapes = ((100_003,), (317, 411)) if bench.full else ((100_003,),)
    calls = [*_usual(bench, *shapes), *_usual(bench, (317, 411), permutation=(1, 0))]
    try:
        for call in calls:
            args, kwargs = _built(bench, call)
            expected = right(bench, args, kwargs)
            if expected is None:
                continue
            bench.about_to(call)
            wrong = [difference(bench, bench.run(*_built(bench, call)), expected) for _ in range(2)]
            # Threads aren't what it takes; where it is wrong at times, that is what `deterministic` tells.
            if all(wrong):
                bench.violate(name_by_need(call), str(wrong[0]), call)
            if any(wrong):
                continue
            for count in (1, 2, 3, 4, 7) if bench.full else (1, 4):
                torch.set_num_threads(count)
                # The reference may sum in another order too.
                expected = right(bench, *call.build(bench.device))
                for _ in range(20 if bench.full else 12):
                    bench.about_to(call)
                    if text := difference(bench, bench.run(args, kwargs), expected):
                        bench.violate("threads", f"{text}; with torch.set_num_threads({count})", call)
                        return
    finally:
        torch.set_num_threads(before)


@stage("bounds", death="stepped beside its input, where nothing may be read or written: ", of=BOTH)
def fences(bench: Bench, start: int) -> None:
    """Inputs that end, or begin, where memory can't be read: a step beside ends the process."""
    subject = bench.subject
    dtypes = _widths(bench)[: 4 if bench.full else 2]
    lengths = (1, 2, 3, 4, 7, 8, 15, 16, 31, 33, 64, 100, 1000, 4096) if bench.full else (1, 3, 8, 33, 1000)
    plans = [TensorPlan((length,), dtype) for dtype in dtypes for length in lengths]
    for dtype in dtypes if bench.full else dtypes[:1]:
        plans += [
            TensorPlan((), dtype),
            TensorPlan((5, 7), dtype),
            TensorPlan((5, 7), dtype, permutation=(1, 0)),
            TensorPlan((5, 7), dtype, padding=(0, 3)),
            TensorPlan((9,), dtype, step=(2,)),
            TensorPlan((4, 6), dtype, expand=(0,)),
            TensorPlan((4, 6), dtype, expand=(0, 1)),
            TensorPlan((6, 4), dtype, windows=2),
            TensorPlan((2, 3, 4, 5), dtype, memory_format=torch.channels_last),
            TensorPlan((70_001,), dtype),
        ]
    calls = list(_calls(bench, iter(plans)))
    sides = (False, True)
    turns = itertools.islice(itertools.cycle(sides), start, None)
    for call, before in zip(bench.each((each for each in calls for _ in sides), start), turns, strict=False):
        args, kwargs = call.fill(
            memory.fenced(plan.build(bench.device), before=before, number=number)
            for number, plan in enumerate(call.plans)
        )
        expected = right(bench, args, kwargs)
        if expected is None:
            continue
        actual = subject.run(args, kwargs)
        found = difference(bench, (actual, subject.written_tensors(args, kwargs)), expected)
        if found and not list(bench.examine(call)):
            bench.violate("bounds", f"{found}; the memory around the input can't be read", call)
            return


@stage("leak", quick=False, of=BOTH)
def leaks(bench: Bench, start: int) -> None:
    """Memory of this process over many calls."""
    for call in _usual(bench, (1 << 18,)):
        args, kwargs = _built(bench, call)
        if right(bench, args, kwargs) is None:
            return
        size = sum(each.untyped_storage().nbytes() for each in tensors_in(bench.run(args, kwargs)))
        for _ in range(20):
            bench.run(args, kwargs)
        turns = 60
        # Of a GPU only what all processes hold is known.
        grown = memory.kept(
            functools.partial(_resident, bench.device),
            functools.partial(_again, bench, call, args, kwargs, turns),
            looks=1 if bench.device == "cpu" else 3,
        )
        if size and grown > turns * max(size / 2, _LEAST_LEAK_BYTES):
            bench.violate(
                "leak", f"{counted(turns, 'call')} kept {grown >> 20} MiB, {counted(grown // turns, 'byte')} each", call
            )


#: Of each call. Python and malloc take that much now and then.
_LEAST_LEAK_BYTES = 16 << 10


def _again(bench: Bench, call: Call, args: Any, kwargs: Any, turns: int) -> None:
    for _ in range(turns):
        bench.about_to(call)
        bench.run(args, kwargs)


def _resident(device: str) -> int:
    """Bytes that this process holds in memory, or all processes on the GPU, and can't give back."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        # What torch's allocator keeps for later is no leak, what is allocated from it is.
        return total - free - torch.cuda.memory_reserved(device) + torch.cuda.memory_allocated(device)
    # What malloc keeps of earlier calls is no leak, and would take one in unseen.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


_UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@stage("refuses")
def refuses(bench: Bench, start: int) -> None:
    """Dtypes that the author left out, and tensors that aren't dense: taken rightly, or refused with a text."""
    subject = bench.subject
    if bench.settings.given_calls is not None:
        return
    index = 0
    for dtype in bench.settings.left_out:
        for shape in ((3,), (0,), (2, 3)):
            index += 1
            if index <= start:
                continue
            bench.index = index
            call = subject.call(TensorPlan(shape, dtype))
            bench.about_to(call)
            args, kwargs = _built(bench, call)
            expected = right(bench, args, kwargs)
            try:
                actual = bench.run(args, kwargs)
            except Exception as error:
                if not str(error).strip():
                    bench.violate("refuses", f"refused {dtype} with {describe(error)}", call)
                continue
            if expected is None or not (text := _differ_widely(bench, actual, expected)):
                continue
            # A formula for floating-point numbers may wrap round among integers, as 2 * x does.
            floating = _floating(bench, actual)
            wider = right(bench, *call.fill(_floated(each, floating) for each in tensors_in((args, kwargs))))
            if wider is None or _differ_widely(bench, actual, wider):
                bench.violate("refuses", f"took {dtype}, which dtypes leaves out: {text}", call)
                break
    if len(subject.binding.arguments) != 1 or torch.float32 not in bench.settings.dtypes:
        return
    for kind, make in _UNUSUAL.items():
        index += 1
        if index <= start:
            continue
        bench.index = index
        bench.about_to(f"a {kind} tensor")
        try:
            x = make(torch.eye(4, device=bench.device))
        except Exception:  # this torch, or this device, has none
            continue
        try:
            actual = bench.run((x,), {})
        except Exception as error:
            if not str(error).strip():
                bench.violate("refuses", f"refused a {kind} tensor with {describe(error)}")
            continue
        try:
            expected = subject.expect((x,), {})
            same = _strided(actual).shape == _strided(expected).shape and torch.equal(
                _strided(actual), _strided(expected)
            )
        except Exception:  # nothing to hold it against
            continue
        if not same:
            bench.violate("refuses", f"took a {kind} tensor and gave other values than the reference")


def _floating(bench: Bench, result: Any) -> torch.dtype:
    """The floating dtype of a result, or the widest one that is allowed."""
    found = [each.dtype for each in tensors_in(result)]
    allowed = sorted(bench.settings.dtypes, key=lambda each: -each.itemsize)
    return next((each for each in (*found, *allowed) if each.is_floating_point), torch.float64)


def _floated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers in a floating dtype, anything else as it is."""
    return x if x.is_floating_point() or x.is_complex() else x.to(dtype)


def _differ_widely(bench: Bench, actual: Any, expected: Any) -> str | None:
    """Where numbers differ, whatever their dtypes, by more than a formula loses that wasn't written for the dtype."""
    got, want = tensors_in(actual), tensors_in(expected)
    if [each.shape for each in got] != [each.shape for each in want]:
        return difference(bench, actual, expected)
    for mine, theirs in zip(got, want, strict=True):
        if mine.dtype == theirs.dtype and not bench.compare(mine, theirs):
            continue
        rounded = [each.dtype for each in (mine, theirs) if each.is_floating_point() or each.is_complex()]
        if not rounded:  # a sum of a formula's may be wider
            if text := bench.compare(mine, theirs.to(mine.dtype)):
                return text
            continue
        wide = torch.complex128 if any(each.is_complex for each in rounded) else torch.float64
        lost = max((min(16 * torch.finfo(each).eps, 0.5) for each in rounded), default=0.0)
        if text := close(lost, lost)(mine.to(wide), theirs.to(wide)):
            return text
    return None


def _strided(x: torch.Tensor) -> torch.Tensor:
    if x.is_nested:
        return torch.cat([each.reshape(-1) for each in x.unbind()])
    if x.is_quantized:
        return x.dequantize()
    return x.to_dense() if x.layout is not torch.strided else x


_BILLIONS = (1 << 31) + 11


@stage("sizes", quick=False)
def beyond_32_bits(bench: Bench, start: int) -> None:
    """More than 2^31 elements of one byte, mostly zero, each other cell where an index may go wrong."""
    subject = bench.subject
    dtype = next((d for d in (torch.uint8, torch.int8, torch.bool) if d in bench.settings.dtypes), None)
    arguments = [str(each.real_type) for each in subject.binding.arguments]
    if dtype is None or arguments not in (["Tensor"], ["Optional[Tensor]"]) or bench.settings.given_calls is not None:
        return
    room = _free_bytes(bench.device)
    if room < 3 * _BILLIONS:
        bench.tell(
            f"no more than 2^31 elements were tried: {3 * _BILLIONS >> 30} GiB are needed, {room >> 30} are free"
        )
        return
    bench.about_to(f"a {dtype} tensor of {_BILLIONS} elements", 60.0)
    # numpy's zeros take no memory before they are written.
    x = (
        torch.from_numpy(np.zeros(_BILLIONS, np.uint8))
        if bench.device == "cpu"
        else torch.zeros(_BILLIONS, dtype=torch.uint8, device=bench.device)
    )
    marked = torch.tensor([0, 1, 65_536, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, _BILLIONS - 1], device=bench.device)
    x[marked] = 1
    sample = TensorPlan((3,), dtype).build(bench.device)
    try:
        like = subject.expect((sample,), {})
        ones = subject.expect((torch.tensor([0, 1], dtype=torch.uint8, device=bench.device).view(dtype),), {})
    except Exception:  # what it needs is more than this
        return
    if like.shape != sample.shape or like.dtype != dtype:
        return  # not one element for each: nothing to hold it against
    # Three cells whose distance in memory is what overflows.
    apart = x.as_strided((3,), (1 << 30,)).view(dtype)
    if text := bench.compare(bench.run((apart,), {}), subject.expect((apart,), {})):
        bench.violate("sizes", f"cells {1 << 30} elements of {dtype} apart: {text}")
        return
    bench.about_to(f"a {dtype} tensor of {_BILLIONS} elements", 60.0)
    actual = bench.run((x.view(dtype),), {})
    if actual.shape != x.shape or actual.dtype != dtype:
        bench.violate("sizes", f"gave {tuple(actual.shape)} of {actual.dtype} for {_BILLIONS} elements of {dtype}")
        return
    nothing, one = (int(each) for each in ones.view(torch.uint8))
    got = actual.view(torch.uint8)
    if bool((got[marked] != one).any()):
        bad = [int(each) for each in marked[got[marked] != one]]
        bench.violate("sizes", f"{_BILLIONS} elements of {dtype}: those at {bad} are wrong")
        return
    got[marked] = nothing
    del x
    for first in range(0, _BILLIONS, 1 << 25):
        if not are_all(got[first : first + (1 << 25)], nothing):
            bench.violate("sizes", f"{_BILLIONS} elements of {dtype}: some from {first} on are wrong")
            return
    del actual, got
    if bench.device != "cpu":  # a second there
        huge(bench, start)


@stage("sizes", "layout", tiers=("huge",))
def huge(bench: Bench, start: int) -> None:
    """More than 2^31 elements in other layouts, and more than 2^32."""
    dtype = next((d for d in (torch.uint8, torch.int8) if d in bench.settings.dtypes), None)
    if dtype is None or len(bench.subject.binding.arguments) != 1 or bench.settings.given_calls is not None:
        return
    half = (1 << 30) + 7
    layouts: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((half, 2), {"permutation": (1, 0)}),
        (((1 << 32) + 5,), {}),
        ((2, half), {"padding": (0, 1)}),
        ((half, 3), {"expand": (1,)}),
        ((_BILLIONS,), {"offset": 1}),
    ]
    for shape, fields in layouts if bench.settings.tier == "huge" else layouts[:2]:
        plan = TensorPlan(shape, dtype, **fields)
        needed = 2 * plan.storage_bytes + 3 * plan.numel
        if _free_bytes(bench.device) < needed:
            bench.tell(f"{plan!r} was not tried: {needed >> 30} GiB are needed")
            continue
        call = bench.subject.call(plan)
        bench.about_to(call, 300.0)
        args, kwargs = _built(bench, call)
        expected = right(bench, args, kwargs)
        if expected is not None and (text := difference(bench, bench.run(args, kwargs), expected)):
            bench.violate("sizes" if not fields else "layout", text, call)


def _free_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as meminfo:
        available = next(line for line in meminfo if line.startswith("MemAvailable"))
    return int(available.split()[1]) << 10
