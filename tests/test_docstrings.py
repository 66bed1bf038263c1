"""Every public name says what it is, what it takes and what it raises, to people who read nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import identity_conv
from identity_conv import testing

MODULES = (identity_conv, testing)
PUBLIC = [
    (module.__name__, name)
    for module in MODULES
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
]


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines itself, or takes from a class of this package."""
    for name, member in inspect.getmembers_static(owner):
        home = next(each for each in owner.__mro__ if name in vars(each))
        if name.startswith("_") or not home.__module__.startswith("identity_conv"):
            continue
        if isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member):
            yield name, member


def raises(function: Any) -> bool:
    """Whether the text of a function has a raise; decorators hide its source from inspect."""
    tree = ast.parse(Path(inspect.getfile(importlib.import_module(function.__module__))).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__)
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(found))


def described(text: str) -> set[str]:
    """The arguments and attributes that a text describes."""
    _, _, listed = re.sub(r"^(Returns|Raises|Example|Shape):.*", "", text, flags=re.DOTALL | re.MULTILINE).partition(
        ":\n"
    )
    return {name for line in re.findall(r"^    ([\w, ]+):", listed, re.MULTILINE) for name in line.split(", ")}


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[f"{module}.{name}" for module, name in PUBLIC])
def test_says_what_it_is(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    text = inspect.getdoc(thing) or ""
    assert text
    assert not text.startswith(f"{name}("), "a dataclass writes its signature where there is no text"
    if inspect.isclass(thing):
        if issubclass(thing, torch.nn.Module):
            assert "Shape:" in text  # forward's
        else:
            assert [each for each, member in members(thing) if not inspect.getdoc(member)] == []
    else:
        assert set(inspect.signature(thing).parameters) - described(text) == set()
        assert "Raises:" in text or not raises(thing)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_names_are_sorted_and_found(module: Any) -> None:
    assert sorted(module.__all__) == module.__all__
    assert set(module.__all__) <= set(dir(module))
