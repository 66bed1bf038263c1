"""The wheel and the sdist: each ships the sources; a wheel builds from them, and writes nothing beside them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from support_build import NO_COMPILER, ROOT, listing, run_python, write_program

import identity_conv
from identity_conv import toolchain

SOURCES = {
    str(path.relative_to(ROOT))
    for path in (ROOT / "src").rglob("*")
    if path.suffix in {".cpp", ".cu", ".h", ".cmake"} or path.name == "CMakeLists.txt"
}


#: What a clone has, beside what tools leave in it.
FOLDERS = (".ci", "docs", "identity_conv", "notebooks", "src", "tests")
FILES = sorted(
    path.name
    for path in ROOT.iterdir()
    if path.suffix in {".md", ".toml", ".in"}
    or path.name in {"LICENSE", "noxfile.py", ".clang-format", ".gitignore", ".pre-commit-config.yaml"}
)
LEFT_BY_TOOLS = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints", ".kernel_corpus", ".*_cache")


def pip(*arguments: str | Path) -> None:
    done = run_python("-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, PYTHONPATH=None)
    assert done.returncode == 0, done.stderr


def build(kind: str, source: Path, folder: Path) -> tuple[Path, str]:
    """Builds a wheel or an sdist in the folder of its source, as its backend does; returns it and what was said."""
    code = (
        f"import os; os.chdir({str(source)!r}); from setuptools import build_meta as b; b.build_{kind}({str(folder)!r})"
    )
    before = set(folder.glob("identity_conv-*"))
    # Without bytecode the backend warns that it makes none.
    done = run_python("-c", code, PYTHONPATH=None, PYTHONDONTWRITEBYTECODE=None)
    assert done.returncode == 0, done.stderr
    (made,) = set(folder.glob("identity_conv-*")) - before
    return made, done.stdout + done.stderr


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by name, but for the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this clone: the build backend writes beside the sources."""
    copy = tmp_path_factory.mktemp("clone") / "clone"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=LEFT_BY_TOOLS)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, said = build("sdist", clone, tmp_path_factory.mktemp("sdist"))
    assert "warning" not in said.lower()
    return made


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, said = build("wheel", clone, tmp_path_factory.mktemp("wheel"))
    assert "warning" not in said.lower()
    return made


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


def test_ships_every_source_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "identity_conv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "entry" not in path.parts
    }
    assert "identity_conv/py.typed" in own
    modules = {path.name for path in (ROOT / "identity_conv" / "entry").glob("*.py")}
    described = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert {name for name in names if not name.startswith(described)} == {
        *(f"identity_conv/{name}" for name in SOURCES),
        *own,
        *modules,
    }


def test_an_sdist_is_the_clone(clone: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    generated = {"PKG-INFO", "setup.cfg"}

    def files(folder: Path) -> dict[str, bytes]:
        found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        made = ("build", ".egg-info")
        return {str(name): path.read_bytes() for name, path in found.items() if not name.parts[0].endswith(made)}

    ours, theirs = files(clone), files(unpacked)
    assert "src/ops/identity_conv_op.cpp" in ours
    assert set(theirs) - generated == set(ours)
    assert {name: theirs[name] for name in ours} == ours


def test_a_wheel_of_the_sdist_is_the_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "made").mkdir()
    made, said = build("wheel", unpacked, tmp_path / "made")
    assert "warning" not in said.lower()
    assert made.name == wheel.name
    assert contents(made) == contents(wheel)


def test_what_it_says_of_itself(wheel: Path) -> None:
    described = message_from_bytes(next(text for name, text in contents(wheel).items() if name.endswith("/METADATA")))
    assert described["Name"] == "identity-conv"
    assert described["Version"] == identity_conv.__version__
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.11"
    assert set(described.get_all("Provides-Extra")) >= {"test", "testing"}
    assert described.get_all("Project-URL") is None
    assert described.get_payload(decode=True) == (ROOT / "README.md").read_bytes()


def test_the_version_is_the_changelogs() -> None:
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest
    assert latest[1] == identity_conv.__version__


def test_import_finds_the_same_build_as_the_clone(site: Path, tmp_path: Path) -> None:
    code = (
        "import identity_conv, torch\n"
        "print(identity_conv.__file__)\n"
        "assert torch.equal(identity_conv.identity_conv(torch.arange(3)), torch.arange(3))\n"
    )
    done = run_python("-c", code, PYTHONPATH=site, **NO_COMPILER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(site / "identity_conv" / "__init__.py")


def test_builds_from_its_sources_and_writes_nothing_beside_them(site: Path, tmp_path: Path) -> None:
    before = listing(site)
    # A compiler that stops at the worked example's class leaves the build where a real one would.
    compiler = write_program(
        tmp_path / "bin" / "g++", f'case "$*" in *" -c "*) exit 1;; esac\nexec {toolchain.find_cxx()} "$@"'
    )
    done = run_python(
        "-c", "import identity_conv", PYTHONPATH=site, CXX=compiler, IDENTITY_CONV_CACHE_DIR=tmp_path / "cache"
    )
    assert "CompileError: libidentity_conv_ops.so doesn't build" in done.stderr
    assert str(site / "identity_conv" / "src" / "ops") in next((tmp_path / "cache").rglob("build.log")).read_text()
    assert listing(site) == before


def test_console_script(site: Path, tmp_path: Path) -> None:
    script = site / "bin" / "identity-conv"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([script, "--version"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("identity-conv, version ")
