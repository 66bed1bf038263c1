"""The notebooks as they are stored: executed to the end, with outputs that name no machine."""

from __future__ import annotations

import copy
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support_notebooks import NOTEBOOKS, code_cells, differences, keep, load, main

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
each = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])

#: A folder that a machine has, as the beginning of a path.
MACHINE = re.compile(r"(?<![\w.~/<])/(?:tmp|home|root|Users|usr|opt|var|work|mnt|private|builds?|site-packages)/[\w.]")


def texts(value: Any) -> list[str]:
    """Every text in an output, lines joined."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ["".join(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in texts(item)]


@each
def test_it_was_executed_in_order_to_the_end(path: Path) -> None:
    cells = code_cells(load(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert sum(bool(cell["outputs"]) for cell in cells) >= 3


@each
def test_a_cell_that_ends_in_a_value_shows_it(path: Path) -> None:
    for cell in code_cells(load(path)):
        last = "".join(cell["source"]).rstrip().split("\n")[-1]
        if re.fullmatch(r"[a-z_]+|print\(.*\)|graph\(\w+\)", last):
            assert cell["outputs"], cell["id"]


@each
def test_no_output_names_a_folder_of_a_machine(path: Path) -> None:
    for cell in code_cells(load(path)):
        for text in texts(cell["outputs"]):
            found = MACHINE.search(text)
            assert not found, f"{cell['id']}: {text[found.start() - 40 : found.start() + 80]}"


@each
def test_it_keeps_no_time_and_no_note_of_a_build(path: Path) -> None:
    cells = load(path)["cells"]
    assert not [cell["id"] for cell in cells if cell["metadata"]]
    assert not [output for cell in cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]


@each
def test_it_says_what_differs_on_a_gpu(path: Path) -> None:
    prose = "".join("".join(cell["source"]) for cell in load(path)["cells"] if cell["cell_type"] == "markdown")
    assert "GPU" in prose


def notebook(*outputs: dict[str, Any]) -> dict[str, Any]:
    cell = {"cell_type": "code", "id": "cell-1", "metadata": {}, "source": "", "outputs": list(outputs)}
    return {"cells": [cell | {"execution_count": 1}]}


PRINTED = {"output_type": "stream", "name": "stdout", "text": "a"}
SHOWN = {"output_type": "execute_result", "data": {"text/html": "<p>a</p>", "text/plain": "a"}, "metadata": {}}


@pytest.mark.parametrize(
    "changed",
    [
        notebook(),
        notebook(PRINTED),
        notebook(SHOWN),
        notebook(SHOWN, PRINTED),
        notebook(PRINTED, SHOWN | {"data": {"text/plain": "a"}}),
        notebook(PRINTED, SHOWN, {"output_type": "error", "ename": "ValueError"}),
    ],
)
def test_outputs_of_another_kind_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Any) -> None:
    assert list(differences(notebook(PRINTED, SHOWN), changed))
    for folder, content in (("stored", notebook(PRINTED, SHOWN)), ("executed", changed)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.ipynb").write_text(json.dumps(content))
    assert main(str(tmp_path / "stored"), str(tmp_path / "executed")) == 1
    assert "a.ipynb: cell-1 has stored ['stdout', 'execute_result, text/html, text/plain']" in capsys.readouterr().out
    assert main(str(tmp_path / "stored"), str(tmp_path / "executed"), "--keep") == 0
    assert main(str(tmp_path / "stored"), str(tmp_path / "executed")) == 0


def test_the_folder_of_a_build_is_not_kept() -> None:
    program = "torch.ops.load_library('/any/cache/builds/a_b/0123456789abcdef/liba_b.so')\n"
    shown = PRINTED | {"text": [program]}, SHOWN | {"data": {"text/html": html.escape(program)}}
    kept = keep(notebook(PRINTED, SHOWN), notebook(*shown))
    assert texts(code_cells(kept)[0]["outputs"])[2:] == [
        "torch.ops.load_library('liba_b.so')\n",
        "execute_result",
        html.escape("torch.ops.load_library('liba_b.so')\n"),
    ]


def test_outputs_of_one_kind_are_equal_and_notes_of_a_build_are_not_kept() -> None:
    built = {"output_type": "stream", "name": "stderr", "text": "compiling"}
    executed = notebook(built, PRINTED, PRINTED | {"text": "b"}, copy.deepcopy(SHOWN) | {"metadata": {"time": 1}})
    assert not list(differences(notebook(PRINTED, SHOWN), executed))
    assert built not in keep(notebook(PRINTED, SHOWN), executed)["cells"][0]["outputs"]
