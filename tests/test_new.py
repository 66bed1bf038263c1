"""identity-conv new: a project that builds, and whose test and script pass as they were laid down."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from support_build import CONSOLE_SCRIPT, environment, run_project, run_python

from identity_conv import scaffold

EVERY_CHOICE = [parts for size in range(4) for parts in itertools.combinations(scaffold.PARTS, size)]


@pytest.mark.parametrize("parts", EVERY_CHOICE, ids="-".join)
def test_keeps_what_is_asked_for(parts: tuple[str, ...], tmp_path: Path) -> None:
    files = {path.name: path.read_text() for path in scaffold.new("my_filter", parts, folder=tmp_path)}
    assert ("my_filter.cu" in files) == ("cuda" in parts)
    assert ("MyFilter :" in files["my_filter.cpp"]) == ("class" in parts)
    assert ("backward(" in files["my_filter.cpp"]) == ("backward" in parts)
    for name, text in files.items():
        assert not any(word in text for word in ("my_kernel", "MyKernel", *(f"{part}>" for part in scaffold.PARTS)))
        if name.endswith(".py"):
            ast.parse(text)
    assert len(files["README.md"].splitlines()) <= 15


def _walk(folder: Path, parts: tuple[str, ...]) -> None:
    """The project's test and its script pass in processes of their own."""
    scaffold.new("my_filter", parts, folder=folder)
    assert run_project(folder / "my_filter").count("equal") == 2


def test_passes_as_it_was_laid_down(tmp_path: Path, program: Path) -> None:
    _walk(tmp_path, ("class", "backward"))


@pytest.mark.night
@pytest.mark.parametrize("parts", EVERY_CHOICE, ids="-".join)
def test_every_choice_passes_as_it_was_laid_down(parts: tuple[str, ...], tmp_path: Path, program: Path) -> None:
    _walk(tmp_path, parts)


@pytest.mark.gpu
def test_passes_on_a_gpu(tmp_path: Path, program: Path) -> None:
    _walk(tmp_path, scaffold.PARTS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "letters, digits and underscores"),
        ("2d", "letters, digits and underscores"),
        ("my-filter", "letters, digits and underscores"),
        ("a/b", "letters, digits and underscores"),
        ("größe", "letters, digits and underscores"),
        ("_mine", "letters, digits and underscores"),
        ("class", "a word with a meaning of its own"),
        ("linux", "a word with a meaning of its own"),
        ("reference", "a word with a meaning of its own"),
        ("torch", "a module that Python finds already"),
        ("json", "a module that Python finds already"),
        ("double", "a word with a meaning of its own"),
        ("template", "a word with a meaning of its own"),
        ("std", "a word with a meaning of its own"),
        ("c10", "a word with a meaning of its own"),
        ("print", "a word with a meaning of its own"),
        ("x", "a word with a meaning of its own"),
        ("road", "a word with a meaning of its own"),
        ("aten", "one that torch.ops or torch.classes has already"),
        ("prim", "one that torch.ops or torch.classes has already"),
        ("prims", "one that torch.ops or torch.classes has already"),
        ("quantized", "one that torch.ops or torch.classes has already"),
        ("quantized_decomposed", "one that torch.ops or torch.classes has already"),
        ("dist_rpc", "one that torch.ops or torch.classes has already"),
        ("higher_order", "one that torch.ops or torch.classes has already"),
        ("name", "one that torch.ops or torch.classes has already"),
        ("load_library", "one that torch.ops or torch.classes has already"),
        ("my_ops", "one that torch.ops or torch.classes has already"),
    ],
)
def test_names_that_can_not_be_taken(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"NAME must .*{reason}.*, got {name!r}"):
        scaffold.new(name, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").write_text("kept")
    done = subprocess.run(
        [sys.executable, *CONSOLE_SCRIPT, "new", "mine"],
        cwd=tmp_path,
        env=environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == f"identity-conv: new: NAME must be that of a folder that isn't there yet, and {tmp_path}/mine is\n"
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["kept"]


def test_the_program_is_a_command_too() -> None:
    done = run_python("-c", "from _identity_conv_entry import run_program; run_program()", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: identity-conv-run PACKAGE")
