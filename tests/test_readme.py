"""README tells the truth: its code runs, its table is the one table of settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from identity_conv import settings

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_shortest_script_runs(tmp_path: Path) -> None:
    script = re.search(r"<!-- runs in the tests -->\n```python\n(.*?)```", README, re.DOTALL)
    assert script
    subprocess.run([sys.executable, "-c", script.group(1)], cwd=tmp_path, check=True)
    assert (tmp_path / "model.pt2").is_file()


def test_every_setting_stands_in_the_table() -> None:
    rows = [f"| `{each.name}` | {each.default} | {each.meaning} |" for each in settings.ALL]
    assert "\n".join(rows) in README
