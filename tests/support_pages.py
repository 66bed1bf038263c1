"""README and the pages of docs as programs: the blocks of a page run in order, in one folder.

Every block of a language that a machine reads is run, but for what a comment on the line before it says:

    <!-- runs in the tests -->      no more than that, for readers; also "beside NAME"
    <!-- NAME in the tests -->      the block is the file NAME
    <!-- not run: REASON -->        it isn't run, and why
    <!-- the main command -->       README's two commands, which install: .ci/run runs what the second says

Another comment there is an error. Python blocks of a page share their names; a block of sh is a script of bash that
stops at the first failure.

As a program (`python support_pages.py PAGE`) it runs one page in the working folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
INSTALLING = ("the main command", "the test command")

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the comment before it, its text and the line that it begins on."""

    language: str
    mark: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that it is, or None."""
        found = re.fullmatch(r"(\S+\.\w+) in the tests", self.mark)
        return found and found[1]

    @property
    def is_known(self) -> bool:
        """Whether its mark is one of those above, or none."""
        told = re.fullmatch(r"(runs in the tests( beside \S+\.\w+)?)?", self.mark)
        return bool(told or self.file or self.why_not_run or self.mark in INSTALLING)

    @property
    def why_not_run(self) -> str | None:
        """The reason why it isn't run, or None."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, but for drawings and output, which have no language or are text."""
    content = page.read_text()
    found = [
        Block(each["language"], each["mark"] or "", each["text"], content.count("\n", 0, each.start("text")) + 1)
        for each in _BLOCK.finditer(content)
    ]
    return [each for each in found if each.language not in ("", "text")]


def run(page: Path) -> None:
    """Runs a page in the working folder; an error names the page's own line."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.is_known:
            sys.exit(f"{page.name}, line {block.line}: there is no mark <!-- {block.mark} --> of a block")
        if block.why_not_run or block.mark in INSTALLING:
            continue
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
        elif block.language == "sh":
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=False)
            if done.returncode:
                sys.exit(f"{page.name}, line {block.line}: the script ended with status {done.returncode}")
        else:
            sys.exit(f"{page.name}, line {block.line}: a block of {block.language} is a file, or says why it isn't run")


if __name__ == "__main__":
    sys.path.insert(0, "")
    run(Path(sys.argv[1]))
