"""README and docs tell the truth: their code runs, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import support_pages
from support_build import ROOT, run_bash
from support_pages import INSTALLING, PAGES, blocks

import identity_conv
from identity_conv import bench, errors, settings
from identity_conv.testing.registry import CHECKS

README = ROOT / "README.md"
DOCS = ROOT / "docs"
IDS = {page: str(page.relative_to(ROOT)) for page in PAGES}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=IDS.get)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    done = run_bash(f"python {support_pages.__file__} {page}", tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_what_is_not_run_says_why_and_is_little() -> None:
    all_blocks = [(page, block) for page in PAGES for block in blocks(page)]
    assert all(block.is_known for _, block in all_blocks)
    left_out = [(page, block) for page, block in all_blocks if block.why_not_run]
    # A comment that isn't on the line before its block says nothing.
    assert sum(page.read_text().count("<!-- not run") for page in PAGES) == len(left_out)
    assert len(left_out) <= len(all_blocks) / 5
    assert all(len(block.why_not_run.split()) > 4 for _, block in left_out)
    assert [block.mark for page, block in all_blocks if block.mark in INSTALLING] == list(INSTALLING)


def test_an_error_of_a_block_names_the_pages_own_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    done = run_bash(f"python {support_pages.__file__} {page}", tmp_path)
    assert done.returncode == 1
    assert f'File "{page}", line 8, in <module>' in done.stderr
    page.write_text("\n\n```sh\nfalse\n```\n")
    assert (
        "page.md, line 4: the script ended with status 1"
        in run_bash(f"python {support_pages.__file__} {page}", tmp_path).stderr
    )
    page.write_text("<!-- not runs: a typo -->\n```python\nprint('run')\n```\n")
    done = run_bash(f"python {support_pages.__file__} {page}", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "page.md, line 3: there is no mark <!-- not runs: a typo --> of a block" in done.stderr
    page.write_text("```rust\n```\n")
    assert "is a file, or says why it isn't run" in run_bash(f"python {support_pages.__file__} {page}", tmp_path).stderr


def _slug(heading: str) -> str:
    """The anchor that a heading has, as the usual renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_within_leads_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if target.startswith("https://"):
                continue
            place, _, anchor = target.partition("#")
            linked = (page.parent / place).resolve() if place else page
            assert linked.is_file(), f"{IDS[page]}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                assert anchor in map(_slug, headings), f"{IDS[page]}: {target}"


def test_every_page_is_linked_from_readme() -> None:
    links = set(re.findall(r"\]\((docs/\w[\w-]*\.md)\)", README.read_text()))
    assert links == {str(page.relative_to(ROOT)) for page in DOCS.glob("*.md")}


def test_every_setting_stands_in_the_table() -> None:
    rows = [f"| `{each.name}` | {each.kind} | {each.default} | {each.meaning} |" for each in settings.ALL]
    assert "\n".join(rows) in (DOCS / "environment.md").read_text()


def test_every_figure_of_speed_is_one_of_a_record() -> None:
    records = [json.loads(file.read_text()) for file in (ROOT / "tests" / "records").glob("bench*.json")]
    tables = [bench.table(record).split("\n\n") for record in records]
    for page in (README, DOCS / "speed.md"):
        told = re.findall(r"^(.+)\n\n(\| what \| µs .*\n(?:\|.*\n)+)", page.read_text(), re.MULTILINE)
        assert told, page
        for machine, rows in told:
            assert any(machine == of and {*rows.splitlines()} <= {*table.splitlines()} for of, table in tables), (
                f"{page}: {machine}"
            )


def test_every_suite_of_bench_stands_in_the_table() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (DOCS / "speed.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(bench.SUITES)


def test_every_check_stands_in_the_table() -> None:
    rows = [f"| `{name}` | {asked} |" for name, asked in CHECKS.items()]
    assert "\n".join(rows) in (DOCS / "testing.md").read_text()


class TestErrors:
    PAGE = (DOCS / "errors.md").read_text()

    def test_every_kind_has_its_row_with_the_name_in_cpp(self) -> None:
        header = (ROOT / "src" / "include" / "identity_conv" / "package.h").read_text()
        names = re.findall(r"^    (k\w+),", header.partition("enum class Kind {")[2].partition("};")[0], re.MULTILINE)
        rows = re.findall(r"^\| `(\w+)`[^|]* \| `([\w ]+)` \| `(k\w+)` \| [^|]+ \| [^|]+ \|$", self.PAGE, re.MULTILINE)
        assert rows == [(each.__name__, each.kind, name) for each, name in zip(errors.BY_KIND, names, strict=True)]

    def test_every_exception_of_the_package_is_there(self) -> None:
        defined = set()
        for path in (ROOT / "identity_conv").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Failure")):
                    defined.add(node.name)
        assert len(defined) > len(errors.BY_KIND)
        assert [name for name in sorted(defined) if f"`{name}`" not in self.PAGE] == []


def test_the_manifests_keys_are_those_of_the_page(packages: dict[str, Path]) -> None:
    keys = re.findall(r"^\| `([\w ]+)` \|", (DOCS / "package.md").read_text(), re.MULTILINE)
    manifest = identity_conv.inspect_package(packages["cpu"])["manifest"]
    assert set(keys) == set(manifest)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("file", ["CMakeLists.txt", "consumer.cpp"])
def test_the_program_of_ones_own_is_the_one_that_is_built(file: str) -> None:
    (block,) = (each for each in blocks(DOCS / "deployment.md") if f"tests/consumer/{file}" in each.mark)
    assert block.text == (ROOT / "tests" / "consumer" / file).read_text()


def test_torchruns_of_one_host_take_a_port_of_their_own() -> None:
    from identity_conv import cli

    scripts = [block.text for page in PAGES for block in blocks(page) if block.language == "sh"]
    lines = [line for text in [*scripts, cli.run.help or ""] for line in text.splitlines() if "torchrun" in line]
    assert len(lines) >= 3
    assert [line for line in lines if "--standalone" not in line] == []


def test_the_commands_of_the_page_are_those_there_are() -> None:
    from identity_conv import cli

    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| (yes )?\|$", (DOCS / "command.md").read_text(), re.MULTILINE)
    told = {name: bool(json) for names, json in rows for name in re.findall(r"`(?:cache )?(\w+)`", names)}
    commands = {**cli.command.commands, **cli.cache.commands}
    del commands["cache"]
    assert told == {name: any(option.name == "as_json" for option in each.params) for name, each in commands.items()}
