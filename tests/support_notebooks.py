"""The outputs that the notebooks keep, beside those of another execution.

``python tests/support_notebooks.py notebooks EXECUTED`` says where executed copies of the notebooks show something else
in kind, and ends with 1 then; with ``--keep`` it takes their outputs into the notebooks instead.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The folder of a build, before the library's name.
_BUILD = re.compile(r"/[^\s'\"&;\\]*/builds/\w+/[0-9a-f]{16}/")

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[str]:
    """What a cell shows, in kind: "stdout", or the types of a result."""
    found = whole(cell["outputs"])
    return [each.get("name") or ", ".join([each["output_type"], *sorted(each.get("data", ()))]) for each in found]


def whole(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs without what was said on stderr, which depends on the cache, and with each text in one."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if found and output["output_type"] == found[-1]["output_type"] == "stream":
            text = "".join(found[-1]["text"]) + "".join(output["text"])
            found[-1] = found[-1] | {"text": text.splitlines(keepends=True)}
        else:
            found.append(output)
    return found


def differences(stored: dict[str, Any], executed: dict[str, Any]) -> Iterator[str]:
    """Where an execution shows something else in kind than what is stored, cell by cell."""
    for cell, other in zip(code_cells(stored), code_cells(executed), strict=True):
        if kinds(cell) != kinds(other):
            yield f"{cell['id']} has stored {kinds(cell)}, and showed {kinds(other)}"


def keep(stored: dict[str, Any], executed: dict[str, Any]) -> dict[str, Any]:
    """What is stored, with the outputs of an execution, and without its times and the folders that it built in."""
    for cell, other in zip(code_cells(stored), code_cells(executed), strict=True):
        cell["execution_count"] = other["execution_count"]
        cell["outputs"] = json.loads(_BUILD.sub("", json.dumps(whole(other["outputs"]))))
    return stored


def main(stored: str, executed: str, *options: str) -> int:
    found = 0
    for path in sorted(Path(stored).glob("*.ipynb")):
        copy = Path(executed) / path.name
        if options == ("--keep",):
            path.write_text(json.dumps(keep(load(path), load(copy)), indent=1, ensure_ascii=False) + "\n")
            continue
        for difference in differences(load(path), load(copy)):
            print(f"{path.name}: {difference}: `nox -s notebooks -- --keep` keeps what it showed")
            found += 1
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
