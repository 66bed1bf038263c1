"""`import identity_conv`: builds and says so the first time, is silent ever after, and refuses with a reason."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support_build import MARK_AS_COMMAND, NO_COMPILER, ROOT, listing, run_python

# This process has imported identity_conv, so the operator library is built.
IMPORT = "import identity_conv, sys\n"


def test_a_cold_import_says_what_it_compiles(tmp_path: Path) -> None:
    cold = run_python("-c", IMPORT, IDENTITY_CONV_CACHE_DIR=tmp_path / "cache")
    assert cold.returncode == 0, cold.stderr
    assert cold.stdout == ""
    assert re.search(
        r"^identity_conv: compiling libidentity_conv_ops\.so for CPU.* with (g|clang)\+\+ [\d.]+: "
        r"identity_conv_class\.cpp, identity_conv_op\.cpp.*; once$",
        cold.stderr,
        re.MULTILINE,
    )
    assert re.search(r"^identity_conv: built libidentity_conv_ops\.so in [\d.]+ s$", cold.stderr, re.MULTILINE)
    warm = run_python("-c", IMPORT, IDENTITY_CONV_CACHE_DIR=tmp_path / "cache")
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, "", "")


class TestWarm:
    def test_is_silent_and_needs_no_compiler(self, tmp_path: Path) -> None:
        warm = run_python(
            "-c",
            f"{IMPORT}import torch\n"
            "assert torch.equal(identity_conv.identity_conv(torch.arange(3)), torch.arange(3))\n"
            "assert 'torch.utils.cpp_extension' not in sys.modules\n",
            **NO_COMPILER,
        )
        assert (warm.returncode, warm.stdout, warm.stderr) == (0, "", "")

    def test_serves_a_moved_checkout(self, tmp_path: Path) -> None:
        for name in ("identity_conv", "src"):
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        before = listing(tmp_path)
        moved = run_python("-c", f"{IMPORT}print(identity_conv.__file__)", PYTHONPATH=tmp_path)
        assert (moved.returncode, moved.stderr) == (0, "")
        assert moved.stdout.strip() == str(tmp_path / "identity_conv" / "__init__.py")
        assert listing(tmp_path) == before


class TestRefusal:
    def test_no_compiler(self, tmp_path: Path) -> None:
        refused = run_python(
            "-c",
            f"try:\n    {IMPORT.strip()}\nexcept ImportError as error:\n    print(type(error).__name__, error)",
            IDENTITY_CONV_CACHE_DIR=tmp_path,
            **NO_COMPILER,
        )
        assert refused.stdout.startswith("ToolchainError no C++ compiler found")

    @pytest.mark.parametrize("start", [IMPORT, f"{MARK_AS_COMMAND}from identity_conv.cli import main; main()"])
    def test_an_old_torch(self, start: str, tmp_path: Path) -> None:
        code = f"import torch; torch.__version__ = '2.10.1'\n{start}"
        old = run_python("-c", code, "demo", IDENTITY_CONV_CACHE_DIR=tmp_path, **NO_COMPILER)
        assert old.returncode == 1
        assert "identity_conv needs torch 2.11 or newer, got 2.10.1: pip install 'torch>=2.11'" in old.stderr

    def test_a_torch_newer_than_tested_gets_one_note(self, tmp_path: Path) -> None:
        newer = run_python(
            "-c",
            "import torch; torch.__version__ = '2.99.0a0+git1'\n"
            f"try:\n    {IMPORT.strip()}\nexcept ImportError:\n    pass",
            IDENTITY_CONV_CACHE_DIR=tmp_path,
            **NO_COMPILER,
        )
        assert newer.returncode == 0, newer.stderr
        assert newer.stderr.count("torch 2.99.0a0+git1 is newer than the versions tested (2.11 to 2.14)") == 1


def test_every_public_name_is_there() -> None:
    identity_conv = sys.modules["identity_conv"]
    for name in identity_conv.__all__:
        value = getattr(identity_conv, name)
        assert getattr(value, "__module__", value.__name__).startswith("identity_conv."), name
    assert set(identity_conv.__all__) <= set(dir(identity_conv))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = identity_conv.nothing
