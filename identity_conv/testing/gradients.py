"""Checks of derivatives and transforms against the reference's own."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..wording import counted
from . import schema
from .call import Call, tensors_in
from .compare import close
from .examine import Bench, describe
from .plan import TensorPlan
from .registry import BOTH, stage

#: What is computed again in which wider dtype.
_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
#: How many times the error of the reference, at its worst, another order of operations may make.
_TIMES_THE_REFERENCES = 8
#: Of the largest number, how far off the reference may be for its error to excuse another.
_LARGEST_EXCUSED_ERROR = 0.01


def _derivatives_differ(
    bench: Bench,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    *,
    terms: float = 1,
    cancels: bool = False,
    widely: Callable[[], torch.Tensor | None] = lambda: None,
) -> str | None:
    """Where they differ by more than orders of summation explain, by more than the outputs may, and by rounding.

    Args:
        terms: of about 1, that each of them is the sum of.
        cancels: they are sums of terms as large as the largest of them, which a narrow dtype has rounded.
        widely: what `theirs` is in float64, which shows how far rounding has led it.
    """
    if not (mine.is_floating_point() or mine.is_complex()):  # the tangent of a truth value
        return bench.compare(mine, theirs)
    eps = torch.finfo(mine.dtype).eps
    if mine.dtype not in (torch.float16, torch.bfloat16):
        text = close(64 * eps, 64 * eps * math.sqrt(terms))(mine, theirs)
    elif cancels and (finite := theirs[theirs.isfinite()]).numel():
        text = close(8 * eps, 8 * eps * max(1.0, float(finite.abs().max())))(mine, theirs)
    else:
        text = close()(mine, theirs)
    if text and bench.compare(mine, theirs) and not _is_as_near(mine, theirs, widely()):
        return text
    return None


def _of(widely: Callable[[], Sequence[torch.Tensor | None]] | None, index: int) -> torch.Tensor | None:
    """One of the tensors that `widely` gives; None where it can't."""
    try:
        return widely()[index] if widely else None
    except Exception:  # such as where float64 is refused
        return None


def _is_as_near(mine: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor | None) -> bool:
    """Whether `mine` is about as near to the truth as `theirs` is, each at its worst, and that is near."""
    if truth is None or truth.shape != theirs.shape or truth.dtype == theirs.dtype:
        return False
    finite = mine.isfinite() & theirs.isfinite() & truth.isfinite()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if not finite.any() or not (same | finite).all():
        return False
    mine_off, theirs_off = (float((each - truth)[finite].abs().max()) for each in (mine, theirs))
    excused = theirs_off <= _LARGEST_EXCUSED_ERROR * float(truth[finite].abs().max())
    return excused and mine_off <= _TIMES_THE_REFERENCES * theirs_off


def widened(what: Any) -> Any:
    """Arguments with what they have of float32 and complex64 in float64 and complex128."""
    wide = {narrow: wide for wide, narrow in _NARROW.items()}
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.to(wide.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf, what
    )


def _floating(bench: Bench) -> list[torch.dtype]:
    """Dtypes to differentiate in, double first; at tier quick one."""
    order = (
        torch.float64, torch.float32, torch.complex128, torch.bfloat16, torch.float16, torch.complex64,
    )  # fmt: skip
    found = [dtype for dtype in order if dtype in bench.settings.dtypes]
    return found if bench.full else found[:1]


def _calls(bench: Bench) -> Iterator[Call]:
    """Calls whose floating inputs are leaves."""
    if bench.settings.given_calls is not None:
        for call in bench.settings.given_calls:
            if any(plan.dtype.is_floating_point or plan.dtype.is_complex for plan in call.plans):
                yield call
        return
    for dtype in _floating(bench):
        plans = [TensorPlan((2, 3), dtype), TensorPlan((4, 3), dtype, permutation=(1, 0))]
        if bench.full:
            plans += [
                TensorPlan((), dtype),
                TensorPlan((0, 2), dtype),
                TensorPlan((7,), dtype),
                TensorPlan((2, 1, 3), dtype),
                TensorPlan((5, 4), dtype, step=(1, 2)),
                TensorPlan((3, 4), dtype, expand=(0,)),
                TensorPlan((4, 3), dtype, windows=1),
                TensorPlan((2, 3, 4, 5), dtype, memory_format=torch.channels_last),
                TensorPlan((3, 700), dtype),
            ]
            if dtype is torch.float32:
                plans += [TensorPlan((70_001,), dtype), TensorPlan((2,) * 8, dtype)]
            if dtype.is_complex:
                plans.append(TensorPlan((4, 3), dtype, conj=True))
        for plan in plans:
            yield bench.subject.call(plan)
        # With a factor of 0, say, a right gradient may be NaN.
        yield from filter(bench.subject.tells, bench.subject.numbered(TensorPlan((2, 3), dtype), schema.ORDINARY))
        yield from map(bench.subject.fit, _broadcast(bench.subject.call(TensorPlan((4, 3), dtype))))


def _at_zero(bench: Bench) -> Iterator[Call]:
    """Calls with 0 and -0, where many functions have a kink."""
    for dtype in [] if bench.settings.given_calls is not None else _floating(bench):
        if not dtype.is_complex:
            yield bench.subject.call(TensorPlan((2, 3), dtype, cells=((0, "0"), (1, "-0"))))


def _broadcast(call: Call) -> Iterator[Call]:
    """Calls in which one of several tensors is broadcast to the others, so that its gradient is a sum."""
    plans = call.plans
    for at in range(len(plans)) if len(plans) > 1 else ():
        for shape in ((3,), (4, 1), ()):
            smaller = TensorPlan(shape, plans[at].dtype, seed=plans[at].seed)
            yield call.replace((*plans[:at], smaller, *plans[at + 1 :]))


def _leaves(args: Any, kwargs: Any, only: int | None = None) -> list[torch.Tensor]:
    """The floating inputs, or `only` one of them, which want gradients from now on."""
    found = [each for each in tensors_in((args, kwargs)) if each.dtype.is_floating_point or each.dtype.is_complex]
    if only is not None:
        found = found[only : only + 1]
    for each in found:
        each.requires_grad_()
    return found


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    return [each for each in tensors_in(outputs) if each.requires_grad]


def _incoming(output: torch.Tensor, kind: str, *, wide: bool = False) -> torch.Tensor:
    """A gradient for `output`, laid out in one way or another.

    Args:
        wide: it was :func:`widened`: the numbers of the narrower dtype.
    """
    shape, dtype, device = tuple(output.shape), output.dtype, output.device
    if wide:
        dtype = _NARROW.get(dtype, dtype)
    layouts: dict[str, dict[str, Any]] = {
        "dense": {},
        "permuted": {"permutation": tuple(reversed(range(len(shape))))},
        "padded": {"padding": (0,) * (len(shape) - 1) + (2,)} if shape else {},
        "stepped": {"step": (2,) * len(shape)},
        "offset": {"offset": 1},
        "expanded": {"expand": tuple(range(len(shape)))},
        "rows expanded": {"expand": (0,)} if shape else {},
        "negated": {"neg": True},
        "conjugated": {"conj": dtype.is_complex},
    }
    return TensorPlan(shape, dtype, seed=77, **layouts[kind]).build(device).to(output.dtype)


_KINDS = (
    "dense", "permuted", "padded", "stepped", "offset", "expanded", "rows expanded", "negated", "conjugated",
)  # fmt: skip


def compared(
    bench: Bench,
    got: Any,
    want: Any,
    what: str,
    *,
    out_of: Sequence[torch.Tensor] = (),
    cancels: bool = False,
    widely: Callable[[], Sequence[torch.Tensor | None]] | None = None,
) -> str | None:
    """Where gradients differ, each a tensor or None.

    Args:
        out_of: the gradients that they are sums of.
        widely: gives what is wanted in float64.
    """
    summed = sum(each.numel() for each in out_of)
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        where = f"{what} of input {index}" if len(want) > 1 else what
        if theirs is None or mine is None:
            left = mine if theirs is None else theirs
            if left is not None and bool((left.detach() != 0).any()):
                return (
                    f"{where}: expected {'none' if theirs is None else 'one'}, got {'none' if mine is None else 'one'}"
                )
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{where}: expected {tuple(theirs.shape)} of {theirs.dtype}, got {tuple(mine.shape)} of {mine.dtype}"
        terms = max(1.0, summed / max(1, theirs.numel()))
        truth = functools.partial(_of, widely, index)
        if text := _derivatives_differ(bench, mine, theirs, terms=terms, cancels=cancels, widely=truth):
            return f"{where}: {text}"
    return None


@stage("grad", of=BOTH)
def gradients(bench: Bench, start: int) -> None:
    """First derivatives, by backward."""
    subject = bench.subject
    if subject.writes or not (_floating(bench) or bench.settings.given_calls):
        return
    for call in bench.each(_calls(bench), start, 20.0):  # many gradients for each
        several = len(_leaves(*call.build("meta")))
        for only in (None, *range(several if several > 1 else 0)):
            if text := _first_order(bench, call, only):
                bench.violate("grad", text if only is None else f"{text}; no other input requires grad", call)
                return
    bench.index = 1 << 20
    if start <= bench.index:
        for call in _at_zero(bench):
            bench.about_to(call)
            if text := _first_order(bench, call, where_finite=True):
                bench.tell(f"at 0 and -0, where a function with a kink has several gradients, another one: {text}")
                break
        _side_conditions(bench)


def _first_order(bench: Bench, call: Call, only: int | None = None, *, where_finite: bool = False) -> str | None:
    """Where the operator's gradients differ from the reference's.

    Args:
        only: the one floating input that requires grad; by default all do.
        where_finite: look only if the reference has a gradient and it is finite.
    """
    subject = bench.subject
    args, kwargs = call.build(bench.device)
    theirs = _leaves(args, kwargs, only)
    if not theirs:
        return None
    try:
        expected_outputs = tensors_in(bench.subject.expect(args, kwargs))
    except Exception:
        return None
    wanted = [each for each in expected_outputs if each.requires_grad]
    kinds = (_KINDS[:1] if only is not None else _KINDS if bench.full else _KINDS[:6]) if wanted else ()
    incoming_of = {kind: [_incoming(each, kind) for each in wanted] for kind in kinds}
    expected_of: dict[str, Any] = {
        kind: torch.autograd.grad(wanted, theirs, incoming, retain_graph=True, allow_unused=True)
        for kind, incoming in incoming_of.items()
    }
    there = [each for expected in expected_of.values() for each in expected if each is not None]
    if where_finite and not (wanted and all(bool(each.isfinite().all()) for each in there)):
        return None
    args, kwargs = call.build(bench.device)
    mine = _leaves(args, kwargs, only)
    try:
        outputs = subject.run(args, kwargs)
    except Exception as error:
        return f"raised {describe(error)} for inputs that require grad"
    if not wanted:
        return _numerically(bench, call) if only is None else None
    if len(tensors_in(outputs)) != len(expected_outputs):
        return None  # told elsewhere
    pairs = list(zip(tensors_in(outputs), expected_outputs, strict=True))
    got = [output for output, right in pairs if right.requires_grad]
    if without := [each for each in got if not each.requires_grad]:
        return (
            f"the reference gives {counted(len(wanted), 'output')} that can be differentiated, the operator "
            f"{len(got) - len(without)}"
        )
    # A node marks all outputs alike; those that don't depend on the input have no gradient, or one of zeros.
    for index, (output, right) in enumerate(pairs):
        if output.requires_grad and not right.requires_grad:
            alone = _incoming(output, "dense")
            found = torch.autograd.grad(output, mine, alone, retain_graph=True, allow_unused=True)
            if text := compared(bench, found, [None] * len(mine), f"the gradient of output {index}"):
                return text
    with torch.no_grad():
        for output, right in zip(got, wanted, strict=True):
            if output.shape != right.shape:
                return None  # told elsewhere
            if text := bench.compare(output, right):
                bench.violate("values", f"{text}; the input requires grad", call)
    for kind, incoming in incoming_of.items():
        expected = expected_of[kind]
        before = [each.clone() for each in incoming]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = torch.autograd.grad(got, mine, incoming, retain_graph=True, allow_unused=True)
            except Exception as error:
                return f"backward raised {describe(error)}"
        if any("autograd kernel was not registered" in str(each.message) for each in caught):
            return "no autograd kernel is registered: what backward gives is an accident"
        if text := compared(bench, found, expected, "the gradient", out_of=incoming):
            return f"{text}; the gradient that comes in is {kind}"
        with torch.no_grad():
            if any(
                not torch.equal(now, was) and not bool(was.isnan().any())
                for now, was in zip(incoming, before, strict=True)
            ):
                return f"backward changed the gradient that came in, which was {kind}"
        again = torch.autograd.grad(got, mine, incoming, retain_graph=True, allow_unused=True)
        if text := compared(bench, again, expected, "the gradient", out_of=incoming):
            return f"{text}; in a second backward through the same graph"
    if bench.full and got[0].numel():
        batch = [torch.stack([each, 2 * each]) for each in (_incoming(each, "dense") for each in wanted)]
        try:
            found = torch.autograd.grad(got, mine, batch, retain_graph=True, allow_unused=True, is_grads_batched=True)
        except Exception as error:
            bench.tell(f"is_grads_batched: refused by torch: {describe(error)[:120]}")
        else:
            expected = torch.autograd.grad(wanted, theirs, batch, allow_unused=True, is_grads_batched=True)
            if text := compared(bench, found, expected, "the gradient", out_of=batch):
                return f"{text}; with is_grads_batched"
    return None


def _numerically(bench: Bench, call: Call) -> str | None:
    """Against finite differences, where the reference has no gradient."""
    args, kwargs = call.build(bench.device)
    leaves = _leaves(args, kwargs)
    if (
        any(each.dtype not in (torch.float64, torch.complex128) for each in leaves)
        or sum(map(torch.numel, leaves)) > 100
        or any(plan.expand or plan.windows for plan in call.plans)  # one step would be of several elements
    ):
        return None
    outputs = tensors_in(bench.subject.run(args, kwargs))
    if not any(each.dtype.is_floating_point or each.dtype.is_complex for each in outputs):
        return None
    if not _differentiable(outputs):
        return None if _is_flat(bench, call) else "the output doesn't require grad though an input does"
    try:
        torch.autograd.gradcheck(lambda *_: tuple(_differentiable(bench.subject.run(args, kwargs))), leaves)
    except Exception as error:
        return f"gradcheck: {describe(error)}"
    return None


def _is_flat(bench: Bench, call: Call) -> bool:
    """Whether the reference gives the same a step further, so that its gradient is nothing."""
    tensors = [plan.build(bench.device) for plan in call.plans]
    moved = [each + 1e-3 if each.dtype.is_floating_point or each.dtype.is_complex else each for each in tensors]
    here, there = (tensors_in(bench.subject.expect(*call.fill(each, bench.device))) for each in (tensors, moved))
    return all(map(torch.equal, here, there))


class _Nothing(torch.autograd.Function):
    """Passes no gradient on: what comes before gets an undefined one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def _side_conditions(bench: Bench) -> None:
    """Undefined gradients, and no graph where none is wanted."""
    subject = bench.subject
    for call in _calls(bench):
        bench.about_to(call)
        args, kwargs = call.build(bench.device)
        leaves = _leaves(args, kwargs)
        try:
            if not leaves or not _differentiable(subject.expect(args, kwargs)):
                continue
        except Exception:
            continue
        outputs = _differentiable(subject.run(args, kwargs))
        if not outputs:
            return
        try:
            # Something of it must have a gradient, for the graph to be run.
            anchor = sum(each.abs().sum() for each in leaves)
            (anchor + sum(_Nothing.apply(each).abs().sum() for each in outputs)).backward()
        except Exception as error:
            bench.violate("grad", f"backward raised {describe(error)} for an undefined gradient", call)
            return
        args, kwargs = call.build(bench.device)
        if any(each.requires_grad for each in tensors_in(subject.run(args, kwargs))):
            bench.violate("grad", "an output requires grad though no input does", call)
            return
        _leaves(args, kwargs)
        with torch.no_grad():  # a view of a leaf does there
            if len(_differentiable(subject.run(args, kwargs))) > len(_differentiable(subject.expect(args, kwargs))):
                bench.violate("grad", "an output requires grad under torch.no_grad()", call)
                return
        if not bench.full:
            return


@stage("second_order", of=BOTH)
def second_order(bench: Bench, start: int) -> None:
    """Derivatives of derivatives, with respect to the inputs and to the gradient that comes in."""
    if bench.subject.writes:
        return
    for call in bench.each((each for each in _calls(bench) if all(plan.numel <= 5000 for plan in each.plans)), start):

        def twice(function: Callable[..., Any], call: Call = call, *, widely: bool = False) -> Any:
            args, kwargs = call.build(bench.device)
            if widely:
                args, kwargs = widened((args, kwargs))
            leaves = _leaves(args, kwargs)
            outputs = _differentiable(function(args, kwargs))
            if not outputs:
                return None
            incoming = [_incoming(each, "dense", wide=widely).requires_grad_() for each in outputs]
            # Through a square, so that the second derivative isn't nothing.
            squares = [each * each for each in outputs]
            first = torch.autograd.grad(squares, leaves, incoming, create_graph=True, allow_unused=True)
            total = [each for each in first if each is not None and each.requires_grad]
            if not total:
                return [
                    *(None if each is None else each.detach() for each in first),
                    *[None] * (len(leaves) + len(incoming)),
                ]
            weights = [_incoming(each, "permuted", wide=widely) for each in total]
            second = torch.autograd.grad(total, [*leaves, *incoming], weights, allow_unused=True)
            return [*(None if each is None else each.detach() for each in first), *second]

        try:
            expected = twice(bench.subject.expect)
        except Exception:
            continue
        if expected is None:
            continue
        try:
            found = twice(bench.subject.run)
        except Exception as error:
            bench.violate("second_order", f"raised {describe(error)}", call)
            return
        if found is None:
            return  # `grad` tells
        truth = functools.cache(functools.partial(twice, bench.subject.expect, widely=True))
        if text := compared(bench, found, expected, "the second derivative", cancels=True, widely=truth):
            bench.violate("second_order", text, call)
            return


@stage("forward_ad", of=BOTH)
def forward_mode(bench: Bench, start: int) -> None:
    """Derivatives by dual numbers."""
    if bench.subject.writes:
        return
    noted = False
    for call in bench.each(_calls(bench), start):

        def tangents(function: Callable[..., Any], kind: str, call: Call = call) -> list[torch.Tensor | None]:
            args, kwargs = call.build(bench.device)
            with forward_ad.dual_level():
                given = {
                    id(each): forward_ad.make_dual(each, _incoming(each, kind))
                    for each in tensors_in((args, kwargs))
                    if each.dtype.is_floating_point or each.dtype.is_complex
                }
                args, kwargs = torch.utils._pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), (args, kwargs))
                duals = [forward_ad.unpack_dual(each) for each in tensors_in(function(args, kwargs))]
                return [None if each.tangent is None else each.tangent.clone() for each in duals]

        for kind in ("dense", "permuted", "expanded") if bench.full else ("dense",):
            try:
                expected = tangents(bench.subject.expect, kind)
            except Exception:
                break
            try:
                found = tangents(bench.subject.run, kind)
            except (NotImplementedError, RuntimeError) as error:
                if not noted:
                    bench.tell(f"refused by torch: {describe(error)[:160]}")
                noted = True
                break
            lost = [theirs is not None and mine is None for mine, theirs in zip(found, expected, strict=True)]
            if any(lost):
                if bench.subject.autograd_in_python:
                    if not noted:
                        bench.tell(
                            "torch has no forward mode for gradients registered from Python: it loses the tangent"
                        )
                    noted = True
                    break
                bench.violate("forward_ad", "the output has no tangent though the input has one", call)
                return
            if text := compared(bench, found, expected, "the tangent"):
                bench.violate("forward_ad", f"{text}; the tangent that comes in is {kind}", call)
                return


@stage("func", of=BOTH)
def transforms(bench: Bench, start: int) -> None:
    """torch.func: grad, vjp, jvp, jacrev, jacfwd, hessian, and vmap over grad."""
    subject = bench.subject
    if subject.writes:
        return
    dtype = next((each for each in _floating(bench) if not each.is_complex), None)
    given = bench.settings.given_calls
    calls = list(given) if given is not None else [subject.call(TensorPlan((2, 3), dtype))] if dtype is not None else []
    for call in calls:
        for place, plan in enumerate(call.plans):
            if plan.dtype.is_floating_point and plan.numel <= 100 and not _transformed(bench, call, place):
                return


def _transformed(bench: Bench, call: Call, place: int) -> bool:
    """Whether every transform with respect to one tensor of a call gives what the reference gives."""
    subject = bench.subject
    op, reference = subject.of_tensors(call)
    tensors = [plan.build(bench.device) for plan in call.plans]
    x = tensors[place]
    tangent = _incoming(x, "permuted")

    def squared(function: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def total(t: torch.Tensor) -> torch.Tensor:
            outputs = tensors_in(function(*tensors[:place], t, *tensors[place + 1 :]))
            return sum((each * each).sum() for each in outputs if each.dtype.is_floating_point)  # type: ignore[return-value]

        return total

    def plainly(function: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: tensors_in(function(*tensors[:place], t, *tensors[place + 1 :]))[0]

    forward = ("jvp", "jacfwd", "hessian")
    func = torch.func
    looks: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "grad": lambda f: func.grad(squared(f))(x),
        "vjp": lambda f: func.vjp(plainly(f), x)[1](tangent if plainly(f)(x).shape == tangent.shape else plainly(f)(x))[
            0
        ],
        "jvp": lambda f: func.jvp(plainly(f), (x,), (tangent,))[1],
        "jacrev": lambda f: func.jacrev(plainly(f))(x),
        "jacfwd": lambda f: func.jacfwd(plainly(f))(x),
        "hessian": lambda f: func.hessian(squared(f))(x),
        **({"vmap(grad)": lambda f: func.vmap(func.grad(squared(f)), in_dims=1)(x)} if x.dim() > 1 else {}),
        "grad(grad)": lambda f: func.grad(lambda t: func.grad(squared(f))(t).sin().sum())(x),
    }
    if not bench.full:
        looks = {name: look for name, look in looks.items() if name in ("grad", "jvp", "vmap(grad)")}
    for name, look in looks.items():
        bench.about_to(call, 20.0)
        try:
            expected = look(reference)
        except Exception:
            continue
        try:
            found = look(op)
        except Exception as error:
            bench.tell(f"{name}: refused by torch: {describe(error)[:160]}")
            continue
        if text := compared(bench, [found], [expected], f"func.{name}"):
            if name in forward and subject.autograd_in_python:
                bench.tell(f"{name}: torch has no forward mode for gradients registered from Python; it gives zeros")
                continue
            bench.violate("func", text, call)
            return False
    return True


@stage("vmap")
def batched(bench: Bench, start: int) -> None:
    """torch.vmap over every dimension, of some of the tensors, and nested."""
    subject = bench.subject
    if subject.writes:
        return
    for call in bench.each(_to_batch(bench), start, 20.0):
        op, reference = subject.of_tensors(call)
        tensors = [plan.build(bench.device) for plan in call.plans]
        for dims in _dims([len(plan.shape) for plan in call.plans]):
            bench.about_to(call, 20.0)

            def mapped(function: Callable[..., Any], dims: Any = dims, tensors: Any = tensors) -> Any:
                for of_level in dims:
                    function = torch.vmap(function, in_dims=of_level)
                return function(*tensors)

            try:
                expected = tensors_in(mapped(reference))
            except Exception:
                continue
            try:
                found = tensors_in(mapped(op))
            except Exception as error:
                bench.tell(f"refused by torch: {describe(error)[:160]}")
                return
            for mine, theirs in zip(found, expected, strict=True):
                if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                    text: str | None = f"expected {tuple(theirs.shape)}, got {tuple(mine.shape)}"
                else:
                    text = bench.compare(mine, theirs)
                if text:
                    shown = dims[0] if len(dims) == 1 else f"{dims[0]} within {dims[1]}"
                    bench.violate("vmap", f"in_dims={shown}: {text}", call)
                    return


def _to_batch(bench: Bench) -> Iterator[Call]:
    if bench.settings.given_calls is not None:
        yield from bench.settings.given_calls
        return
    allowed = bench.settings.dtypes
    dtypes = [d for d in (torch.float32, torch.int64, torch.bfloat16) if d in allowed][: 3 if bench.full else 1]
    for dtype in dtypes or [allowed[0]]:
        plans = [
            TensorPlan((3, 4, 5), dtype),
            TensorPlan((3, 4, 5), dtype, permutation=(2, 0, 1)),
            TensorPlan((3, 4, 5), dtype, expand=(0,)),
            TensorPlan((1, 2, 3), dtype),
        ]
        if bench.full:
            plans += [
                TensorPlan((3, 4, 5), dtype, step=(2, 1, 2)),
                TensorPlan((2, 3, 4, 5), dtype),
                TensorPlan((4, 2), dtype),
            ]
        for plan in plans:
            yield bench.subject.call(plan)
        yield from bench.subject.numbered(TensorPlan((3, 4, 5), dtype), schema.ORDINARY)


def _dims(ranks: list[int]) -> Iterator[tuple[Any, ...]]:
    """``in_dims`` of torch.vmap, the innermost first: over all tensors of these ranks, or over one of several."""
    least = min(ranks, default=0)
    yield from ((dim,) for dim in (0, 1, -1) if least > 1)
    yield from ((inner, outer) for outer, inner in ((0, 0), (1, 0)) if least > 2)
    for at, rank in enumerate(ranks) if len(ranks) > 1 else ():
        for dim in range(min(rank, 2)):
            yield (tuple(dim if index == at else None for index in range(len(ranks))),)
