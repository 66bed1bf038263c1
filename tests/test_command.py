"""The command `identity-conv`, and `python -m identity_conv`, which is the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from support_build import (
    CONSOLE_SCRIPT,
    MARK_AS_COMMAND,
    MODULE,
    NO_COMPILER,
    ROOT,
    TINY,
    environment,
    run_bash,
    run_python,
    stderr_of,
)

import identity_conv
from identity_conv import cli, settings


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


def commands_with_options() -> Iterator[tuple[str, click.Command]]:
    """Every command by what is typed to reach it, but for the groups."""
    for name, each in cli.command.commands.items():
        if isinstance(each, click.Group):
            yield from ((f"{name} {inner}", command) for inner, command in each.commands.items())
        else:
            yield name, each


def examples(command: click.Command) -> list[str]:
    """The lines of a command's help under `Example:`."""
    assert command.help is not None
    _, found, text = command.help.partition("Example:\n")
    return [line.strip() for line in text.splitlines() if line.strip()] if found else []


def test_every_command_has_an_example_and_says_what_it_takes() -> None:
    for name, each in commands_with_options():
        assert examples(each), name
        for option in each.params:
            assert isinstance(option, click.Argument) or option.help, f"{name} {option.name}"  # type: ignore[attr-defined]


def test_examples_of_help_run(packages: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(packages["cpu"], tmp_path / "model.pt2")
    (tmp_path / "inputs").mkdir()
    torch.save(torch.randn(2, 3, 8, 9), tmp_path / "inputs" / "x.pt")
    (tmp_path / "my_kernels.cpp").write_text(TINY)
    module = "from identity_conv import Extension\next = Extension('my_kernels', ['my_kernels.cpp'])\next.build()\n"
    (tmp_path / "my_kernels.py").write_text(module)
    left_out = {"bench", "new"}  # at night, and in test_new: the project's test and script are its examples
    lines = [line for name, each in commands_with_options() if name not in left_out for line in examples(each)]
    done = run_bash("\n".join(line for line in lines if "cache clean" not in line), tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads((tmp_path / "model.json").read_text())["verdict"] == "ok"
    assert torch.equal(torch.load(tmp_path / "outputs" / "x.pt"), torch.load(tmp_path / "inputs" / "x.pt"))
    assert (tmp_path / "demo.pt2").is_file()


def test_the_example_of_cache_clean_runs(cache: Path, source: Path, tmp_path: Path) -> None:
    identity_conv.Extension("my_kernels", [source]).build()
    (line,) = examples(cli.cache.commands["clean"])
    done = run_bash(line, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("removed 1 build, ")


@pytest.mark.night
def test_the_example_of_bench_runs(tmp_path: Path) -> None:
    (line,) = examples(cli.bench)
    done = run_bash(f"{line} --json", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {each["baseline"] for each in json.loads(done.stdout)["comparisons"]} == {
        "torch.ops.aten.clone",
        "a copy into given memory",
    }


class TestJson:
    """One document on stdout, which a program reads; nothing else there."""

    @staticmethod
    def ask(*arguments: str | Path, status: int = 0) -> Any:
        done = run_python(*CONSOLE_SCRIPT, *arguments, "--json")
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)

    def test_verify(self, packages: dict[str, Path], tmp_path: Path) -> None:
        answer = self.ask("verify", packages["cpu"])
        assert answer == {"package": str(packages["cpu"]), "verified": True, "kind": "", "text": answer["text"]}
        assert "gives the recorded outputs" in answer["text"]
        (tmp_path / "bad.pt2").write_text("no package")
        refused = self.ask("verify", tmp_path / "bad.pt2", status=1)
        assert (refused["verified"], refused["kind"]) == (False, "not a package")
        assert str(tmp_path / "bad.pt2") in refused["text"]

    def test_run(self, packages: dict[str, Path], tmp_path: Path) -> None:
        torch.save(torch.randn(2, 3, 8, 9), tmp_path / "x.pt")
        answer = self.ask("run", packages["cpu"], tmp_path / "x.pt", tmp_path / "outputs")
        assert (answer["done"], answer["by_others"], answer["device"]) == (1, 0, "cpu")

    def test_cache(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "json_kernels.cpp").write_text(TINY)
        code = (
            f"from identity_conv import Extension\next = Extension('tiny', [{str(tmp_path / 'json_kernels.cpp')!r}])\n"
        )
        (tmp_path / "json_kernels.py").write_text(code)
        place = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])}

        def ask(*arguments: str) -> Any:
            done = run_python(*CONSOLE_SCRIPT, "cache", *arguments, "--json", **place)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        assert ask("list") == []
        before = ask("explain", "json_kernels:ext")
        assert before == {
            "name": "tiny",
            "key": before["key"],
            "built": None,
            "changes": ["there is no finished build of tiny"],
        }
        assert (
            run_python("-c", f"{MARK_AS_COMMAND}import json_kernels; json_kernels.ext.build()", **place).returncode == 0
        )
        after = ask("explain", "json_kernels:ext")
        assert (after["key"], after["changes"]) == (before["key"], [])
        listed = {entry["name"]: entry for entry in ask("list")}["tiny"]
        assert listed["finished"] is True
        assert after["built"] == str(Path(listed["folder"]) / "libtiny.so")
        assert [entry["name"] for entry in ask("clean", "tiny", "--yes")] == ["tiny"]
        assert "tiny" not in {entry["name"] for entry in ask("list")}

    def test_doctor(self) -> None:
        answer = self.ask("doctor", "--quick")
        assert {each["fact"] for each in answer["findings"]} >= {"torch", "C++ compiler", "cache"}
        assert answer["healthy"] is True


def test_a_pipe_gets_rows_that_are_lines_and_no_colours(packages: dict[str, Path]) -> None:
    done = run_python(*CONSOLE_SCRIPT, "inspect", packages["cpu"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    digest = hashlib.sha256(packages["cpu"].read_bytes()).hexdigest()
    assert any(line.split() == ["SHA-256", digest] for line in done.stdout.splitlines())


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_steps_of_long_work_are_for_a_terminal(terminal: bool) -> None:
    code = f"{MARK_AS_COMMAND}from identity_conv import progress; progress.step('halfway')"
    assert stderr_of("-c", code, terminal=terminal) == (b"identity-conv: halfway\r\n" if terminal else b"")


class TestCompletion:
    """In bash, by the line that --help gives."""

    SOURCE = 'eval "$(_IDENTITY_CONV_COMPLETE=bash_source identity-conv)"'

    def complete(self, line: str, folder: Path, **changes: str | Path) -> list[str]:
        """What the function that bash has for the command offers for the last word of `line`."""
        words = line.split(" ")
        script = [
            self.SOURCE,
            f"COMP_WORDS=({' '.join(word or repr('') for word in words)})",
            f"COMP_CWORD={len(words) - 1}",
            "_identity_conv_completion identity-conv",
            "printf '%s\\n' \"${COMPREPLY[@]}\"",
        ]
        done = run_bash("\n".join(script), folder, **changes)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def test_the_line_stands_in_the_help(self) -> None:
        assert self.SOURCE in run_python(*CONSOLE_SCRIPT, "--help").stdout

    @pytest.mark.parametrize(
        ("line", "offered"),
        [
            ("identity-conv ver", ["verify"]),
            ("identity-conv cache ", ["clean", "explain", "list"]),
            ("identity-conv doctor --", ["--json", "--quick", "--help"]),
            ("identity-conv bench op", ["operator"]),
        ],
    )
    def test_completes_without_torch(self, line: str, offered: list[str], without_torch: str, tmp_path: Path) -> None:
        found = self.complete(line, tmp_path, PYTHONPATH=without_torch)
        assert sorted(found) == sorted(offered)

    def test_completes_names_of_builds(self, cache: Path, source: Path, tmp_path: Path) -> None:
        identity_conv.Extension("my_kernels", [source]).build()
        assert self.complete("identity-conv cache clean my", tmp_path) == ["my_kernels"]
