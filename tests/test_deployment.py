"""The package where there is nothing else: no Python, no compiler, no cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support_build import MODULE, NO_COMPILER, ROOT, listing, run_python

import identity_conv


def link(file: Path, root: Path) -> None:
    """Puts `file` at its own path below `root`."""
    target = root / file.relative_to("/")
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copy(file, target)


@pytest.fixture
def bare_root(program: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the program in a root of its own: itself, the libraries that it is linked with, and /tmp."""
    root = tmp_path / "root"
    (root / "tmp").mkdir(parents=True)
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for file in [program, *map(Path, re.findall(r"(/\S+) \(0x", listed))]:
        link(file, root)
    assert not list(root.rglob("*libpython*"))

    def run(*arguments: Path | str, give: Path, processor: str = "") -> subprocess.CompletedProcess[str]:
        shutil.copy(give, root / give.name)
        if processor:
            (root / "proc").mkdir()
            (root / "proc" / "cpuinfo").write_text(processor)
        enter = ["chroot"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot"]
        enter[0] = shutil.which(enter[0], path="/usr/sbin:/usr/bin:/sbin:/bin") or enter[0]
        command = [*enter, root, program, f"/{give.name}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={})

    return run


def test_without_python_or_compilers_it_verifies(
    bare_root: Callable[..., subprocess.CompletedProcess[str]], packages: dict[str, Path]
) -> None:
    done = bare_root("--verify", give=packages["cpu"])
    assert done.returncode == 0, done.stderr
    assert "gives the recorded outputs" in done.stdout


@pytest.mark.parametrize("processor", ["with more", "with less"])
def test_instruction_sets_are_a_superset(
    bare_root: Callable[..., subprocess.CompletedProcess[str]], packages: dict[str, Path], processor: str
) -> None:
    needed = identity_conv.inspect_package(packages["cpu"])["manifest"]["host"]["instruction sets"]
    assert needed
    has = [*needed, "avx1024f"] if processor == "with more" else [*needed[1:], "avx1024f"]
    # This machine's but for the flags: torch reads the processors out of it too, and falls over where there is none.
    described = re.sub(r"(?m)^(flags\s*:).*$", rf"\1 {' '.join(has)}", Path("/proc/cpuinfo").read_text())
    done = bare_root("--verify", give=packages["cpu"], processor=described)
    if processor == "with more":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1
        assert f"uses instructions that this processor lacks: {needed[0]}\n" in done.stderr


def test_with_a_prefix_python_needs_no_compiler_and_no_cache(packages: dict[str, Path], tmp_path: Path) -> None:
    made = run_python(*MODULE, "build", "--prefix", tmp_path / "prefix")
    assert made.returncode == 0, made.stderr
    place = {"IDENTITY_CONV_PREFIX": tmp_path / "prefix", "IDENTITY_CONV_CACHE_DIR": tmp_path / "cache", **NO_COMPILER}
    before = listing(tmp_path / "prefix")
    for command in ("inspect", "verify"):
        done = run_python(*MODULE, command, packages["cpu"], **place)
        assert (done.returncode, done.stderr) == (0, "")
    code = (
        "import sys, torch, identity_conv; x = torch.randn(2, 3, 8, 9)\n"
        "print(torch.allclose(identity_conv.load_package(sys.argv[1])(x), x, atol=1e-5))\n"
    )
    done = run_python("-c", code, packages["cpu"], **place)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert not (tmp_path / "cache").exists()
    assert listing(tmp_path / "prefix") == before


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake isn't installed")
def test_a_project_of_ones_own_finds_the_installed_runtime(packages: dict[str, Path], tmp_path: Path) -> None:
    torchs = torch.utils.cmake_prefix_path
    for source, build, more in [
        (ROOT / "src", tmp_path / "build", [f"-DCMAKE_PREFIX_PATH={torchs}"]),
        (ROOT / "tests" / "consumer", tmp_path / "own", [f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'};{torchs}"]),
    ]:
        subprocess.run(["cmake", "-S", source, "-B", build, *more], check=True)
        subprocess.run(["cmake", "--build", build, "-j2"], check=True)
        if source.name == "src":
            subprocess.run(["cmake", "--install", build, "--prefix", tmp_path / "installed"], check=True)
    assert (tmp_path / "installed" / "include" / "identity_conv" / "package.h").is_file()
    done = subprocess.run([tmp_path / "own" / "consumer", packages["cpu"]], capture_output=True, text=True, check=True)
    assert "gives the recorded outputs" in done.stdout
    assert "432" in done.stdout
    program = tmp_path / "installed" / "bin" / "identity-conv-run"
    subprocess.run([program, packages["cpu"], "--verify"], check=True, env={})
