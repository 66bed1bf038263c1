"""README tells the truth: its code runs, its table is the one table of settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from identity_conv import settings, targets

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(mark: str, language: str) -> str:
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found.group(1)


def test_the_shortest_script_runs(tmp_path: Path) -> None:
    script = block("runs in the tests", "python") + block("runs in the tests after the first", "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "model.pt2").is_file()


def test_an_authors_kernel_takes_the_road(tmp_path: Path) -> None:
    (tmp_path / "my_kernels.cpp").write_text(block("my_kernels.cpp in the tests", "cpp"))
    script = block("runs in the tests beside my_kernels.cpp", "python")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    torch.save(torch.randn(4, 3), tmp_path / "x.pt")
    command = done.stdout.split()
    program = targets.program().build()
    subprocess.run([program, *command[1:]], cwd=tmp_path, check=True)
    expected = 2 * (torch.load(tmp_path / "x.pt") + 1)
    assert torch.equal(torch.load(tmp_path / "y.pt"), expected)


def test_every_setting_stands_in_the_table() -> None:
    rows = [f"| `{each.name}` | {each.kind} | {each.default} | {each.meaning} |" for each in settings.ALL]
    assert "\n".join(rows) in README
