"""The settings and the compiler that AOTInductor is given."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from support_build import run_python

import identity_conv
from identity_conv import aotinductor, toolchain

PICK_VECTORS = """
from identity_conv import aotinductor
from torch._inductor import config, cpu_vec_isa
with config.patch(CONFIGS):
    print(cpu_vec_isa.pick_vec_isa())
"""


def regex_symbols(package: Path, folder: Path) -> list[str]:
    """The names of std::regex that the package's code shares with other libraries."""
    with zipfile.ZipFile(package) as archive:
        code = next(name for name in archive.namelist() if name.endswith(".so") and "/lib/" not in name)
        library = archive.extract(code, folder)
    listed = subprocess.run(["nm", "-DC", library], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "std::__detail::_Compiler" in line]


@pytest.mark.skipif(not 12 <= toolchain.compiler().version[0] <= 15, reason="regex.h names g++ 12 to 15")
def test_std_regex_is_compiled_once_and_kept_inside(packages: dict[str, Path], tmp_path: Path) -> None:
    assert regex_symbols(packages["cpu"], tmp_path) == []
    program = identity_conv.export(torch.nn.Linear(4, 4), (torch.randn(3, 4),))
    stock = tmp_path / "stock.pt2"
    configs = {"cpp.cxx": (None, aotinductor.linking_compiler())}
    torch._inductor.aoti_compile_and_package(program, package_path=str(stock), inductor_configs=configs)
    assert regex_symbols(stock, tmp_path) != []


@pytest.mark.skipif(toolchain.platform() != "linux x86_64", reason="elsewhere torch asks for itself")
def test_no_program_is_compiled_to_learn_that_the_compiler_has_vectors(tmp_path: Path) -> None:
    compiled = []
    for given in ("aotinductor.configs(None)", '{"cpp.cxx": (None, aotinductor.linking_compiler())}'):
        cache = tmp_path / str(len(compiled))
        done = run_python("-c", PICK_VECTORS.replace("CONFIGS", given), TORCHINDUCTOR_CACHE_DIR=cache)
        assert done.returncode == 0, done.stderr
        compiled.append(sum("at::vec::" in source.read_text() for source in cache.rglob("*.cpp")))
    assert compiled[0] == 0 < compiled[1]


def test_a_compiler_without_the_vectors_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    real = toolchain.compiler().path
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" -mavx512f "*) exit 1 ;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    assert "cpp.vec_isa_ok" not in aotinductor.configs(None)


def test_what_the_caller_says_wins() -> None:
    assert aotinductor.configs({"cpp.vec_isa_ok": False})["cpp.vec_isa_ok"] is False
    # A compiler of the caller's may lack the vectors that ours has.
    assert aotinductor.configs({"cpp.cxx": (None, "other-g++")}).keys() & {"cpp.cxx", "cpp.vec_isa_ok"} == {"cpp.cxx"}
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        assert "cpp.vec_isa_ok" not in aotinductor.configs(None)


@pytest.mark.parametrize("found", [None, "/usr/bin/openssl"])
def test_where_openssl_is_missing_headers_are_not_precompiled(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *rest: found if name == "openssl" else which(name, *rest))
    assert aotinductor.configs(None).get("aot_inductor.precompile_headers", True) is bool(found)
