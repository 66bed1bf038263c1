"""The settings and the compiler that AOTInductor is given."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from support_build import environment, run_python, write_program

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


COMPILE = """
import sys, torch, identity_conv
from pathlib import Path
from identity_conv import aotinductor
from torch._inductor import codecache, utils
# Weights of 2 GB that aren't.
mapped = utils.determine_aoti_mmap_flags
utils.determine_aoti_mmap_flags = codecache.determine_aoti_mmap_flags = lambda size: mapped(size * MULTIPLE)
model = torch.nn.Linear(64, 64, device=sys.argv[3])
program = identity_conv.export(model, (torch.randn(2, 64, device=sys.argv[3]),))
given = {"cpp.cxx": (None, sys.argv[2]), "cpp.vec_isa_ok": True} | GIVEN
try:
    aotinductor.compile_program(program, Path(sys.argv[1]), aotinductor.configs(given))
finally:
    Path(sys.argv[4]).open("a").write("left\\n")
"""


class Compiling:
    """A compile_program in a process of its own, where nothing is remembered, by a compiler that notes what it does.

    It compiles nothing: a precompiled header takes `seconds`, the rest of the model none.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float = 1,
        *,
        given: str = "{}",
        multiple: int = 1,
        device: str = "cpu",
        jobs: str = "2",
    ):
        self.noted, self.package = folder / "noted", folder / "model.pt2"
        self.noted.touch()
        (folder / "cache").mkdir()
        real = aotinductor.configs(None)["cpp.cxx"][1]
        compiler = write_program(
            folder / "g++",
            f'note() {{ echo "$@" >> {self.noted}; }}\n'
            'for last; do :; done; case "$*" in\n'
            f"*c++-header*) note begin $$ $*; sleep {seconds}; touch $last; note end; exit;;\n"
            f'*.cpp*" -c "*) note compile $$ $*; exec {real} -x c++ /dev/null -c -o $last;;\n'
            f'esac; exec {real} "$@"',
        )
        changes = {"TMPDIR": folder / "cache", "TORCHINDUCTOR_CACHE_DIR": folder / "cache", "MAX_JOBS": jobs}
        code = COMPILE.replace("GIVEN", given).replace("MULTIPLE", str(multiple))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.package, compiler, device, self.noted],
            cwd="/",
            env=environment(changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for_headers(self) -> None:
        deadline = time.monotonic() + 100
        while self.order().count("begin") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self) -> str:
        """Waits for the end, and returns what was printed."""
        return self.process.communicate(timeout=250)[0]

    def order(self) -> list[str]:
        """What was done, in time."""
        return [line.split()[0] for line in self.noted.read_text().splitlines()]

    def commands(self, what: str) -> list[list[str]]:
        """The words of the commands that began a header, or compiled a source; the first is the process."""
        notes = [line.split() for line in self.noted.read_text().splitlines()]
        return [words for first, *words in notes if first == what]


def flags(words: list[str]) -> set[str]:
    """Those by which a compiler takes a precompiled header or leaves it."""
    return {word for word in words[1:] if not word.startswith("/")} - {"-x", "c++-header", "-c", "-include"}


@pytest.mark.parametrize(
    ("given", "multiple"),
    [("{}", 1), ("{}", 1_000_000), ('{"aot_inductor.package_constants_in_so": False, "cpp.simdlen": 256}', 1_000_000)],
    ids=["plain", "more than 2 GB", "other settings"],
)
def test_headers_are_precompiled_side_by_side_and_are_those_that_inductor_takes(
    tmp_path: Path, device: str, given: str, multiple: int
) -> None:
    compiling = Compiling(tmp_path, given=given, multiple=multiple, device=device)
    text = compiling.finish()
    assert compiling.process.returncode == 0, text
    headers = {words[-1].removesuffix(".gch"): flags(words) for words in compiling.commands("begin")}
    compiled = [words for words in compiling.commands("compile") if "-include" in words]
    assert headers == {words[words.index("-include") + 1]: flags(words) for words in compiled}
    assert len(compiling.commands("begin")) == {"cpu": 2, "cuda": 1}[device]
    if device == "cpu":
        assert compiling.order() == ["begin", "begin", "end", "end", "compile", "compile", "left"]


def test_no_more_compilers_run_at_once_than_max_jobs_says(tmp_path: Path) -> None:
    compiling = Compiling(tmp_path, jobs="1")
    text = compiling.finish()
    assert compiling.process.returncode == 0, text
    assert compiling.order()[:4] == ["begin", "end", "begin", "end"]


def test_where_headers_are_not_precompiled_none_is(tmp_path: Path) -> None:
    compiling = Compiling(tmp_path, given='{"aot_inductor.precompile_headers": False}')
    text = compiling.finish()
    assert compiling.process.returncode == 0, text
    assert "begin" not in compiling.order()


def test_without_a_header_ahead_inductor_does_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(*args: object, **kwargs: object) -> None:
        asked.append(args)
        raise RuntimeError("no header today")

    monkeypatch.setattr(aotinductor, "_precompile_header", fail)
    program = identity_conv.export(torch.nn.Linear(4, 4), (torch.randn(3, 4),))
    aotinductor.compile_program(program, tmp_path / "model.pt2", aotinductor.configs(None))
    assert len(asked) == 2
    assert torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(torch.zeros(3, 4)).shape == (3, 4)


def test_an_interrupt_leaves_no_compiler_running(tmp_path: Path) -> None:
    compiling = Compiling(tmp_path, seconds=4)
    compiling.wait_for_headers()
    compiling.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in compiling.finish()
    assert compiling.order() == ["begin", "begin", "end", "end", "left"]
    assert not compiling.package.exists()
