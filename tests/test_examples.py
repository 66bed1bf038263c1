"""The projects in tests/examples, each laid down by identity-conv new and made an operator of a kind of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support_build import run_project

EXAMPLES = Path(__file__).parent / "examples"

#: What each is an example of, and how many results its script compares.
ALL = {
    "muladd": 3,  # gradients, operands that broadcast
    "nms": 6,  # an output whose size depends on the data
    "rms_norm": 4,  # several outputs, optional tensors, one written in place
}


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / request.param, tmp_path / request.param))


def test_each_is_run() -> None:
    assert sorted(ALL) == sorted(path.name for path in EXAMPLES.iterdir())


@pytest.mark.parametrize("project", ALL, indirect=True)
def test_takes_the_road(project: Path, program: Path) -> None:
    assert run_project(project, "-p", "_identity_conv_pytest").count("equal") == ALL[project.name]


@pytest.mark.night
@pytest.mark.parametrize("project", ALL, indirect=True)
def test_holds_under_a_longer_look(project: Path, program: Path) -> None:
    run_project(project, "-p", "_identity_conv_pytest", "--kernel-profile=night")
