"""Messages: a count and its noun agree."""

from __future__ import annotations

import pytest
import torch

import identity_conv
from identity_conv import batch, testing
from identity_conv.wording import counted


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 inputs"), (1, "1 input"), (2, "2 inputs"), (10_000, "10,000 inputs")]
)
def test_a_noun_follows_its_count(count: int, text: str) -> None:
    assert counted(count, "input") == text


@pytest.mark.parametrize(("count", "text"), [(1, "1 more index"), (2, "2 more indices")])
def test_a_plural_without_an_s_is_given(count: int, text: str) -> None:
    assert counted(count, "more index", "more indices") == text


def test_of_one_there_is_a_singular(packages) -> None:
    with pytest.raises(ValueError, match="one number for each of 1 dimension, got"):
        testing.TensorPlan((2,), step=(1, 1))
    assert "differs in 1 of 1 element" in str(testing.close()(torch.zeros(1), torch.ones(1)))
    outcome = batch.Outcome(0, 0, {"x.pt": "why"}, 0.0, "cpu")
    assert str(batch.FailedInputsError(outcome)) == "run: 1 of 1 input failed, each for its reason above"
    assert identity_conv.load_package(packages["cpu"]).verify().endswith("here (1 input, 1 output)")
