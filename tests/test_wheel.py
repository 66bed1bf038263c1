"""The wheel: it ships the sources, builds from them, and writes nothing beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from support_build import NO_COMPILER, ROOT, listing, run_python, write_program

from identity_conv import toolchain

SOURCES = {
    str(path.relative_to(ROOT))
    for path in (ROOT / "src").rglob("*")
    if path.suffix in {".cpp", ".cu", ".h", ".cmake"} or path.name == "CMakeLists.txt"
}


def pip(*arguments: str | Path) -> None:
    done = run_python("-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, PYTHONPATH=None)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone, made in a copy: the build backend writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "clone"
    for name in ("identity_conv", "src"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy)
    (made,) = folder.glob("identity_conv-*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


def test_ships_every_source_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"identity_conv/{name}" for name in SOURCES} <= names
    template = (ROOT / "identity_conv" / "template").iterdir()
    assert {str(path.relative_to(ROOT)) for path in template if path.is_file()} <= names
    assert {name.split("/")[0] for name in names} == {
        "identity_conv",
        "_identity_conv_entry.py",
        "_identity_conv_pytest.py",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }


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
