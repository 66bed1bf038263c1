"""The command `identity-conv`, and `python -m identity_conv`, which is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_build import CONSOLE_SCRIPT, MODULE, NO_COMPILER, ROOT, run_python

import identity_conv
from identity_conv import settings


@pytest.fixture(params=[CONSOLE_SCRIPT, MODULE], ids=["console script", "python -m"])
def command(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture
def without_torch(tmp_path: Path) -> str:
    """A PYTHONPATH where torch can't be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not to be imported')\n")
    return f"{tmp_path}:{ROOT}:{ROOT / 'identity_conv' / 'entry'}"


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_and_version_need_no_torch(command: tuple[str, str], option: str, without_torch: str) -> None:
    done = run_python(*command, option, PYTHONPATH=without_torch, **NO_COMPILER)
    assert (done.returncode, done.stderr) == (0, "")
    if option == "--version":
        assert done.stdout.strip() == f"identity-conv, version {identity_conv.__version__}"
    else:
        assert done.stdout.startswith("Usage: identity-conv ")
        assert [each.name for each in settings.ALL if f"  {each.name}  " not in done.stdout] == []


@pytest.mark.parametrize("name", ["demo", "build"])
def test_help_of_a_command_needs_no_torch(name: str, without_torch: str) -> None:
    done = run_python(*CONSOLE_SCRIPT, name, "--help", PYTHONPATH=without_torch, **NO_COMPILER)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Example:" in done.stdout


@pytest.mark.parametrize("arguments", [["nothing"], ["build", "--nothing"], ["demo", "--out", "."]])
def test_wrong_usage_has_status_2(arguments: list[str], without_torch: str) -> None:
    done = run_python(*CONSOLE_SCRIPT, *arguments, PYTHONPATH=without_torch)
    assert done.returncode == 2
    assert "Error: " in done.stderr


@pytest.mark.parametrize("name", ["demo", "build"])
def test_a_failure_is_one_sentence_and_status_1(command: tuple[str, str], name: str, tmp_path: Path) -> None:
    done = run_python(*command, name, IDENTITY_CONV_CACHE_DIR=tmp_path / "cache", **NO_COMPILER)
    assert done.returncode == 1
    assert done.stdout == ""
    *steps, last = done.stderr.splitlines()
    assert last.startswith("identity-conv: no C++ compiler found")
    assert all(step.endswith(" ...") for step in steps)


def test_a_scripts_own_arguments_do_not_make_it_the_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import identity_conv, torch; print(torch.ops.my_ops.identity_conv_op(torch.ones(1)))")
    done = run_python(script, "-m", "identity_conv")
    assert done.stdout == "tensor([1.])\n", done.stderr
