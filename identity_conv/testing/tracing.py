"""Checks of what torch sees of an operator without running it: fakes, graphs, compiled code."""

from __future__ import annotations

import functools
import io
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._decomp.decompositions_for_jvp  # what forward mode imports, before a fork rather than after
import torch._subclasses.schema_check_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..wording import counted
from . import schema
from .call import Call, tensors_in
from .eager import difference
from .examine import Bench, describe, metadata
from .gradients import compared, widened
from .plan import TensorPlan
from .registry import stage


@functools.cache
def warm_up() -> None:
    """Has torch import what fakes need, a second and more: before a fork, so that no child does it again."""
    _symbolic(lambda args, _: torch.clone(*args), (torch.ones(2),), {})


def _calls(bench: Bench) -> Iterator[Call]:
    if bench.settings.given_calls is not None:
        yield from bench.settings.given_calls
        return
    allowed = bench.settings.dtypes
    first = next((each for each in (torch.float32, torch.int32) if each in allowed), allowed[0])
    plans = [
        TensorPlan((2, 3), first),
        TensorPlan((), first),
        TensorPlan((0,), first),
        TensorPlan((0, 3), first),
        TensorPlan((3, 0, 2), first),
        TensorPlan((2, 3), first, permutation=(1, 0)),
        TensorPlan((2, 3, 4), first, permutation=(1, 2, 0)),
        TensorPlan((2, 3), first, padding=(0, 2)),
        TensorPlan((2, 3), first, step=(1, 2)),
        TensorPlan((2, 3), first, expand=(0,)),
        TensorPlan((4, 3), first, windows=1),
        TensorPlan((2, 3, 4, 5), first, memory_format=torch.channels_last),
        TensorPlan((2, 3, 4, 5, 6), first, memory_format=torch.channels_last_3d),
        TensorPlan((1, 3), first),
        TensorPlan((7, 11, 13), first),
        TensorPlan((2, 1, 2, 1, 2, 1, 2, 3), first),
        TensorPlan((70_000,), first),
        TensorPlan((1,), first, unit_stride=7),
    ]
    plans += [TensorPlan((2, 3), dtype) for dtype in allowed if dtype is not first]
    if bench.full:
        plans += [TensorPlan((3, 2), dtype, permutation=(1, 0)) for dtype in allowed if dtype is not first]
        plans += [TensorPlan((0, 2), dtype) for dtype in allowed if dtype is not first]
    for plan in plans:
        yield bench.subject.call(plan)
    yield from bench.subject.numbered(TensorPlan((2, 3), first), schema.FINITE)


_REMEDY_LINES = 12  # that an error may have which says what to write


@stage("fake")
def fakes(bench: Bench, start: int) -> None:
    """What the fake says, held against the real output, or the reference's where the operator is wrong."""
    subject = bench.subject
    for number, call in enumerate(bench.each(_calls(bench), start)):
        args, kwargs = call.build(bench.device)
        try:
            bench.expected(args, kwargs)
            real = tensors_in(subject.run(args, kwargs))
        except Exception:
            continue  # refused, or told by `accepts`
        bench.about_to(call, 30.0)
        for elsewhere in (False, True):
            # Sizes of inputs are numbers; one that depends on data is a symbol.
            mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=ShapeEnv(), static_shapes=True)
            given: list[torch.Tensor] = [mode.from_tensor(each) for each in tensors_in((args, kwargs))]
            device = torch.device(bench.device)
            if elsewhere:
                if bench.device != "cpu" or number > 8:
                    continue
                # A fake of another device: what is fixed to one shows.
                device = torch.device("meta")
                given = [_elsewhere(each, device) for each in tensors_in((args, kwargs))]
            try:
                with mode:
                    faked = tensors_in(subject.run(*_filled(args, kwargs, given)))
            except Exception as error:
                if elsewhere:
                    continue  # the operator needn't have that device
                bench.violate("fake", f"none, or it fails: {describe(error, _REMEDY_LINES)}", call)
                return
            if len(faked) != len(real):
                bench.violate("fake", f"gives {counted(len(faked), 'tensor')}, the operator {len(real)}", call)
                return
            for mine, theirs in zip(faked, real, strict=True):
                if mine.device.type != device.type:
                    bench.violate("fake", f"says device {mine.device} for an input on {device}", call)
                    return
                wrong = list(_differs(mine, theirs))
                if not wrong and mine.is_conj() != theirs.is_conj():
                    wrong = [f"expected is_conj() {theirs.is_conj()}"]
                if wrong:
                    bench.violate("fake", f"says otherwise than the operator does: {wrong[0]}", call)
                    return
            if subject.aliases:
                continue
            storages = {each.untyped_storage()._cdata for each in given}
            if any(each.untyped_storage()._cdata in storages for each in faked):
                bench.violate("fake", "its output shares memory with an input", call)
                return


def _differs(fake: torch.Tensor, real: torch.Tensor) -> Iterator[str]:
    """What a fake says otherwise than the real tensor, whose sizes it may leave open where they depend on data."""
    sizes: dict[Any, int] = {}
    for dim, (said, size) in enumerate(zip(fake.shape, real.shape, strict=False)):
        if isinstance(said, torch.SymInt):
            sizes[said.node.expr] = size
            bounds = said.node.shape_env.bound_sympy(said.node.expr)
            if not bounds.lower <= size <= bounds.upper:
                yield f"expected size {size} of dimension {dim}, got one from {bounds.lower} to {bounds.upper}"
                return
    if sizes and fake.dim() == real.dim():

        def known(said: Any, otherwise: int) -> int:
            """The number, where the sizes tell it."""
            found = _node(said).expr.xreplace(sizes) if isinstance(said, torch.SymInt) else said
            return otherwise if getattr(found, "free_symbols", None) else int(found)

        shape, strides = map(known, fake.shape, real.shape), map(known, fake.stride(), real.stride())
        fake = torch.empty_strided(list(shape), list(strides), dtype=fake.dtype, device=fake.device)
    yield from (text for _, text in metadata(fake, real) if "device" not in text)


def _elsewhere(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _filled(args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    rest = iter(tensors)
    return torch.utils._pytree.tree_map(
        lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )


@stage("symbolic")
def symbolic(bench: Bench, start: int) -> None:
    """Fakes with symbolic sizes: what comes out depends on them, and says nothing of their value."""
    subject = bench.subject
    for call in bench.each(_of_distinct_sizes(bench), start, 30.0):
        args, kwargs = call.build(bench.device)
        static = subject.fixed_dimensions(call)
        try:
            expected = _symbolic(subject.expect, args, kwargs, static)
        except Exception:
            expected = None
        try:
            bench.about_to(call)
            subject.run(args, kwargs)
        except Exception:
            continue
        bench.about_to(call, 30.0)
        try:
            found = _symbolic(subject.run, args, kwargs, static)
        except Exception as error:
            bench.violate("symbolic", f"the fake fails with symbolic sizes: {describe(error, _REMEDY_LINES)}", call)
            return
        fixed, sizes, concrete = found
        before = expected[0] if expected else set()
        if new := fixed - before:
            bench.violate("symbolic", f"the fake fixes a size of the input: {', '.join(sorted(new))}", call)
            return
        if expected and not before and sizes != expected[1]:  # a reference that fixes one says it as a number
            bench.violate("symbolic", f"the fake's sizes are {sizes}, the reference's {expected[1]}", call)
            return
        if concrete and (not expected or not expected[2]):
            bench.violate("symbolic", f"the fake's sizes don't depend on the input's: {sizes}", call)
            return


def _of_distinct_sizes(bench: Bench) -> Iterator[Call]:
    """Calls whose tensors have another size in each dimension."""
    if bench.settings.given_calls is not None:
        yield from bench.settings.given_calls
        return
    allowed = bench.settings.dtypes
    dtype = torch.float32 if torch.float32 in allowed else allowed[0]
    for plan in (
        TensorPlan((7,), dtype),
        TensorPlan((7, 11), dtype),
        TensorPlan((7, 11), dtype, permutation=(1, 0)),
        TensorPlan((5, 7, 11), dtype),
        TensorPlan((5, 3, 7, 11), dtype),
        TensorPlan((8, 16), dtype),
    ):
        yield bench.subject.call(plan)


def _symbolic(
    function: Callable[..., Any], args: Any, kwargs: Any, static: Sequence[frozenset[int]] = ()
) -> tuple[set[str], list[str], bool]:
    """Which input sizes a call fixes, the sizes that come out, and whether all of those are plain numbers.

    Args:
        static: of each tensor, the dimensions whose size is a number.
    """
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    given: list[torch.Tensor] = []
    for index, each in enumerate(tensors_in((args, kwargs))):
        # Equal sizes get one symbol (DUCK): they are unequal within a tensor, and agree between tensors.
        kinds = [
            DimDynamic.STATIC if index < len(static) and dim in static[index] else DimDynamic.DUCK
            for dim in range(each.dim())
        ]
        dynamic: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        given.append(mode.from_tensor(each, symbolic_context=dynamic))
    symbols = {
        str(_node(size).expr): f"dimension {dim}"
        for each in given[:1]
        for dim, size in enumerate(each.shape)
        if isinstance(size, torch.SymInt)
    }
    with mode:
        outputs = tensors_in(function(*_filled(args, kwargs, given)))
    replaced = {str(old): new for old, new in environment.replacements.items()}
    fixed = {f"{symbols[old]} to {new}" for old, new in replaced.items() if old in symbols and new.is_number}
    # A guard of one symbol alone that compares it with a number: a size is asked for its value.
    for guard in environment.guards:
        names = {str(each) for each in guard.expr.free_symbols}
        if len(names) == 1 and names <= symbols.keys() and type(guard.expr).__name__ == "Equality":
            fixed.add(f"{symbols[names.pop()]} by {guard.expr}")
    sizes = [str(tuple(_simplified(environment, size) for size in each.shape)) for each in outputs]
    concrete = all(not isinstance(size, torch.SymInt) for each in outputs for size in each.shape)
    return fixed, sizes, concrete and bool(symbols) and bool(outputs)


def _node(size: Any) -> Any:
    return size.node


def _simplified(environment: ShapeEnv, size: Any) -> str:
    return str(environment.simplify(_node(size).expr)) if isinstance(size, torch.SymInt) else str(size)


@stage("opcheck", quick=False)
def opcheck(bench: Bench, start: int) -> None:
    """torch's own check, on samples of several layouts."""
    subject = bench.subject
    if subject.overload is None or subject.qualified is None or subject.qualified.startswith("aten::"):
        return
    allowed = bench.settings.dtypes
    dtype = next((each for each in (torch.float32, torch.float64) if each in allowed), None)
    if dtype is None:
        return
    calls = (
        list(bench.settings.given_calls)[:3]
        if bench.settings.given_calls is not None
        else [
            subject.call(TensorPlan((2, 3), dtype, grad="leaf")),
            subject.call(TensorPlan((4, 3), dtype, permutation=(1, 0), grad="leaf")),
            subject.call(TensorPlan((3, 4), dtype, padding=(0, 2))),
            subject.call(TensorPlan((0, 3), dtype)),
        ]
    )
    for call in calls:
        bench.about_to(call, 60.0)
        args, kwargs = call.build(bench.device)
        try:
            subject.expect(args, kwargs)
        except Exception:
            continue
        tests = [
            each
            for each in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
            if each != "test_autograd_registration" or not bench.settings.skip & {"grad"}
        ]
        results = torch.library.opcheck(subject.overload, args, kwargs, test_utils=tests, raise_exception=False)
        for test, result in results.items():
            if result != "SUCCESS":
                bench.violate(
                    "opcheck", f"{test}: {describe(result) if isinstance(result, BaseException) else result}", call
                )
                return


@stage("compile", quick=False)
def compiled(bench: Bench, start: int) -> None:
    """torch.compile, traced whole: values and gradients, with static and with dynamic sizes."""
    subject = bench.subject
    torch._inductor.config.compile_threads = 1  # a pool of this process's may be another's
    dtype = next(
        (each for each in (torch.float32, torch.float64) if each in bench.settings.dtypes), bench.settings.dtypes[0]
    )
    floating = dtype.is_floating_point
    runs: list[tuple[str, bool | None, list[Call]]]
    if bench.settings.given_calls is not None:
        calls = bench.settings.given_calls[:2]
        runs = [(backend, None, [call]) for backend in ("aot_eager", "inductor") for call in calls]
    else:
        sizes = [subject.call(TensorPlan(shape, dtype, seed=n)) for n, shape in enumerate(((5, 7), (6, 7), (5, 9)))]
        permuted = subject.call(TensorPlan((4, 6), dtype, permutation=(1, 0)))
        padded = subject.call(TensorPlan((4, 6), dtype, padding=(0, 3)))
        channels_last = subject.call(TensorPlan((2, 3, 4, 5), dtype, memory_format=torch.channels_last))
        runs = [
            ("aot_eager", None, sizes),
            ("aot_eager", False, [permuted, padded]),
            ("aot_eager", None, [channels_last]),
            ("inductor", True, sizes[:2]),  # it compiles C++ or Triton, seconds for each graph
            ("inductor", False, [permuted]),
        ]
    for backend, dynamic, group in runs:
        function, _ = subject.of_tensors(group[0])
        torch._dynamo.reset()  # one function's code is traced again and again
        traced = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
        for call in group:
            bench.about_to(call, 120.0)
            tensors = [plan.build(bench.device) for plan in call.plans]
            others = [plan.build(bench.device) for plan in call.plans]
            wants_grad = floating and not bench.settings.skip & {"grad"}
            if wants_grad:
                for each in (*tensors, *others):
                    if each.dtype.is_floating_point:
                        each.requires_grad_()
            try:
                eager = tensors_in(function(*others))
            except Exception:
                continue
            try:
                found = tensors_in(traced(*tensors))
            except Exception as error:
                bench.violate("compile", f"{backend}: raised {describe(error)}", call)
                return
            if text := _results_differ(bench, [*found, *tensors], [*eager, *others]):
                bench.violate("compile", f"{backend}: {text}", call)
                return
            if not wants_grad or not any(each.requires_grad for each in eager):
                continue
            try:
                wanted = _gradients_of_squares(eager, others)
            except Exception:
                continue
            try:
                gradients = _gradients_of_squares(found, tensors)
            except Exception as error:
                bench.violate("compile", f"{backend}: backward raised {describe(error)}", call)
                return

            def widely(function: Callable[..., Any] = function, others: list[torch.Tensor] = others) -> Any:
                wide = [each.detach().requires_grad_(each.requires_grad) for each in widened(others)]
                return _gradients_of_squares(tensors_in(function(*wide)), wide)

            if text := compared(bench, gradients, wanted, "the gradient", widely=widely):
                bench.violate("compile", f"{backend}: {text}", call)
                return


def _gradients_of_squares(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    total = torch.stack([(each * each).sum() for each in outputs if each.requires_grad]).sum()
    return torch.autograd.grad(total, [each for each in inputs if each.requires_grad], allow_unused=True)


def _results_differ(bench: Bench, found: list[torch.Tensor], eager: list[torch.Tensor]) -> str | None:
    if len(found) != len(eager):
        return f"gives {counted(len(found), 'tensor')}, eager {len(eager)}"
    for mine, theirs in zip(found, eager, strict=True):
        if wrong := [text for _, text in metadata(mine, theirs)]:
            return wrong[0]
        if text := bench.compare(mine, theirs):
            return text
    return None


class _Module(torch.nn.Module):
    """A function as a module."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.inner(*tensors)


@stage("export", quick=False)
def exported(bench: Bench, start: int) -> None:
    """torch.export with free sizes; the program, and the same one from its file, on other sizes and layouts."""
    subject = bench.subject
    dtype = next((each for each in (torch.float32,) if each in bench.settings.dtypes), bench.settings.dtypes[0])
    if bench.settings.given_calls is not None:
        samples, others, free = list(bench.settings.given_calls[:1]), list(bench.settings.given_calls[:1]), False
    else:
        samples = [subject.call(TensorPlan((5, 7), dtype))]
        others = [subject.call(TensorPlan(shape, dtype, seed=3)) for shape in ((5, 7), (6, 11), (2, 3))]
        free = True
    call = samples[0]
    bench.about_to(call, 120.0)
    tensors = [plan.build(bench.device) for plan in call.plans]
    function, reference = subject.of_tensors(call)

    def export(inner: Callable[..., Any]) -> Any:
        auto = tuple(dict.fromkeys(range(each.dim()), torch.export.Dim.AUTO) for each in tensors)
        return torch.export.export(
            _Module(inner), tuple(tensors), dynamic_shapes=(auto,) if free else None, strict=False
        )

    try:
        export(reference)
        function(*tensors)
    except Exception:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = export(function)
        except Exception as error:
            bench.violate("export", f"raised {describe(error)}", call)
            return
        try:
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            loaded = torch.export.load(file)
        except Exception as error:
            bench.violate("export", f"saving and loading raised {describe(error)}", call)
            return
        for which, each in (("the program", program), ("the program from its file", loaded)):
            for other in others:
                bench.about_to(other, 120.0)
                given, again = ([plan.build(bench.device) for plan in other.plans] for _ in range(2))
                try:
                    found = tensors_in(each.module()(*given))
                except Exception as error:
                    bench.violate("export", f"{which} raised {describe(error)}", other)
                    return
                if text := _results_differ(bench, [*found, *given], [*tensors_in(function(*again)), *again]):
                    bench.violate("export", f"{which}: {text}", other)
                    return


@stage("aoti", tiers=("aoti",))
def packaged(bench: Bench, start: int) -> None:
    """One package, with free sizes where calls are drawn, fed many tensors, in Python and in the program without."""
    subject = bench.subject
    if subject.writes:
        return
    from .. import package, targets

    torch._inductor.config.compile_threads = 1
    call, others, free = _to_package(bench)
    bench.about_to(call, 600.0)
    tensors = tuple(plan.build(bench.device) for plan in call.plans)
    function, _ = subject.of_tensors(call)
    auto = tuple(dict.fromkeys(range(each.dim()), torch.export.Dim.AUTO) for each in tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        try:
            program = torch.export.export(
                _Module(function), tensors, dynamic_shapes=(auto,) if free else None, strict=False
            )
            package.compile_package(program, path)
            loaded = package.load_package(path)
        except Exception as error:
            bench.violate("aoti", f"no package is made: {describe(error)}", call)
            return
        runner = targets.program().build()
        for other in others:
            bench.about_to(other, 120.0)
            given = [plan.build(bench.device) for plan in other.plans]
            try:
                eager = tensors_in(function(*given))
            except Exception:  # told by `accepts`
                continue
            for where, run in (
                ("in Python", lambda: tensors_in(loaded(*given))),  # noqa: B023
                ("in the program without Python", lambda: _without_python(runner, path, given)),  # noqa: B023
            ):
                try:
                    found = run()
                except Exception as error:
                    bench.violate("aoti", f"the package {where} raised {describe(error)}", other)
                    return
                # Its strides are those of the tensors that it was compiled for.
                if text := difference(bench, [each.to(bench.device) for each in found], eager):
                    bench.violate("aoti", f"the package {where}: {text}", other)
                    return


def _to_package(bench: Bench) -> tuple[Call, list[Call], bool]:
    """The call that a package is compiled for, those that it is fed, and whether its sizes are free."""
    subject, given = bench.subject, bench.settings.given_calls
    if given is not None:
        same = [plan.shape for plan in given[0].plans]
        return given[0], [each for each in given if [plan.shape for plan in each.plans] == same], False
    allowed = bench.settings.dtypes
    dtype = torch.float32 if torch.float32 in allowed else allowed[0]
    fields: tuple[dict[str, Any], ...] = (
        {}, {"permutation": (1, 0)}, {"padding": (0, 3)}, {"step": (2, 1)}, {"offset": 1}, {"expand": (0,)},
    )  # fmt: skip
    shapes = ((5, 7), (2, 3), (64, 33), (300, 517))
    plans = [TensorPlan(shape, dtype, seed=3, **each) for shape in shapes for each in fields]
    return subject.call(TensorPlan((5, 7), dtype)), [subject.call(plan) for plan in plans], True


def _without_python(runner: Path, package: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What identity-conv-run gives for inputs from files, with no environment.

    Raises:
        RuntimeError: it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        command: list[Any] = [runner, package]
        for index, each in enumerate(inputs):
            torch.save(each.cpu(), f"{folder}/x{index}.pt")
            command += ["--input", f"{folder}/x{index}.pt"]
        command += ["--output", f"{folder}/y.pt"]
        done = subprocess.run(command, capture_output=True, text=True, env={}, check=False, timeout=100)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no text"])[-1])
        return tensors_in(torch.load(f"{folder}/y.pt"))
