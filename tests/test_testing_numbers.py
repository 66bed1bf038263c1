"""The numbers beside the tensors: each is looked at in turn, and one that is too large for the reference left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_build import run_python

from identity_conv.testing import CheckFailure, TensorPlan, check_op, checking, schema
from identity_conv.testing.mutants.kernels import find
from identity_conv.testing.subject import Subject


def type_of(declared: str) -> Any:
    return torch._C.parse_schema(f"test::op({declared} x) -> Tensor").arguments[0].real_type


@pytest.mark.parametrize(
    ("declared", "length", "some"),
    [
        ("int", None, [1, 0, -1, 100]),
        ("SymInt", None, [1, 0, -1, 100]),
        ("bool", None, [False, True]),
        ("float", None, [1.5, 0.0, -2.0, 0.1, math.inf, -math.inf]),
        ("Scalar", None, [2, 0.5, math.inf, 1 << 31]),
        ("float?", None, [None, 1.5, math.inf]),
        ("int[]", None, [[1], [0], [-1], [0, 1], [1, 0], [-1, -2]]),
        ("int[2]", 2, [[1, 1], [-1, -1]]),
        ("float[]", None, [[1.5], [math.inf]]),
    ],
)
def test_each_kind_of_number_is_given_in_turn(declared: str, length: int | None, some: list[Any]) -> None:
    given = schema.numbers(type_of(declared), schema.ANY, length=length)
    assert given[0] == some[0]
    assert all(each in given for each in some)
    ordinary = schema.numbers(type_of(declared), schema.ORDINARY, length=length)
    assert ordinary
    assert all(each in given for each in ordinary)


@pytest.mark.parametrize("declared", ["Tensor", "Tensor?", "Tensor[]", "str", "Device"])
def test_other_arguments_have_no_numbers(declared: str) -> None:
    assert schema.numbers(type_of(declared), schema.ANY) == []


def test_one_number_after_the_other_changes_and_what_is_given_stays() -> None:
    subject = Subject("aten::clamp", torch.ops.aten.clamp, checking.suppliers({"max": 9.0}))
    calls = list(subject.numbered(TensorPlan((2,)), schema.ORDINARY))
    assert [call.args[1:] for call in calls] == [(low, 9.0) for low in (None, *schema.ORDINARY["NumberType"])]


def rolled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.roll(by)


def longer(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([x.flatten(), x.new_ones(by)])


def looped(x: torch.Tensor, by: int) -> torch.Tensor:
    for _ in range(by):
        x = x.roll(1)
    return x


def positive(x: torch.Tensor, by: int) -> torch.Tensor:
    if by < 0:
        raise ValueError("by must be 0 or more")
    return x.roll(by)


@pytest.mark.parametrize(
    ("reference", "taken"),
    [
        (rolled, {"by": list(schema.LARGE)}),
        (positive, {"by": [each for each in schema.LARGE if each > 0]}),
        (longer, {}),
        (looped, {"by": [each for each in schema.LARGE if each < 0]}),
    ],
)
def test_integers_beyond_32_bits_are_those_that_the_reference_takes(
    reference: Callable[..., torch.Tensor], taken: dict[str, list[int]]
) -> None:
    assert checking._large_integers(Subject(reference, reference)) == taken


@pytest.mark.parametrize("reference", [longer, looped])
def test_an_integer_that_is_a_size_or_a_count_is_no_trouble(reference: Callable[..., torch.Tensor]) -> None:
    skip = dict.fromkeys(checking.CHECKS.keys() - {"values", "sizes", "layout"}, "not looked at here")
    check_op(reference, reference, dtypes=[torch.float32], skip=skip)


@pytest.mark.parametrize(
    ("name", "right", "number"),
    [("clipped_nan", "clipped", "float('nan')"), ("scaled_by_infinity", "scaled", "float('inf')")],
)
def test_the_program_of_a_number_that_is_not_finite_runs(name: str, right: str, number: str) -> None:
    wrong = find(name)
    with pytest.raises(CheckFailure) as caught:
        check_op(wrong.get(), find(right).get(), compare=wrong.compare)
    violation = next(each for each in caught.value.violations if each.check == "values")
    assert violation.reproducer.count(number) == 2
    done = run_python("-c", violation.reproducer)
    assert done.returncode == 0, done.stderr
    result, expected = done.stdout.splitlines()
    assert result.removeprefix("result") != expected.removeprefix("expected")


@torch.library.custom_op("test_numbers::running", mutates_args=())
def running(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.cumsum(dim)


running.register_fake(lambda x, dim: torch.empty_like(x))


@running.register_vmap
def _(info: Any, in_dims: tuple[int, None], x: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    at = in_dims[0]
    return x.movedim(at, 0).cumsum(dim + 1), 0  # of a dimension counted from the end, the next one's


def test_a_batching_rule_that_is_wrong_for_some_numbers_is_caught() -> None:
    skip = dict.fromkeys(checking.CHECKS.keys() - {"vmap"}, "not looked at here")
    with pytest.raises(CheckFailure) as caught:
        check_op(running, lambda x, dim: x.cumsum(dim), dtypes=[torch.float64], skip=skip)
    (violation,) = caught.value.violations
    assert violation.case.args[1] == -1
