"""check_op: every check of an operator, in processes that may die."""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..wording import counted
from . import isolation, memory, reproducer, schema, values
from .call import Call, tensors_in
from .compare import Comparison, exact
from .examine import Bench, Settings, describe, name_by_need
from .plan import TensorPlan
from .registry import CHECKS, STAGES, TIERS, Stage
from .report import LISTENERS, CheckFailure, CheckRun, Report, Violation
from .shrink import shrink
from .state import State
from .subject import Subject, Supplier
from .tied_shapes import Shapes

_CUDA_LIMIT_S = 20.0  # the first call of each kind loads code
_DEATHS = 2  # of one stage, after which it is left
_HANGS = 3  # after which everything is left
_FRESH_DEATHS = 5  # of fresh processes, which take seconds to start, after which everything is left
_LARGE_LIMIT_S = 1.0  # for the reference with a large integer
_LARGE_BYTES = 1 << 30
# Where the stages are, in the order in which they run: plain calls before those that a kernel with a bug of theirs
# would die of too, and be told under another name.
_MODULES = ("eager", "classes", "gradients", "tracing", "cuda", "sharded")
_LIMIT_S = {"quick": 3.0, "full": 5.0}
_OF_DERIVATIVES = ("grad", "second_order", "forward_ad", "func")
# Checks whose violation a single call doesn't show.
_OF_SURROUNDINGS = (
    "threads", "no_memory", "deterministic", "vmap", "compile", "export", "aoti", "dtensor", "fake", "symbolic",
    "opcheck", "stream", "two_streams", "capture", "no_sync", "device_guard", "leak",
)  # fmt: skip
# What glibc says where it finds memory beside a block damaged.
_DAMAGED = ("free(): ", "malloc(): ", "realloc(): ", "malloc_consolidate(): ", "munmap_chunk(): ", "corrupt")


def check_op(
    op: Any,
    reference: Any,
    *,
    inputs: Any = None,
    shapes: Mapping[str, Sequence[str | int]] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    compare: Comparison | None = None,
    devices: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    tier: str = "quick",
    seed: int = 0,
) -> Report:
    """Checks an operator by property against a reference.

    Args:
        op: ``torch.ops.ns.name`` or one of its overloads, a ``torch.library.custom_op``, ``"ns::name"``, or a
            Python callable.
        reference: a callable of the same arguments, such as ``torch.clone``; arguments that it lacks stay at
            their default.
        inputs: None draws every argument from the schema. A mapping of argument names gives a value or a
            hypothesis strategy for some of them; a list of ``Call`` is all that is looked at.
        shapes: of tensors whose sizes depend on each other or are fixed, by argument: ``{"boxes": ("N", 4),
            "scores": ("N<=300",)}``; ``"..."`` stands for any dimensions.
        dtypes: of the tensors; by default all that the reference takes.
        compare: how values are compared: ``exact()`` (the default), ``ulp(n)``, ``close(...)``.
        devices: such as ``["cpu"]``; by default all present for which the operator has a kernel.
        skip: names of checks to leave out, each with the reason.
        tier: "quick" (about two seconds), "full" (under a minute), or full and one more: "huge" (more than 2^31
            elements in many layouts), "aoti" (a package, in Python and without), "dtensor" (every placement).
        seed: of everything that is drawn.

    Returns:
        What was looked at.

    Raises:
        CheckFailure: a property is violated; it carries all violations.
        ValueError, TypeError: the arguments don't fit together, in one sentence.

    Example::

        >>> check_op(torch.ops.aten.neg, torch.neg)  # doctest: +SKIP
        aten.neg.default: no violation in 1503 calls, tier quick, seed 0, 1.4 s
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    subject = Subject(op, reference, suppliers(inputs), Shapes(shapes))
    return check(subject, inputs, dtypes, compare, devices, skip, tier, seed, kind="op")


def check(
    subject: Any,
    inputs: Any,
    dtypes: Iterable[torch.dtype] | None,
    compare: Comparison | None,
    devices: Sequence[str] | None,
    skip: Mapping[str, str] | None,
    tier: str,
    seed: int,
    *,
    kind: str,
) -> Report:
    """What check_op and check_class have in common; `kind` is "op" or "class"."""
    __tracebackhide__ = True
    _check_arguments(subject, devices, skip, tier, compare, seed)
    skip = dict(skip or {})
    if "grad" in skip:  # without a first derivative there is nothing to see in these
        skip = {**dict.fromkeys(("second_order", "forward_ad", "func"), f"grad is skipped: {skip['grad']}"), **skip}
    if subject.reference_writes and not subject.writes:
        raise ValueError(
            f"check_{kind}: the reference changes its input, which {subject.binding.schema} doesn't say: give one that "
            "leaves it alone"
        )
    chosen = list(devices) if devices is not None else list(subject.device_types)
    if not chosen:
        raise ValueError(f"check_{kind}: {subject.name} has no kernel for a device of this machine")
    given = _given_calls(subject, inputs)
    taken = None if given else [dtype for dtype in values.DTYPES if _is_taken(subject, dtype)]
    if taken is not None and not taken:
        raise ValueError(
            f"check_{kind}: the reference takes none of the inputs that were drawn for {subject.binding.schema}: "
            f"say inputs=; it raised {_refusal(subject)}"
        )
    report = Report(subject.name, tier, seed, skipped=skip)
    wanted = tuple(taken or values.DTYPES) if dtypes is None else _wanted(dtypes, taken, report)
    report.dtypes = wanted
    if importlib.util.find_spec("hypothesis") is None:
        report.notes.append(
            "hypothesis is not installed: calls come from a fixed corpus (pip install 'identity_conv[testing]')"
        )
    settings = Settings(
        subject,
        compare or exact(),
        tier,
        seed,
        frozenset(skip),
        wanted,
        left_out=tuple(dtype for dtype in taken or () if dtype not in wanted),
        given_calls=given,
        large={} if given else _large_integers(subject),
        with_hypothesis=importlib.util.find_spec("hypothesis") is not None,
        limit=_LIMIT_S.get(tier, 5.0),
    )
    started = time.perf_counter()
    for device in chosen:
        _run(settings, device, kind, report)
    report.seconds = time.perf_counter() - started
    for listener in LISTENERS:
        listener(report)
    if report.violations:
        raise CheckFailure(report)
    return report


def _run(settings: Settings, device: str, kind: str, report: Report) -> None:
    """Runs every stage on one device and enters what it tells into the report."""
    _import_stages()
    from . import tracing

    tracing.warm_up()
    type_ = torch.device(device).type
    stages = [
        each
        for each in _in_order(STAGES.values())
        if settings.tier in each.tiers
        and type_ in each.devices
        and kind in each.of
        and not set(each.checks) <= settings.skip
    ]
    if type_ == "cpu":
        _, reason = memory.guarded_allocator(build=settings.full)
        if reason:
            report.notes.append(f"bounds: outputs on CPU are not guarded: {reason}")
    runs: dict[str, CheckRun] = {}

    def run_of(check: str) -> CheckRun:
        if check not in runs:
            runs[check] = CheckRun(check, device)
        return runs[check]

    for each in stages:
        for check in each.checks:
            if check not in settings.skip:
                run_of(check)
    deaths: dict[str, int] = {}
    hangs = 0
    tasks = [(each.name, device, 0) for each in stages]
    how = _isolation_for(settings, device)
    if how == "here":
        report.notes.append(
            f"{device}: run in this process, which a crash would end: a fresh one can't be given {settings.subject!r}"
        )
    performed = isolation.run(tasks, _Performance(settings), how=how, limit=settings.limit)
    told = next(performed, None)
    while told is not None:
        task, what = told
        again = None
        stage = STAGES[task[0]]
        if isinstance(what, isolation.Death):
            deaths[stage.name] = deaths.get(stage.name, 0) + 1
            if what.hung:
                hangs += 1
            known = {check for check, run in runs.items() if run.violations}
            violation, index = _of_death(settings, stage, device, how, what, known)
            if violation.check not in {*settings.skip, *known}:
                run_of(violation.check).violations.append(violation)
            if hangs == _HANGS or (how == "spawn" and sum(deaths.values()) == _FRESH_DEATHS):
                report.notes.append(
                    f"{device}: left in {stage.name}, after {counted(sum(deaths.values()), 'call')} ended a process"
                )
                performed.close()
                break
            if deaths[stage.name] < _DEATHS and index is not None:
                again = (stage.name, device, index + 1)
        elif isinstance(what, Violation):
            run = run_of(what.check)
            if not any(each.check == what.check for each in run.violations):
                run.violations.append(what)
        elif isinstance(what, str):
            run_of(stage.checks[0]).notes.append(what)
        elif isinstance(what, Bench.Tally):
            for check in stage.checks:
                if check in runs:
                    runs[check].cases += what.cases
                    for cell, count in what.cells.items():
                        runs[check].cells[cell] = runs[check].cells.get(cell, 0) + count
            if stage.checks[0] in runs:
                runs[stage.checks[0]].seconds += what.seconds
        told = performed.send(again) if again is not None else next(performed, None)
    for run in runs.values():
        run.violations = [_with_reproducer(each, settings) for each in run.violations]
    report.runs += sorted(runs.values(), key=lambda run: list(CHECKS).index(run.check))


class _Performance:
    """Performs one stage in a child."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def __call__(self, task: tuple[str, str, int], board: isolation.Blackboard, tell: Callable[[Any], None]) -> None:
        name, device, start = task
        _import_stages()
        stage = STAGES[name]
        if device != "cpu":
            board.note(limit=120.0)
            torch.ones(1, device=device).sum().item()  # CUDA starts, which takes seconds
            board.limit = _CUDA_LIMIT_S
        bench = Bench(self._settings, stage.checks[0], device, board, tell)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                stage.look(bench, start)
        except Exception as error:
            bench.end_if_broken(error)
            if bench.latest is not None and (
                raised := [f for f in bench.new_findings(bench.latest) if f.check == "accepts"]
            ):
                bench.violate("accepts", raised[0].sentence, bench.latest)
                return
            where = traceback.extract_tb(error.__traceback__)
            ours = next((each for each in reversed(where) if "testing" in each.filename), where[-1])
            place = f"{os.path.basename(ours.filename)}, line {ours.lineno}"
            lines = str(error).strip().splitlines() or ["without a text"]
            bench.violate(
                stage.checks[0],
                f"raised {type(error).__name__}: {lines[0][:300]} ({place})",
                bench.latest,
            )
        finally:
            tell(Bench.Tally(bench.cases, time.perf_counter() - began, bench.cells))


def _of_death(
    settings: Settings, stage: Stage, device: str, how: str, death: isolation.Death, known: set[str]
) -> tuple[Violation, int | None]:
    """The violation that a death is, its call shrunk in further children where those are cheap.

    Args:
        how: how the child was kept apart.
        known: checks that have a violation: no second one is shrunk.
    """
    index, call = death.at if isinstance(death.at, tuple) else (None, None)
    if not isinstance(call, Call):
        return Violation(stage.checks[0], death.how if call is None else f"{death.how}, with {call}", device), index
    damaged = any(text in death.how for text in _DAMAGED)

    def name(of: Call) -> str:
        return "bounds" if damaged else name_by_need(of)

    pointwise = damaged or stage.checks[0] in ("values", "layout", "sizes")
    here = Violation(name(call) if pointwise else stage.checks[0], stage.death + death.how, device, call)
    if how != "fork":
        return here, index

    def dies(candidate: Call) -> bool:
        if not settings.allows(candidate, instead_of=call):
            return False
        told = isolation.run([(candidate, device)], _Once(replace(settings, limit=1.0)), how="fork", limit=1.0)
        return any(isinstance(each, isolation.Death) for _, each in told)

    if not dies(call):
        return here, index
    if name(call) not in known:
        call = shrink(
            call, dies, fit=settings.subject.fit, seconds=3.0 if death.hung else 2.0, tries=60, clock=time.monotonic
        )
    return Violation(name(call), death.how, device, call), index


class _Once:
    """Makes one call in a child."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def __call__(self, task: tuple[Call, str], board: isolation.Blackboard, tell: Callable[[Any], None]) -> None:
        call, device = task
        bench = Bench(self._settings, "values", device, board, lambda _: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bench.new_findings(call)


def _isolation_for(settings: Settings, device: str) -> str:
    """How calls on a device are kept from this process: by a fork, a fresh process, or not at all."""
    if isolation.how_for(device) == "fork":
        return "fork"
    try:
        isolation.dumps(settings)
    except ValueError:
        return "here"
    return "spawn"


def _import_stages() -> None:
    """Imports the stages, and what they use: before a fork, so that no child does it again."""
    for module in _MODULES:
        importlib.import_module(f".{module}", __package__)
    if importlib.util.find_spec("hypothesis") is not None:
        from . import strategies  # noqa: F401


def _in_order(stages: Iterable[Stage]) -> list[Stage]:
    """By module, whatever was imported first: the same calls come after each other."""
    return sorted(stages, key=lambda stage: _MODULES.index(stage.look.__module__.rpartition(".")[2]))


def _wanted(
    dtypes: Iterable[torch.dtype], taken: Sequence[torch.dtype] | None, report: Report
) -> tuple[torch.dtype, ...]:
    """The dtypes that were asked for, so far as the reference takes them."""
    asked = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    unknown = [dtype for dtype in asked if dtype not in values.DTYPES]
    if unknown or not asked:
        raise ValueError(f"dtypes must be some that torch.clone copies, got {unknown or asked!r}")
    refused = [] if taken is None else [dtype for dtype in asked if dtype not in taken]
    if len(refused) == len(asked):
        raise ValueError(f"dtypes must hold one that the reference takes, got {', '.join(map(str, asked))}")
    if refused:
        report.notes.append(f"not looked at, since the reference refuses them: {', '.join(map(str, refused))}")
    return tuple(dtype for dtype in asked if dtype not in refused)


def _check_arguments(
    subject: Any,
    devices: Sequence[str] | None,
    skip: Mapping[str, str] | None,
    tier: str,
    compare: Comparison | None,
    seed: int,
) -> None:
    if tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}")
    if not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    if not isinstance(skip, Mapping | None):
        raise TypeError(f"skip must be a mapping of a check's name to the reason, got {skip!r}")
    for name, reason in (skip or {}).items():
        if name not in CHECKS:
            raise ValueError(f"skip: there is no check {name!r}; there are {', '.join(CHECKS)}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"skip: {name!r} needs a reason, got {reason!r}")
    if compare is not None and not isinstance(compare, Comparison):
        raise TypeError(f"compare must be exact(), ulp(n) or close(...), got {compare!r}")
    if isinstance(devices, str):
        raise TypeError(f"devices must be a list such as ['cpu'], got {devices!r}")
    for device in devices or ():
        try:
            type_ = torch.device(device).type
        except RuntimeError:
            raise ValueError(f"devices: {device!r} is none that torch knows") from None
        if type_ == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"devices: {device!r} isn't there: torch sees no GPU")
        if type_ not in subject.device_types:
            raise ValueError(f"devices: {subject.name} has no kernel for {device!r}")
    if devices is not None and not devices:
        raise ValueError("devices must name one at least, got none")


def _is_taken(subject: Any, dtype: torch.dtype) -> bool:
    args, kwargs = subject.call(TensorPlan((3,), dtype)).build()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of complex numbers, say, that the author leaves out
            subject.expect(args, kwargs)
    except Exception:
        return False
    return True


def _large_integers(subject: Any) -> dict[str, list[int]]:
    """Of integers by name, those beyond 32 bits that the reference takes at once and with little memory."""
    found: dict[str, list[int]] = {}
    tasks = [
        (each.name, number)
        for each in subject.binding.arguments
        if schema.is_integer(each.real_type) and each.name not in subject.given
        for number in schema.LARGE
    ]
    for (name, number), told in isolation.run(tasks, _Expectation(subject), how="fork", limit=_LARGE_LIMIT_S):
        if told is True:
            found.setdefault(name, []).append(number)
    return found


class _Expectation:
    """Sees in a child whether the reference takes a large integer: as a size, it would end neither soon nor well."""

    def __init__(self, subject: Any):
        self._subject = subject

    def __call__(self, task: tuple[str, int], board: isolation.Blackboard, tell: Callable[[Any], None]) -> None:
        name, number = task
        board.note(limit=_LARGE_LIMIT_S)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as status:
            used = int(status.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _LARGE_BYTES, most))
        for call in self._subject.numbered(TensorPlan((4, 6)), {}, {name: [number]}):
            args, kwargs = call.build()
            try:
                tell(sum(each.numel() for each in tensors_in(self._subject.expect(args, kwargs))) < 1 << 16)
            except Exception:
                tell(False)


def _refusal(subject: Any) -> str:
    args, kwargs = subject.call(TensorPlan((3,))).build()
    try:
        subject.expect(args, kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return "nothing"


def suppliers(inputs: Any) -> dict[str, Supplier]:
    """Of arguments by name, what gives their values."""
    return {name: Supplier(value) for name, value in inputs.items()} if isinstance(inputs, Mapping) else {}


def _given_calls(subject: Any, inputs: Any) -> tuple[Call, ...] | None:
    if inputs is None or isinstance(inputs, Mapping):
        return None
    if not isinstance(inputs, list | tuple):
        raise TypeError(f"inputs must be a mapping of arguments, or a list of Call, got {inputs!r}")
    calls = []
    for each in inputs:
        call = each if isinstance(each, Call) else Call(tuple(each) if isinstance(each, tuple | list) else (each,))
        if not call.plans:
            raise ValueError(
                "inputs: a call must have a TensorPlan for each of its tensors, such as "
                f"TensorPlan((2, 3), torch.float32), got {each!r}"
            )
        if subject.fit(call) != call:
            raise ValueError(f"inputs: a call must have the shapes that shapes= says, got {each!r}")
        args, kwargs = call.build()
        try:
            with torch.no_grad():
                subject.expect(args, kwargs)
        except Exception as error:
            raise ValueError(f"inputs: the reference refuses {call!r}: {describe(error)}") from error
        calls.append(call)
    if not calls:
        raise ValueError("inputs must have one call at least, got none")
    return tuple(calls)


def _with_reproducer(violation: Violation, settings: Settings) -> Violation:
    """The violation with a program of its own that shows it."""
    call = violation.case
    subject: Any = settings.subject
    if not isinstance(call, Call):
        return violation
    arguments = subject.binding.arguments
    positional, keyword = _described(arguments, call.args), _described(call.kwargs, call.kwargs.values())
    given = [
        *(reproducer.expression(value, name) for name, value, _ in positional),
        *(f"{name}={reproducer.expression(value, name)}" for name, value, _ in keyword),
    ]
    op, reference = _expression(subject.op), _expression(subject.reference)
    method = getattr(subject, "method", None)  # of an object, which is made first
    if method is not None:
        op = f"obj.{method}"
    after = [f"expected = {reference}({', '.join(given)})"] if reference else ["# expected: what the reference gives"]
    shown = ["result", *(["expected"] if reference else [])]
    after += [f'print("{name}", {name}.dtype, {name}.device, {name}.stride(), {name})' for name in shown]
    wanted = [
        name
        for name, value, is_plan in (*positional, *keyword)
        if is_plan and (value.dtype.is_floating_point or value.dtype.is_complex)
    ]
    if violation.check in _OF_DERIVATIVES and wanted and op:
        functions = {"result": op, **({"expected": reference} if reference else {})}
        after += reproducer.derivatives(violation.check, functions, given, wanted)
    elif violation.check in _OF_SURROUNDINGS:
        after.append(f"# This is the call alone; the check {violation.check} makes it in other surroundings.")
    libraries, modules = subject.homes() if not (subject.qualified or "aten::").startswith("aten::") else ([], [])
    try:
        text = reproducer.python(
            call,
            op or f"operator  # {subject.name}",
            names=[argument.name for argument in arguments],
            device=violation.device,
            before=[
                *(f"torch.ops.load_library({library!r})" for library in libraries),
                *(f"import {module}" for module in modules),
                *(_made(subject.state, violation.device) if method is not None else ()),
            ],
            after=after,
        )
    except (ValueError, TypeError):  # a value that no program can write
        return violation
    entry = subject.entry if subject.overload is not None else ""
    return replace(violation, reproducer=text, op=entry, libraries=tuple(libraries))


def _made(state: State, device: str) -> list[str]:
    """Lines that make the object of a custom class."""
    call, names = Call(tuple(state.fields.values())), [*state.fields]
    program = reproducer.python(call, f"torch.classes.{state.name}", names=names, device=device, result="obj")
    return program.removeprefix("import torch\n").splitlines()


def _described(arguments: Iterable[Any], values: Iterable[Any]) -> list[tuple[str, Any, bool]]:
    """Name, value, and whether it stands in a variable of that name, of the arguments that are given."""
    return [
        (getattr(argument, "name", argument), value, isinstance(value, TensorPlan))
        for argument, value in zip(arguments, values, strict=False)
    ]


def _expression(function: Any) -> str:
    """How a program names a function, or an empty text."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{function}"
    name = getattr(function, "__name__", "")
    for owner, prefix in (
        (torch, "torch"),
        (torch.Tensor, "torch.Tensor"),
        (torch.nn.functional, "torch.nn.functional"),
    ):
        if getattr(owner, name, None) is function:
            return f"{prefix}.{name}"
    return ""
