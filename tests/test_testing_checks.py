"""check_op and check_class: wrong operators are caught for what is wrong with them, right ones pass."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis.strategies import nothing
from support_build import run_python

import identity_conv
import identity_conv.sharding
from identity_conv.testing import (
    Call,
    CheckFailure,
    TensorPlan,
    check_class,
    check_op,
    close,
    exact,
    gradients,
    isolation,
    memory,
    mutants,
    ulp,
)
from identity_conv.testing import checking as checking_module
from identity_conv.testing.registry import STAGES

EXTENSIONS = Path(__file__).parent / "extensions"


@pytest.fixture(scope="module")
def wrong():
    """The operators of the mutants' library, right ones too; test_mutants looks at all of them."""
    memory.guarded_allocator(build=True)
    return mutants.load().ops


@pytest.fixture(scope="module")
def wrong_arguments():
    """The operators of tests/extensions/wrong_arguments.cpp."""
    memory.guarded_allocator(build=True)
    return identity_conv.Extension("test_wrong_arguments", [EXTENSIONS / "wrong_arguments.cpp"]).load().ops


def violations(op, reference=torch.clone, **arguments) -> dict[str, str]:
    """What a check finds, as check name → sentence; empty where it passes."""
    try:
        check_op(op, reference, **arguments)
    except CheckFailure as failure:
        return {violation.check: violation.sentence for violation in failure.violations}
    return {}


def alone(*checks: str) -> dict[str, str]:
    """What to skip so that only these are looked at."""
    return dict.fromkeys(checking_module.CHECKS.keys() - set(checks), "not looked at here")


def out_of_place(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x)


def by_flag(x: torch.Tensor, negative: bool = False) -> torch.Tensor:
    return -x if negative else x.clone()


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.mul_.Scalar(x, 2)


#: Of operators with other arguments than one Tensor: the reference, and the check that must speak.
CAUGHT_BY_ARGUMENTS = {
    "sum_same_memory": (torch.add, "values"),
    "sum_broadcast": (torch.add, "values"),
    "flag": (by_flag, "values"),
    "shared_outputs": (lambda x: (x.clone(), x.clone()), "alias"),
    "twice_between": (twice, "bounds"),
    "twice_seldom": (twice, "values"),
    "copy_out": (out_of_place, "values"),
    "flushes": (torch.clone, "no_memory"),
}


@pytest.mark.parametrize("name", CAUGHT_BY_ARGUMENTS)
def test_other_arguments_than_one_tensor_are_looked_at(name: str, wrong_arguments) -> None:
    reference, check = CAUGHT_BY_ARGUMENTS[name]
    # Wrong values are told under one of three names, by what they need.
    of_values = {"values", "layout", "sizes"}
    wanted = of_values if check in of_values else {check}
    found = violations(getattr(wrong_arguments, name), reference, skip=alone(*wanted))
    assert found.keys() & wanted, found


def test_a_leak_is_caught_at_full(wrong) -> None:
    assert "leak" in violations(wrong.leak, tier="full", skip=alone("leak"))
    assert not violations(wrong.copied, tier="full", skip=alone("leak"))


@torch.library.custom_op("test_checks::copy", mutates_args=())
def copy_by_python(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


copy_by_python.register_fake(torch.empty_like)
copy_by_python.register_autograd(lambda ctx, grad: grad.clone())


def copy_function(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


RIGHT = {
    "composition": (lambda: torch.ops.identity_conv_mutants.composed, torch.clone),
    "C++ with a gradient": (lambda: torch.ops.identity_conv_mutants.copied, torch.clone),
    "aten.clone": (lambda: torch.ops.aten.clone, torch.clone),
    "aten.neg by name": (lambda: "aten::neg", torch.neg),
    "two tensors": (lambda: torch.ops.aten.maximum.default, torch.maximum),
    "numbers": (lambda: torch.ops.aten.clamp.default, torch.clamp),
    "the identity": (lambda: torch.ops.my_ops.identity_conv_op, torch.clone),
    "torch.library.custom_op": (lambda: copy_by_python, torch.clone),
    "a function": (lambda: copy_function, torch.clone),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_operator_passes(kind: str, wrong) -> None:
    op, reference = RIGHT[kind]
    report = check_op(op(), reference)
    assert not report.violations
    assert report.cases > 300


@torch.library.custom_op("test_checks::fill_", mutates_args={"x"})
def fill_by_python(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


RIGHT_WITH_OTHER_ARGUMENTS = {
    "two tensors": (lambda: torch.ops.test_wrong_arguments.sum_right, torch.add),
    "in place": (lambda: torch.ops.test_wrong_arguments.twice_right, twice),
    "without a return": (lambda: fill_by_python, lambda x, value: x.fill_(value)),
    "a view": (lambda: "aten::alias", lambda x: x.view(x.shape)),
    "a function that writes": (lambda: lambda x: x.mul_(2), lambda x: x.mul_(2)),
    "a list": (lambda: "aten::stack", torch.stack),
    "several outputs": (lambda: lambda x: (x.clone(), -x), lambda x: (x.clone(), x.neg())),
}


@pytest.mark.parametrize("kind", RIGHT_WITH_OTHER_ARGUMENTS)
def test_a_right_operator_of_other_arguments_passes(kind: str, wrong_arguments) -> None:
    op, reference = RIGHT_WITH_OTHER_ARGUMENTS[kind]
    skip = alone("values", "layout", "sizes", "strides", "accepts", "alias", "bounds", "inputs_untouched", "grad")
    check_op(op(), reference, skip=skip)


@torch.library.custom_op("test_checks::fill_most", mutates_args={"x"})
def fill_most_by_python(x: torch.Tensor, value: float) -> None:
    if x.dim():
        x[:-1].fill_(value)
    else:
        x.fill_(value)


def test_what_is_written_is_compared_where_nothing_is_returned() -> None:
    found = violations(fill_most_by_python, lambda x, value: x.fill_(value), skip=alone("values", "layout", "sizes"))
    assert any("input 0 after the call" in sentence for sentence in found.values())


def annotated(x: torch.Tensor) -> torch.Tensor:
    return x.neg_().neg()


def test_a_function_with_annotations_may_not_change_its_input(wrong) -> None:
    assert "inputs_untouched" in violations(annotated, dtypes=[torch.float32], skip=alone("inputs_untouched"))


def given_back(x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_function_with_annotations_may_not_give_its_input_back(wrong) -> None:
    assert "alias" in violations(given_back, dtypes=[torch.float32], skip=alone("alias"))


@torch.library.custom_op("test_checks::product", mutates_args=())
def product_by_python(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def _product_backward(ctx, grad: torch.Tensor):
    x, y = ctx.saved_tensors
    return (grad * y, grad * x) if ctx.needs_input_grad[0] else (None, None)


product_by_python.register_fake(lambda x, y: x * y)
product_by_python.register_autograd(
    _product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


# A factor of 0 would hide that it is wrong, and make a right one's gradient NaN.
@torch.library.custom_op("test_checks::square_more", mutates_args=())
def square_more_by_python(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x + factor * x * x


square_more_by_python.register_fake(lambda x, factor: torch.empty_like(x))
square_more_by_python.register_autograd(
    lambda ctx, grad: (grad * (1 + ctx.factor * ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "factor", inputs[1]),
    )[0],
)


@torch.library.custom_op("test_checks::softcap", mutates_args=())
def softcap_by_python(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


softcap_by_python.register_fake(lambda x, cap: torch.empty_like(x))
softcap_by_python.register_autograd(
    lambda ctx, grad: (grad * (1 - torch.tanh(ctx.saved_tensors[0] / ctx.cap) ** 2), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "cap", inputs[1]))[0],
)


@torch.library.custom_op("test_checks::negated", mutates_args=())
def negated_by_python(x: torch.Tensor) -> torch.Tensor:
    return -x


negated_by_python.register_fake(torch.empty_like)
negated_by_python.register_autograd(lambda ctx, grad: -2 * grad)


def test_a_wrong_gradient_is_caught_whatever_a_required_number_may_be() -> None:
    found = violations(
        square_more_by_python, lambda x, factor: x + factor * x * x, dtypes=[torch.float64], skip=alone("grad")
    )
    assert "the gradient: at" in found["grad"]


def test_a_right_gradient_passes_where_some_numbers_have_none() -> None:
    checked = alone("grad", "second_order")
    check_op(softcap_by_python, lambda x, cap: cap * torch.tanh(x / cap), dtypes=[torch.float64], skip=checked)


@pytest.mark.parametrize("greater", [torch.gt, torch.ge])
def test_another_gradient_at_a_kink_is_told_and_no_violation(greater: Callable) -> None:
    @torch.library.custom_op(f"test_checks::leaky_{greater.__name__}", mutates_args=())
    def leaky(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0.1 * x)

    leaky.register_fake(torch.empty_like)
    leaky.register_autograd(
        lambda ctx, grad: torch.where(greater(ctx.saved_tensors[0], 0), grad, 0.1 * grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    for dtype in (torch.float64, torch.float32):
        report = check_op(
            leaky, lambda x: torch.nn.functional.leaky_relu(x, 0.1), dtypes=[dtype], skip=alone("grad", "values")
        )
        assert ("a function with a kink has several gradients" in str(report)) == (greater is torch.ge), report


@pytest.mark.parametrize("op", ["sqrt", "sign"])
def test_where_there_is_no_gradient_at_0_nothing_is_told(op: str) -> None:
    formulas = {"sqrt": lambda x: x**0.5, "sign": lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype)}
    report = check_op(f"aten::{op}", formulas[op], dtypes=[torch.float64], skip=alone("grad"))
    assert "kink" not in str(report)


def test_the_reference_is_differentiated_once_at_0(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def told_relu(x: torch.Tensor) -> torch.Tensor:
        if x.shape == (2, 3) and x[0, 0] == x[0, 1] == 0:
            with log.open("a") as file:  # the checks run in processes of their own
                file.write("at 0\n")
        return torch.relu(x)

    check_op("aten::relu", told_relu, dtypes=[torch.float64], skip=alone("grad"))
    assert log.read_text().count("at 0") == 1


@pytest.mark.parametrize("check", ["grad", "second_order", "forward_ad"])
def test_the_program_of_a_wrong_derivative_shows_it(check: str, wrong) -> None:
    # Forward mode is torch's refusal for the first.
    op, reference = (wrong.tangent_zero, torch.clone) if check == "forward_ad" else (negated_by_python, torch.neg)
    with pytest.raises(CheckFailure) as caught:
        check_op(op, reference, dtypes=[torch.float64], skip=alone("grad", check))
    violation = next(each for each in caught.value.violations if each.check == check)
    # In a process of its own: autograd's threads, once begun here, would keep later checks from forking.
    found_here = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    done = run_python("-c", found_here + violation.reproducer)
    assert done.returncode == 0, done.stderr
    mine, right = done.stdout.split("derivative of result")[1].split("derivative of expected")
    assert mine.strip() != right.strip()


@torch.library.custom_op("test_checks::running", mutates_args=())
def running_by_python(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


running_by_python.register_fake(lambda x: x.cumsum(-1))
running_by_python.register_vmap(lambda info, in_dims, x: (x.cumsum(-1), in_dims[0]))


def test_a_gradient_that_needs_the_first_input_to_want_one_is_caught() -> None:
    found = violations(product_by_python, torch.mul, dtypes=[torch.float64], skip=alone("grad"))
    assert "no other input requires grad" in found["grad"]


@torch.library.custom_op("test_checks::scaled_and_copied", mutates_args=())
def scaled_and_copied_by_python(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * weight, x.clone()


def scaled_and_copied_backward(ctx, grad: torch.Tensor, grad_copy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = ctx.saved_tensors
    of_copy = grad_copy if ctx.mistake and not ctx.needs_input_grad[0] else 0
    return (grad * weight + grad_copy).sum_to_size(x.shape), (grad * x + of_copy).sum_to_size(weight.shape)


scaled_and_copied_by_python.register_fake(lambda x, weight: (x * weight, torch.empty_like(x)))


@pytest.mark.parametrize("mistake", [False, True])
def test_an_output_may_require_grad_in_vain(mistake: bool) -> None:
    scaled_and_copied_by_python.register_autograd(
        scaled_and_copied_backward,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "mistake", mistake) or ctx.save_for_backward(*inputs),
    )
    found = violations(
        scaled_and_copied_by_python,
        lambda x, weight: (x * weight, x.clone()),
        shapes={"x": ("...",), "weight": ("...",)},
        dtypes=[torch.float64],
        skip=alone("grad"),
    )
    if mistake:
        assert found["grad"].startswith("the gradient of output 1: expected none, got one"), found
    else:
        assert not found


def in_its_order(x: torch.Tensor) -> torch.Tensor:
    """Row-major where x is that, else column-major."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
    return y if x.is_contiguous() else y.t().contiguous().t()


@torch.library.custom_op("test_checks::in_its_order", mutates_args=())
def in_its_order_by_python(x: torch.Tensor) -> torch.Tensor:
    return in_its_order(x)


@torch.library.custom_op("test_checks::in_columns", mutates_args=())
def in_columns_by_python(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def test_strides_may_be_those_of_an_input_that_was_resolved() -> None:
    """A kernel gets an expanded tensor with a neg bit as a dense one without."""
    x = TensorPlan((2, 2), expand=(1,), neg=True)
    calls = [Call((x,)), Call((TensorPlan((2, 2), permutation=(1, 0)),))]
    assert in_its_order_by_python(x.build()).stride() != in_its_order(x.build()).stride()
    assert not violations(in_its_order_by_python, in_its_order, inputs=calls, skip=alone("strides"))
    calls = [Call((TensorPlan((2, 2), neg=True),))]
    assert violations(in_columns_by_python, in_its_order, inputs=calls, skip=alone("strides")).keys() == {"strides"}


def test_a_batching_rule_that_forgets_the_dimension_is_caught() -> None:
    reference = functools.partial(torch.cumsum, dim=-1)
    assert "vmap" in violations(running_by_python, lambda x: reference(x), dtypes=[torch.float32], skip=alone("vmap"))


@pytest.mark.parametrize(
    "name", ["strides_ignored", "grad_expanded", "second_call", "fake_dtype", "fake_fixed", "grad_once"]
)
def test_given_calls_are_looked_at_by_every_check_that_can(name: str, wrong) -> None:
    calls = [Call((TensorPlan((4, 3), torch.float64, padding=(0, 1)),)), Call((TensorPlan((5,)),))]
    kernel = next(each for each in mutants.MUTANTS if (each.name, each.device) == (name, "cpu"))
    assert violations(getattr(wrong, name), inputs=calls).keys() & {*kernel.checks}


@pytest.mark.night
@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_operator_passes_at_full(kind: str, wrong) -> None:
    op, reference = RIGHT[kind]
    check_op(op(), reference, tier="full")


def test_a_crash_and_a_hang_cost_their_call_alone(wrong) -> None:
    began = time.monotonic()
    found = violations(wrong.empty_aborts)
    assert "ended the process (SIGABRT" in found["sizes"]
    assert "did not return" in violations(wrong.hangs)["values"]
    assert time.monotonic() - began < 120


def test_a_failure_shows_check_sentence_plan_and_a_program_that_shows_it(wrong) -> None:
    with pytest.raises(CheckFailure) as caught:
        check_op(wrong.offset_ignored, torch.clone, skip={"vmap": "told by layout", "func": "told by layout"})
    violation = next(each for each in caught.value.violations if each.check == "layout")
    (plan,) = violation.case.plans
    assert "offset" in plan.kinds
    assert plan.numel <= 2
    for part in (
        "layout (cpu)",
        violation.sentence,
        repr(plan),
        "torch.ops.identity_conv_mutants.offset_ignored",
    ):
        assert part in str(caught.value)
    done = subprocess.run([sys.executable, "-c", violation.reproducer], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"identity_conv_mutants::offset_ignored"' in violation.to_cpp()
    result, expected = done.stdout.splitlines()
    assert result.removeprefix("result") != expected.removeprefix("expected")


@pytest.mark.parametrize(
    ("op", "reference"), [("aten::eq.Tensor", lambda x, y: x == y), ("aten::isnan", lambda x: x != x)]
)
def test_a_truth_value_has_no_gradient_to_miss(op: str, reference) -> None:
    assert not violations(op, reference, skip=alone("grad", "second_order", "forward_ad", "func"))


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("aten::acos", lambda x: math.pi / 2 - x.asin()),  # a float16 loses more by it
        ("aten::sigmoid", lambda x: 1 / (1 + (-x).exp())),  # of a uint8, -x wraps round
        ("aten::square", lambda x: x * x),  # of a truth value an int64, and by the formula one
        ("aten::copysign.Tensor", lambda x, y: torch.where(torch.signbit(y), -x.abs(), x.abs())),
    ],
)
def test_a_dtype_that_is_left_out_is_not_held_to_the_roundings_of_the_formula(op: str, reference) -> None:
    floats = [torch.float32, torch.float64]
    assert not violations(op, reference, dtypes=floats, compare=close(1e-5, 1e-5), skip=alone("refuses"))


def without_autograd(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 0 + value)


def double_without_autograd(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def test_no_gradient_is_missed_where_the_result_is_the_same_all_round() -> None:
    checked = alone("grad")
    assert not violations(without_autograd, without_autograd, dtypes=[torch.float64], skip=checked)
    found = violations(double_without_autograd, double_without_autograd, dtypes=[torch.float64], skip=checked)
    assert "doesn't require grad" in found["grad"]


def by_two_bytes(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.dtype in (torch.float32, torch.float64) else (x.view(torch.int16) + 1).view(x.dtype)


def test_a_dtype_that_is_left_out_and_taken_for_another_is_told() -> None:
    found = violations(by_two_bytes, lambda x: x + 1, dtypes=[torch.float32], compare=close(), skip=alone("refuses"))
    assert "which dtypes leaves out" in found["refuses"]


def test_a_reference_that_fixes_a_size_asks_nothing_of_the_fake() -> None:
    assert not violations(
        "aten::neg",
        lambda x: x.new_empty([int(size) for size in x.shape]).copy_(-x),
        dtypes=[torch.float32],
        skip=alone("symbolic"),
    )


def test_what_is_skipped_is_not_told_and_stands_in_the_report(wrong) -> None:
    reason = "no training yet"
    report = check_op(wrong.grad_missing, torch.clone, skip={"grad": reason})
    assert report.skipped["grad"] == reason
    assert report.skipped["second_order"] == f"grad is skipped: {reason}"
    assert f"skipped: {reason}" in repr(report)
    assert f"skipped: {reason}" in report._repr_html_()
    assert "grad" not in [run.check for run in report.runs]


def test_plain_calls_are_looked_at_before_those_on_streams() -> None:
    checking_module._import_stages()
    stages = checking_module._in_order(reversed(STAGES.values()))
    modules = dict.fromkeys(stage.look.__module__.rpartition(".")[2] for stage in stages)
    assert tuple(modules) == checking_module._MODULES


def test_a_check_that_is_left_alone_finds_what_it_is_for(wrong) -> None:
    for name, check in (("offset_ignored", "layout"), ("tail_lost_large", "sizes"), ("tail_lost", "values")):
        assert violations(getattr(wrong, name), skip=alone(check)).keys() == {check}


def test_forward_mode_that_torch_lacks_is_reported(wrong) -> None:
    report = check_op(copy_by_python, torch.clone)
    assert any(note.startswith("forward_ad: torch has no forward mode") for note in report.reported)


def test_without_hypothesis_a_corpus_is_used_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        checking_module.importlib.util, "find_spec", lambda name: None if name == "hypothesis" else find_spec(name)
    )
    report = check_op(wrong.copied, torch.clone)
    assert any("hypothesis is not installed" in note for note in report.reported)
    assert "layout" in violations(wrong.strides_ignored)


def scaled(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return x * alpha


@pytest.mark.parametrize(
    ("op", "reference", "arguments", "sentence"),
    [
        ("test_checks::none", torch.clone, {}, "registered operator"),
        (3, torch.clone, {}, "op must be an operator, its name or a callable, got 3"),
        ("aten::clone", None, {}, "reference must be an operator, its name or a callable"),
        ("aten::clone", scaled, {}, "alpha"),
        ("aten::clone", torch.clone, {"tier": "most"}, "tier must be one of quick, full"),
        ("aten::clone", torch.clone, {"skip": {"graad": "x"}}, "there is no check 'graad'"),
        ("aten::clone", torch.clone, {"skip": {"grad": ""}}, "'grad' needs a reason"),
        ("aten::clone", torch.clone, {"devices": []}, "devices must name one at least"),
        ("aten::clone", torch.clone, {"inputs": {"y": 1}}, "no argument y"),
        ("aten::clone", torch.clone, {"compare": 1e-3}, "compare must be"),
        ("aten::clone", torch.clone, {"devices": "cpu"}, "devices must be a list"),
        ("aten::clone", torch.clone, {"devices": ["tpu"]}, "'tpu' is none that torch knows"),
        ("aten::clone", torch.clone, {"skip": ["grad"]}, "skip must be a mapping"),
        ("aten::clone", torch.clone, {"seed": "a"}, "seed must be an integer"),
        ("aten::clone", torch.clone, {"dtypes": []}, "dtypes must be some that torch.clone copies"),
        ("aten::neg", torch.neg, {"dtypes": [torch.bool]}, "dtypes must hold one that the reference takes"),
        ("aten::clone", torch.clone, {"inputs": 3}, "inputs must be a mapping of arguments, or a list of Call"),
        ("aten::clone", torch.clone, {"inputs": []}, "inputs must have one call at least"),
        ("aten::clone", torch.clone, {"inputs": [Call((TensorPlan(), TensorPlan()))]}, "the reference refuses"),
        ("aten::clone", torch.clone, {"inputs": {"self": nothing()}}, "there is nothing that nothing"),
        ("aten::clone", lambda x: x.mul_(2), {}, "the reference changes its input"),
    ],
)
def test_wrong_use_is_said_in_one_sentence(op, reference, arguments, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        check_op(op, reference, **arguments)
    assert "\n" not in str(caught.value)


def test_a_check_tells_what_to_write_where_a_fake_is_missing() -> None:
    ops = identity_conv.Extension("test_unfaked", [EXTENSIONS / "unfaked.cpp"]).load().ops
    found = violations(ops.half, lambda x: x * 0.5, dtypes=[torch.float32], skip=alone("fake", "symbolic"))
    for check in ("fake", "symbolic"):
        assert 'identity_conv::output_like(m, "half", "x")' in found[check]


def test_given_calls_are_all_that_is_looked_at() -> None:
    calls = [Call((TensorPlan((4, 3)), TensorPlan((3, 2), permutation=(1, 0))))]
    report = check_op(torch.ops.aten.mm.default, torch.mm, inputs=calls, compare=close())
    assert {run.cells and next(iter(run.cells))[0] for run in report.runs if run.check == "values"} == {"float32"}


def copied_without_strides(x: torch.Tensor) -> torch.Tensor:
    """Wrong where `x` isn't dense; other sizes than it is meant for end the process."""
    if x.shape != (8, 4):
        os.abort()
    return torch.as_strided(x, (8, 4), (4, 1)).clone()


def test_given_calls_are_not_shrunk_to_sizes_that_nobody_gave() -> None:
    kept = {"values", "layout", "sizes"}
    skip = dict.fromkeys(checking_module.CHECKS.keys() - kept, "not looked at here")
    found = violations(copied_without_strides, inputs=[Call((TensorPlan((8, 4), permutation=(1, 0)),))], skip=skip)
    assert found.keys() == {"layout"}


def test_dtypes_that_are_left_out_are_refused_with_a_text_or_taken_rightly(wrong) -> None:
    assert "refuses" in violations(wrong.int8_silent, dtypes=[torch.float32])
    assert not violations(wrong.copied, dtypes=[torch.float32])


def test_a_fresh_process_finds_the_same(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    monkeypatch.setattr(checking_module, "_isolation_for", lambda settings, device: "spawn")
    assert violations(wrong.row_major, skip=alone("values", "layout", "strides")).keys() == {"strides"}


@torch.library.custom_op("test_checks::square", mutates_args=())
def square_by_python(x: torch.Tensor) -> torch.Tensor:
    return x * x


square_by_python.register_fake(torch.empty_like)


@pytest.mark.night
def test_a_fresh_process_does_without_a_library_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong
) -> None:
    monkeypatch.setattr(isolation, "fork_serves", lambda: False)
    gone = tmp_path / "libgone.so"
    monkeypatch.setattr(torch.ops, "loaded_libraries", {*torch.ops.loaded_libraries, str(gone)})
    assert not violations(wrong.copied, skip=alone("values"))


def test_what_only_this_process_has_is_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "fork_serves", lambda: False)
    library = torch.library.Library("test_checks_here", "FRAGMENT")
    library.define("copy(Tensor x) -> Tensor")
    library.impl("copy", torch.clone, "CPU")
    report = check_op("test_checks_here::copy", torch.clone, dtypes=[torch.float32], skip=alone("values"))
    assert any("run in this process" in note for note in report.notes), report


def test_a_sharding_rule_that_promises_too_much_is_caught() -> None:
    identity_conv.sharding.pointwise("test_checks::square", keeps_partial=("sum",))
    found = violations(square_by_python, torch.square, tier="dtensor", skip=alone("dtensor"))
    assert found["dtensor"].startswith("P(sum)")


def test_second_derivatives_of_narrow_dtypes_may_cancel() -> None:
    bench = SimpleNamespace(compare=close())
    theirs = torch.tensor([0.07, 5.0], dtype=torch.bfloat16)
    mine = torch.tensor([0.0, 5.0], dtype=torch.bfloat16)
    assert gradients._derivatives_differ(bench, mine, theirs)
    assert not gradients._derivatives_differ(bench, mine, theirs, cancels=True)
    for wrong in (mine + 1, mine * 2):
        assert gradients._derivatives_differ(bench, wrong, theirs, cancels=True)
    assert gradients._derivatives_differ(bench, mine.double(), theirs.double(), cancels=True)
    theirs = torch.tensor([torch.inf, 5.0], dtype=torch.float16)
    assert gradients._derivatives_differ(bench, torch.tensor([torch.inf, 500.0]).half(), theirs, cancels=True)


def test_what_rounding_does_to_the_reference_it_may_do_to_the_operator() -> None:
    bench = SimpleNamespace(compare=close())

    def differ(mine: list[float], theirs: list[float], truth: list[float]) -> str | None:
        narrow = (torch.tensor(each) for each in (mine, theirs))
        return gradients._derivatives_differ(bench, *narrow, widely=lambda: torch.tensor(truth, dtype=torch.float64))

    inf, nan = torch.inf, torch.nan
    assert not differ([1.003, 5.0, inf], [1.001, 5.0, inf], [1.0, 5.0, inf])
    assert not differ([1.003, nan], [1.001, nan], [1.0, nan])
    assert differ([1.009, 5.0], [1.001, 5.0], [1.0, 5.0])  # much further off
    assert differ([1.0, 5.5], [1.0, 5.1], [1.0, 5.0])  # the reference is too far off to excuse anything
    assert differ([1.003, 5.0], [1.001, inf], [1.0, 5.0])
    assert differ([1.003, nan], [1.001, inf], [1.0, inf])
    assert differ([1.003, -inf], [1.001, inf], [1.0, inf])


def test_a_reference_that_cancels_raises_no_false_alarm() -> None:
    def from_the_other(x: torch.Tensor) -> torch.Tensor:
        return math.pi / 2 - x.asin()

    skip = alone("grad", "second_order", "compile")
    found = violations(
        torch.ops.aten.acos, from_the_other, dtypes=[torch.float32], compare=close(1e-5, 1e-5), tier="full", skip=skip
    )
    assert not found


_KEPT: list[bytearray] = []


@torch.library.custom_op("test_checks::any_and_keep", mutates_args=())
def any_and_keep_by_python(x: torch.Tensor, size: int) -> torch.Tensor:
    _KEPT.append(bytearray(b"x" * size))
    return x.any()


@pytest.mark.parametrize(("size", "told"), [(4000, False), (100_000, True)])
def test_what_an_allocator_keeps_is_no_leak(size: int, told: bool) -> None:
    inputs = [Call((TensorPlan((1000,), torch.float32), size))]
    found = violations(any_and_keep_by_python, lambda x, size: x.any(), inputs=inputs, tier="full", skip=alone("leak"))
    assert ("leak" in found) == told


@pytest.mark.parametrize("ours", [0, 60_000])
def test_what_other_processes_do_to_a_gpu_s_memory_is_no_leak_and_hides_none(ours: int) -> None:
    others = [0, 4 << 30, 4 << 30, 4 << 30, 4 << 30, 1 << 30]  # one comes in the first turn, one leaves in the last
    turns: list[None] = []
    held = lambda: others.pop(0) + len(turns) * ours  # noqa: E731
    assert memory.kept(held, lambda: turns.append(None), looks=3) == ours


@torch.library.custom_op("test_checks::scaled_by_index", mutates_args=())
def scaled_by_index_by_python(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x * index


def scaled_by_index_backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (index,) = ctx.saved_tensors
    return grad * index * (2 if torch.compiler.is_compiling() else 1), None


scaled_by_index_by_python.register_fake(lambda x, index: torch.empty_like(x))
scaled_by_index_by_python.register_autograd(
    scaled_by_index_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)


def test_a_compiled_gradient_is_looked_at_where_an_input_has_none() -> None:
    inputs = [Call((TensorPlan((5,), torch.float32), TensorPlan((5,), torch.int64)))]
    skip = alone("grad", "compile")
    found = violations(scaled_by_index_by_python, torch.mul, inputs=inputs, tier="full", skip=skip)
    assert found.keys() == {"compile"}
    assert "the gradient" in found["compile"]


def test_a_list_of_tensors_is_given_no_tensor() -> None:
    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([each.unsqueeze(0) for each in tensors])

    found = violations(
        torch.ops.aten.stack, joined, dtypes=[torch.uint8], inputs={"dim": 0}, tier="full", skip=alone("sizes")
    )
    assert not found


def test_finite_differences_are_of_elements_that_lie_apart() -> None:
    def by_comparing(x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)

    assert not violations(torch.ops.aten.sign, by_comparing, dtypes=[torch.float64], tier="full", skip=alone("grad"))


def test_a_sum_of_many_terms_may_round_in_another_order() -> None:
    bench = SimpleNamespace(compare=close())
    out_of = [torch.zeros(100, 100)]
    theirs, once = torch.full((100,), 0.01), torch.full((100, 100), 0.01)
    for wrong, refused in ((1e-5, False), (1e-3, True)):
        assert bool(gradients.compared(bench, [theirs + wrong], [theirs], "it", out_of=out_of)) == refused
    assert gradients.compared(bench, [once + 1e-5], [once], "it", out_of=out_of)


class TestComparisons:
    def test_exact_tells_bits_apart(self) -> None:
        nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
        assert exact()(torch.zeros(2), torch.zeros(2)) is None
        assert "at [0] expected 0.0" in str(exact()(torch.tensor([-0.0]), torch.tensor([0.0])))
        assert exact()(nan, torch.tensor([float("nan")])) is not None
        assert exact()(nan, nan.clone()) is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
    def test_ulp_counts_representable_numbers(self, dtype: torch.dtype) -> None:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        one = torch.ones(1, dtype=dtype)
        above = (one.view(bits) + 3).view(dtype)
        assert ulp(3)(above, one) is None
        assert ulp(2)(above, one) is not None
        zeros = torch.tensor([0.0, float("nan")]).to(dtype)
        assert ulp(0)(torch.tensor([-0.0, float("nan")]).to(dtype), zeros) is None
        assert ulp(100)(torch.tensor([float("inf")]).to(dtype), torch.tensor([float("-inf")]).to(dtype)) is not None

    def test_close_takes_complex_numbers_and_integers_exactly(self) -> None:
        z = torch.tensor([1 + 1j])
        assert close(rtol=1e-3)(z * (1 + 1e-4), z) is None
        assert close(rtol=1e-5)(z * (1 + 1e-3), z) is not None
        assert close(atol=5)(torch.tensor([1]), torch.tensor([2])) is not None


class TestClasses:
    @pytest.mark.parametrize("name", ["Forgets", "Counts"])
    def test_a_class_that_loses_its_state_is_caught(self, name: str, wrong) -> None:
        with pytest.raises(CheckFailure) as caught:
            check_class(getattr(torch.classes.identity_conv_mutants, name), "forward", torch.clone)
        assert "state" in [violation.check for violation in caught.value.violations]

    def test_a_right_class_passes(self, wrong) -> None:
        assert not check_class(torch.classes.identity_conv_mutants.Kept, "forward", torch.clone).violations

    def test_wrong_use_is_said_in_one_sentence(self, wrong) -> None:
        with pytest.raises(ValueError, match="registered custom class"):
            check_class("identity_conv_mutants.None", "forward", torch.clone)
        with pytest.raises(ValueError, match="Kept has no method 'backward'"):
            check_class(torch.classes.identity_conv_mutants.Kept, "backward", torch.clone)


class TestIsolation:
    @staticmethod
    def run(tasks, perform, limit: float = 1.0):
        return list(isolation.run(tasks, perform, how="fork", limit=limit))

    def test_results_come_in_order_and_a_death_costs_its_task(self) -> None:
        def perform(task: int, board, tell) -> None:
            board.note(f"task {task}")
            if task == 1:
                os.abort()
            tell(task * 10)

        told = self.run([0, 1, 2], perform)
        assert told[0] == (0, 0)
        assert told[1][0] == 1
        assert "SIGABRT" in told[1][1].how
        assert told[1][1].at == "task 1"
        assert told[2] == (2, 20)

    def test_a_child_that_sleeps_or_spins_is_ended(self) -> None:
        def perform(task: str, board, tell) -> None:
            board.note(task)
            while task == "spin":
                pass
            time.sleep(60)

        told = self.run(["sleep", "spin"], perform)
        assert [death.hung for _, death in told] == [True, True]

    def test_several_threads_of_torch_work_in_a_fork(self) -> None:
        torch.randn(1 << 20).sum()

        def perform(task: int, board, tell) -> None:
            torch.set_num_threads(2)
            tell(float(torch.ones(1 << 21).sum()))

        assert self.run([0], perform, limit=20.0) == [(0, float(1 << 21))]


def test_outputs_on_a_gpu_may_lie_in_each_others_places(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.full(
        (6, 512), 0xA5, dtype=torch.uint8
    )  # before, place and behind, of an output of 16 bytes and one of 8
    first, second = blocks[1], blocks[4]
    allocations = memory.DeviceAllocations("cuda")
    allocations._poison, allocations._alone = 0xA5, True
    allocations._holes = [
        (place.data_ptr(), size, before, behind)
        for (before, place, behind), size in ((blocks[:3], 16), (blocks[3:], 8))
    ]

    def bytes_at(address: int, size: int, device: str) -> torch.Tensor:
        start = address - blocks.data_ptr()
        return blocks.view(-1)[start : start + size]

    def output(place: torch.Tensor, size: int) -> SimpleNamespace:
        storage = SimpleNamespace(data_ptr=place.data_ptr, nbytes=lambda: size)
        return SimpleNamespace(untyped_storage=lambda: storage)

    monkeypatch.setattr(memory, "device_bytes", bytes_at)
    outputs = [output(second, 16), output(first, 8)]
    second[:16], first[:8] = 1, 2
    assert allocations.look(outputs) is None
    first[8] = 3
    assert allocations.look(outputs) == "0 bytes behind a block of 8 bytes"


@pytest.mark.gpu
class TestOnCuda:
    @pytest.mark.parametrize("kind", ["aten.clone", "aten.neg by name", "the identity", "torch.library.custom_op"])
    def test_a_right_operator_passes(self, kind: str) -> None:
        op, reference = RIGHT[kind]
        report = check_op(op(), reference, devices=["cuda"])
        assert {"stream", "capture", "no_sync"} <= {run.check for run in report.runs if run.cases}

    @pytest.mark.parametrize("kind", ["aten.clone", "the identity"])
    def test_a_right_operator_passes_at_full(self, kind: str) -> None:
        op, reference = RIGHT[kind]
        check_op(op(), reference, devices=["cuda"], tier="full")


class TestExtensions:
    """The operators and the class of the other tests' extensions."""

    @staticmethod
    def load(name: str):
        return identity_conv.Extension(f"test_{name}", [EXTENSIONS / f"{name}.cpp"]).load()

    def test_scale(self) -> None:
        ops = self.load("scale").ops
        floating = [torch.float32, torch.float64, torch.bfloat16]
        skip = {"grad": "it has no Autograd kernel", "fake": "its Meta kernel is torch's own composition"}
        check_op(
            ops.scale, lambda x, shift=None: x * 2.0 if shift is None else x * 2.0 + shift, dtypes=floating, skip=skip
        )
        check_op(ops.both, lambda x: (x * 2.0, x * x), dtypes=floating, skip=skip)

    def test_node(self) -> None:
        skip = {"forward_ad": "its node has none", "func": "its node has no forward mode"}
        check_op(self.load("node").ops.copy, torch.clone, skip=skip)

    def test_affine(self) -> None:
        self.load("affine")

        def reference(obj, x: torch.Tensor) -> torch.Tensor:
            fields = dict(obj.__obj_flatten__())
            return x * fields["weight"] + fields["shift"]

        check_class(
            "test_affine.Affine",
            "forward",
            reference,
            state={"weight": TensorPlan((1,)), "shift": 2},
            dtypes=[torch.float32, torch.float64],
            compare=close(),
        )


def test_a_method_has_a_program_that_shows_what_is_wrong() -> None:
    with pytest.raises(CheckFailure) as caught:
        check_class("my_ops.IdentityConvClass", "forward", lambda x: x + 1)
    program = caught.value.violations[0].reproducer
    assert "obj = torch.classes.my_ops.IdentityConvClass(" in program
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("result torch.")
