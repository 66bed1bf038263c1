"""Extension: one build for one set of sources, flags, compiler and torch; and a reason when there is none."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support_build import MARK_AS_COMMAND, TINY, environment, listing, stderr_of, write_program

from identity_conv import BuildError, CompileError, Extension, ToolchainError, ops, toolchain
from identity_conv.building import Target
from identity_conv.cache import STAMP, entries, last_seconds

# A build that waits for ever is a failure too.
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cache")]

REAL_CXX = toolchain.find_cxx()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_build(source: Path, **changes: str | Path) -> subprocess.Popen[str]:
    """Another process that builds `source`."""
    code = f"{MARK_AS_COMMAND}from identity_conv import Extension; print(Extension('tiny', [{str(source)!r}]).build())"
    return subprocess.Popen([sys.executable, "-c", code], env=environment(changes), stdout=subprocess.PIPE, text=True)


class TestKey:
    """What the name of a build depends on."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        (tmp_path / "near").mkdir()
        (tmp_path / "near" / "main.cpp").write_text('#include "size.h"\n#include <far.h>\n')
        (tmp_path / "near" / "size.h").write_text("// near\n")
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "far.h").write_text('#  include "size.h"\n')
        (tmp_path / "far" / "size.h").write_text("// far\n")
        return tmp_path

    @staticmethod
    def key(tree: Path, **options) -> str:
        return Extension("sized", [tree / "near" / "main.cpp"], include_dirs=[tree / "far"], **options).key

    def test_stays_when_a_file_is_written_again_with_the_same_text(self, tree: Path) -> None:
        before = self.key(tree)
        for path in tree.rglob("*.*"):
            path.write_bytes(path.read_bytes())
            os.utime(path, (0, 0))
        assert self.key(tree) == before

    def test_stays_in_another_folder(self, tree: Path) -> None:
        before = self.key(tree)
        assert self.key(shutil.copytree(tree, tree / "moved")) == before

    @pytest.mark.parametrize("name", ["near/main.cpp", "near/size.h", "far/far.h", "far/size.h"])
    def test_changes_with_a_file_that_is_reached(self, tree: Path, name: str) -> None:
        before = self.key(tree)
        with (tree / name).open("a") as file:
            file.write("// changed\n")
        assert self.key(tree) != before

    @pytest.mark.parametrize("flags", ["cflags", "ldflags"])
    def test_changes_with_a_flag(self, tree: Path, flags: str) -> None:
        assert self.key(tree, **{flags: ["-g"]}) != self.key(tree)

    def test_changes_with_torch_and_the_compiler(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        before = self.key(tree)
        monkeypatch.setattr(torch, "__version__", "2.13.9")
        another_torch = self.key(tree)
        monkeypatch.setenv("CXX", str(write_program(tmp_path / "bin" / "g++", "echo 'g++ (X) 99.1.0'")))
        another_compiler = self.key(tree)
        write_program(tmp_path / "bin" / "g++", "echo 'g++ (X) 99.10.0'")
        assert len({before, another_torch, another_compiler, self.key(tree)}) == 4

    def test_only_a_program_depends_on_where_torch_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A library is loaded after torch; a program finds torch by itself.
        before = ops.extension.key, ops.targets.program().parts()
        monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
        assert ops.extension.key == before[0]
        assert ops.targets.program().parts() != before[1]

    @pytest.mark.skipif(bool(torch.version.cuda), reason="this torch has CUDA")
    def test_a_torch_without_cuda_ignores_the_architectures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = ops.extension.key
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
        assert ops.extension.key == before

    @pytest.mark.skipif(bool(torch.version.cuda), reason="this torch has CUDA")
    def test_says_once_that_the_architectures_are_ignored(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "kernel.cu").write_text("")
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
        for _ in range(2):
            Extension("tiny", [source, tmp_path / "kernel.cu"]).build()
        text = capfd.readouterr().err
        assert text.count("TORCH_CUDA_ARCH_LIST is set and ignored: torch") == 1


class TestBuild:
    def test_is_made_once_and_found_again(
        self, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        built = Extension("tiny", [source]).build()
        assert built.name == "libtiny.so"
        assert re.search(
            r"compiling libtiny\.so for CPU with (g|clang)\+\+ \S+: tiny\.cpp; once$",
            capfd.readouterr().err,
            re.MULTILINE,
        )
        before = listing(cache)
        assert Extension("tiny", [source]).build() == built
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        assert Extension("tiny", [source]).build() == built
        assert listing(cache) == before
        assert capfd.readouterr() == ("", "")

    def test_says_how_long_it_took_last_time(self, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
        Extension("tiny", [source]).build()
        (took,) = re.findall(r"built libtiny\.so in ([\d.]+) s$", capfd.readouterr().err, re.MULTILINE)
        source.write_text(TINY.replace("42", "43"))
        Extension("tiny", [source]).build()
        (last,) = re.findall(r"tiny\.cpp; ([\d.]+) s last time$", capfd.readouterr().err, re.MULTILINE)
        assert abs(float(took) - float(last)) < 0.5
        assert last_seconds("tiny", "libtiny.a") is None  # nobody has made that of this name

    @pytest.mark.parametrize("way", ["macro", "-I flag", "-include flag", "linked object"])
    def test_is_made_again_when_a_file_changes_that_only_the_compilers_know(
        self, source: Path, tmp_path: Path, way: str
    ) -> None:
        far = tmp_path / "far"
        far.mkdir()
        (far / "value.h").write_text("#define VALUE 1\n")
        head = {
            "macro": f'#define HEADER "{far}/value.h"\n#include HEADER\n',
            "-I flag": "#include <value.h>\n",
            "-include flag": "",
            "linked object": 'extern "C" int value();\n#define VALUE value()\n',
        }[way]
        cflags = {"-I flag": [f"-I{far}"], "-include flag": ["-include", f"{far}/value.h"]}.get(way, [])
        ldflags = [f"{far}/value.o"] if way == "linked object" else []
        source.write_text(head + TINY.replace("42", "VALUE"))

        def build(value: int) -> int:
            (far / "value.h").write_text(f"#define VALUE {value}\n")
            (far / "value.c").write_text(f"int value(void) {{ return {value}; }}\n")
            subprocess.run(["gcc", "-fPIC", "-c", far / "value.c", "-o", far / "value.o"], check=True)
            built = Extension("tiny", [source], cflags=cflags, ldflags=ldflags).build()
            code = f"import ctypes; print(ctypes.CDLL({str(built)!r}).answer())"
            return int(subprocess.check_output([sys.executable, "-c", code]))

        assert [build(1), build(2), build(2)] == [1, 2, 2]

    @pytest.mark.parametrize(
        "way",
        [
            "a macro given as a flag",
            "__has_include, made later",
            "shadowed by a new one",
            "-isystem flag",
            "CPATH",
            "CPLUS_INCLUDE_PATH",
            "response file",
            "incbin",
        ],
    )
    def test_is_made_again_when_what_it_reads_changes(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        near, far = tmp_path / "near", tmp_path / "far"
        for folder in (near, far):
            folder.mkdir()
        value, options = far / "value.h", {"include_dirs": [near, far]}
        value.write_text("#define VALUE 1\n")
        text = "#include HEADER\n"
        if way == "a macro given as a flag":
            options["cflags"] = [r"-DHEADER=\"value.h\""]
        elif way == "__has_include, made later":
            text = '#if __has_include("made.h")\n#define VALUE 2\n#else\n#define VALUE 1\n#endif\n'
        elif way == "shadowed by a new one":
            text = '#define HEADER "value.h"\n' + text
        elif way == "response file":
            text, options["cflags"] = "", [f"@{far}/flags"]
            (far / "flags").write_text("-DVALUE=1\n")
        elif way == "incbin":
            (far / "value.bin").write_bytes(b"\1")
            included = f'asm(".globl value; value: .incbin \\"{far}/value.bin\\"");'
            text = f'{included}\nextern "C" char value;\n#define VALUE value\n'
        else:
            text, options = "#include <value.h>\n", {}
            if way == "-isystem flag":
                options["cflags"] = ["-isystem", str(far)]
            else:
                monkeypatch.setenv(way, str(far))
        source = tmp_path / "tiny.cpp"
        source.write_text(text + TINY.replace("42", "VALUE"))
        first = ctypes.CDLL(str(Extension("tiny", [source], **options).build()))
        assert first.answer() == 1
        if way == "__has_include, made later":
            (far / "made.h").write_text("")
        elif way == "shadowed by a new one":
            (near / "value.h").write_text("#define VALUE 2\n")
        elif way == "response file":
            (far / "flags").write_text("-DVALUE=2\n")
        elif way == "incbin":
            (far / "value.bin").write_bytes(b"\2")
        else:
            value.write_text("#define VALUE 2\n")
        assert "will be built" in Extension("tiny", [source], **options).explain()
        assert ctypes.CDLL(str(Extension("tiny", [source], **options).build())).answer() == 2

    @pytest.mark.parametrize(
        "ldflags", ["-L D,-lvalue", "-LD -lvalue", "-LD,-l:libvalue.a", "-Wl,D/libvalue.a", "@D/flags", "D/libvalue.a"]
    )
    def test_is_made_again_when_an_archive_changes(self, ldflags: str, tmp_path: Path) -> None:
        def make_archive(value: int) -> None:
            code = tmp_path / "value.c"
            code.write_text(f"int value() {{ return {value}; }}\n")
            subprocess.run(["cc", "-fPIC", "-c", code, "-o", tmp_path / "value.o"], check=True)
            (tmp_path / "libvalue.a").unlink(missing_ok=True)
            subprocess.run(["ar", "rcD", tmp_path / "libvalue.a", tmp_path / "value.o"], check=True)

        (tmp_path / "flags").write_text(f"-L{tmp_path} -lvalue")
        # -Wl takes the comma for itself; else it stands between flags here.
        split = [ldflags] if ldflags.startswith("-Wl") else ldflags.split(",")
        options = {"ldflags": [flag.replace("D", str(tmp_path), 1) for flag in split]}
        source = tmp_path / "tiny.cpp"
        source.write_text('extern "C" int value();\n' + TINY.replace("42", "value()"))
        for value in (1, 2):
            make_archive(value)
            assert ctypes.CDLL(str(Extension("tiny", [source], **options).build())).answer() == value

    def test_what_several_link_is_compiled_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MAX_JOBS", "2")
        (tmp_path / "value.cpp").write_text("int value() { return 1; }\n")
        parts = [tmp_path / "value.cpp"]
        for number in range(3):
            parts.append(tmp_path / f"part{number}.cpp")
            parts[-1].write_text(f"int part{number}() {{ return {number}; }}\n")
        source = tmp_path / "tiny.cpp"
        source.write_text("int value(), part2();\n" + TINY.replace("42", "value() + part2() - 2"))

        def build(name: str) -> int:
            archive = Target("archive", "value", parts)
            return ctypes.CDLL(str(Target("library", name, [source], archive=archive).build())).answer()

        def built() -> list[str]:
            return sorted(entry.name for entry in entries())

        assert [build("first"), build("second")] == [1, 1]
        assert built() == ["first", "second", "value"]
        objects = [path.name for entry in entries() if entry.name == "value" for path in entry.folder.glob("*.o")]
        assert sorted(objects) == ["unit0.o", "unit1.o"]
        (tmp_path / "value.cpp").write_text("int value() { return 2; }\n")
        assert [build("first"), build("second")] == [2, 2]
        assert built() == ["first", "first", "second", "second", "value", "value"]

    def test_two_checkouts_with_a_header_that_only_the_compilers_know(self, tmp_path: Path) -> None:
        # A header by a name that is put together: no look at the text finds it.
        text = "#define QUOTED(name) #name\n#define HEADER(name) QUOTED(name)\n#include HEADER(value.h)\n"
        libraries = []
        for value in (1, 2):
            folder = tmp_path / str(value)
            folder.mkdir()
            (folder / "value.h").write_text(f"#define VALUE {value}\n")
            (folder / "tiny.cpp").write_text(text + TINY.replace("42", "VALUE"))
            # Of one path a process has one library: a copy shows what was built.
            libraries.append(shutil.copy(Extension("tiny", [folder / "tiny.cpp"]).build(), folder))
        assert [ctypes.CDLL(library).answer() for library in libraries] == [1, 2]
        (folder / "value.h").write_text("#define VALUE 3\n")
        assert f"{folder}/value.h: changed since" in Extension("tiny", [folder / "tiny.cpp"]).explain()

    def test_edits_while_it_is_compiled_are_seen_even_where_they_are_taken_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, once = tmp_path / "tiny.cpp", tmp_path / "once"
        source.write_text(TINY)
        # The first compiler sees another text than was there before and is there after.
        edits = f'sed -i s/42/7/ {source}; {REAL_CXX} "$@"; status=$?; sed -i s/7/42/ {source}; exit $status'
        first = f'case "$*" in *" -c "*) [ -e {once} ] || {{ touch {once}; {edits}; }} ;; esac'
        monkeypatch.setenv("CXX", str(write_program(tmp_path / "bin" / "g++", f'{first}\nexec {REAL_CXX} "$@"')))
        assert ctypes.CDLL(str(Extension("tiny", [source]).build())).answer() == 42

    def test_without_a_compiler_never_serves_other_sources(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Extension("tiny", [source]).build()
        source.write_text(TINY + "// changed\n")
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        with pytest.raises(ToolchainError, match="no C\\+\\+ compiler found"):
            Extension("tiny", [source]).build()

    @pytest.mark.parametrize("gone", ["libtiny.so", STAMP])
    def test_is_made_again_when_part_of_it_is_gone(self, source: Path, gone: str) -> None:
        built = Extension("tiny", [source]).build()
        built.write_text("not yet linked")
        (built.parent / gone).unlink()
        assert ctypes.CDLL(str(Extension("tiny", [source]).build())).answer() == 42

    @pytest.mark.parametrize("compiler", [True, False])
    def test_every_folder_is_for_its_owner_alone(
        self, source: Path, cache: Path, compiler: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if compiler:
            Extension("tiny", [source]).build()
        else:
            monkeypatch.setenv("CXX", "nothing")
            with pytest.raises(ToolchainError):
                Extension("tiny", [source]).build()
        assert {path.stat().st_mode & 0o777 for path in [cache, *cache.rglob("*")] if path.is_dir()} == {0o700}

    def test_an_interrupted_one_is_never_used_and_its_compilers_are_ended(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The first compiler waits, outlives its build, and would write once it is released.
        first, release, ended = tmp_path / "first", tmp_path / "release", tmp_path / "ended"
        compiler = write_program(
            tmp_path / "bin" / "g++",
            f'case "$*" in *" -c "*) if mkdir {first} 2>/dev/null; then '
            f'while [ ! -e {release} ]; do sleep 0.05; done; {REAL_CXX} "$@"; touch {ended}; exit; fi;; esac\n'
            f'exec {REAL_CXX} "$@"',
        )
        monkeypatch.setenv("CXX", str(compiler))
        builder = start_build(source)
        wait_for(first.exists)
        builder.kill()
        builder.wait()

        built = Extension("tiny", [source]).build()
        before = listing(built.parent)
        release.touch()
        time.sleep(0.5)
        assert not ended.exists()
        assert ctypes.CDLL(str(built)).answer() == 42
        assert listing(built.parent) == before

    def test_two_processes_at_once_make_it_once(self, source: Path, tmp_path: Path) -> None:
        log = tmp_path / "log"
        compiler = write_program(
            tmp_path / "bin" / "g++",
            f'case "$*" in *" -c "*) echo compiled >> {log}; sleep 1;; esac; exec {REAL_CXX} "$@"',
        )
        builders = [start_build(source, CXX=compiler) for _ in range(2)]
        first, second = (builder.communicate()[0] for builder in builders)
        assert first == second
        assert Path(first.strip()).is_file()
        assert log.read_text().count("compiled") == 1

    def test_one_that_waits_says_for_whom(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        started, release = tmp_path / "started", tmp_path / "release"
        compiler = write_program(
            tmp_path / "bin" / "g++",
            f'case "$*" in *" -c "*) touch {started}; while [ ! -e {release} ]; do sleep 0.05; done;; esac\n'
            f'exec {REAL_CXX} "$@"',
        )
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr("identity_conv.cache.LOCK_NOTE_AFTER_S", 0.1)
        builder = start_build(source)
        wait_for(started.exists)
        waiting = threading.Timer(1, release.touch)
        waiting.start()
        Extension("tiny", [source]).build()
        builder.wait()
        assert f"waiting for process {builder.pid} on " in capfd.readouterr().err

    @pytest.mark.parametrize("terminal", [True, False])
    def test_shows_a_bar_on_a_terminal_alone(self, source: Path, terminal: bool) -> None:
        code = f"{MARK_AS_COMMAND}from identity_conv import Extension; Extension('tiny', [{str(source)!r}]).build()"
        shown = stderr_of("-c", code, terminal=terminal)
        assert b"compiling libtiny.so" in shown
        assert (b"/2" in shown) == (b"\x1b[" in shown) == terminal


class TestRefusal:
    """What a build says when it can't be made: an ImportError with the cause and what to do."""

    def test_a_source_that_does_not_compile(self, source: Path, tmp_path: Path) -> None:
        # Ninja repeats the command, with this folder in it, before any message.
        (tmp_path / "error").mkdir()
        tiny = Extension("tiny", [source], include_dirs=[tmp_path / "error"])
        source.write_text("int first = nothing;\nint second = nowhere;\n")
        with pytest.raises(CompileError) as refused:
            tiny.build()
        assert isinstance(refused.value, ImportError)
        assert "libtiny.so doesn't build" in str(refused.value)
        assert re.search(r"tiny\.cpp:1:\d+: error: .*nothing", str(refused.value))
        assert "second" not in str(refused.value)
        assert str(refused.value.log) in str(refused.value)
        assert "nowhere" in refused.value.log.read_text()

        source.write_text(TINY)
        assert tiny.build().is_file()

    @pytest.mark.parametrize(
        ("text", "ldflags", "said"),
        [
            (TINY, ["-lno_such_library"], "cannot find -lno_such_library"),
            ("void gone(); void here() { gone(); }", ["-Wl,-z,defs,--no-gc-sections"], "undefined reference to `gone"),
        ],
    )
    def test_a_library_that_does_not_link(self, source: Path, text: str, ldflags: list[str], said: str) -> None:
        source.write_text(text)
        with pytest.raises(CompileError, match=re.escape(said)):
            Extension("tiny", [source], ldflags=ldflags).build()

    def test_a_source_that_is_no_utf8(self, source: Path) -> None:
        source.write_bytes(b"int gr\xf6\xdfe = nothing; // \xe4\n")
        with pytest.raises(CompileError, match=r"libtiny\.so doesn't build: .*error"):
            Extension("tiny", [source]).build()

    @pytest.mark.parametrize("name", ["a b.cpp", "a:b/tiny.cpp", "a$b.cpp"])
    def test_a_path_that_ninja_can_not_read(self, source: Path, name: str) -> None:
        path = source.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TINY)
        with pytest.raises(ValueError, match="ninja can't read a path with"):
            Extension("tiny", [path])

    def test_a_flag_that_is_no_string(self, source: Path) -> None:
        with pytest.raises(ValueError, match=r"cflags must be a list of strings, got \[1\]"):
            Extension("tiny", [source], cflags=[1])

    def test_the_first_error_is_found_in_any_language(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = (
            f'case "$LC_ALL $*" in C*) ;; *" -c "*) {REAL_CXX} "$@" 2>&1 | sed s/error:/Fehler:/; exit 1;; esac\n'
            f'exec {REAL_CXX} "$@"'
        )
        monkeypatch.setenv("CXX", str(write_program(tmp_path / "bin" / "g++", script)))
        monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
        source.write_text("int first = nothing;\n")
        with pytest.raises(CompileError, match="nothing"):
            Extension("tiny", [source]).build()

    def test_a_library_that_does_not_load(self, source: Path) -> None:
        source.write_text('void gone(); extern "C" __attribute__((visibility("default"))) void here() { gone(); }')
        with pytest.raises(BuildError, match=r"libtiny_unloadable\.so doesn't load: .*undefined symbol.*gone"):
            Extension("tiny_unloadable", [source]).load()

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ("echo 'g++ (X) 8.1.0'", r"g\+\+ 8\.1\.0 \(.*\) is too old .* install g\+\+ \d+ or newer, or .*CXX"),
            ("echo 'clang version 5.0.1'", r"clang\+\+ 5\.0\.1 \(.*\) is too old .* install clang\+\+ \d+ or newer"),
            ("echo hello", "doesn't say its version.*set CXX"),
            ("exit 1", "doesn't run"),
        ],
    )
    def test_a_compiler_that_will_not_do(
        self, source: Path, tmp_path: Path, answer: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", str(write_program(tmp_path / "bin" / "c++", answer)))
        with pytest.raises(ToolchainError, match=said):
            Extension("tiny", [source]).build()

    @pytest.mark.parametrize(
        ("cxx", "said"),
        [
            ("nothing", "CXX must name a C\\+\\+ compiler, and 'nothing' is not a program"),
            ("", "no c\\+\\+ or g\\+\\+ on PATH.*apt-get install g\\+\\+"),
        ],
    )
    def test_no_compiler(self, source: Path, cxx: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv("CXX", cxx)
        with pytest.raises(ToolchainError, match=said):
            Extension("tiny", [source]).build()

    def test_no_ninja(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", str(REAL_CXX))
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setitem(sys.modules, "ninja", None)
        with pytest.raises(ToolchainError, match=r"no ninja found.*pip install ninja"):
            Extension("tiny", [source]).build()

    @pytest.mark.parametrize("place", ["a file", "a folder that nobody may write to"])
    def test_a_cache_that_can_not_be_written(
        self, source: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        folder = tmp_path / "file" if place == "a file" else Path("/proc/identity_conv")
        monkeypatch.setenv("IDENTITY_CONV_CACHE_DIR", str(folder))
        with pytest.raises(BuildError, match=f"{folder} can't be written.*set IDENTITY_CONV_CACHE_DIR"):
            Extension("tiny", [source]).build()

    def test_cuda_sources_alone_where_there_is_no_cuda(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        monkeypatch.setattr(torch.version, "cuda", None)
        (tmp_path / "kernel.cu").write_text("")
        with pytest.raises(ToolchainError, match=r"has only CUDA sources, and torch .* is built without CUDA"):
            Extension("tiny", [tmp_path / "kernel.cu"]).build()

    def test_a_source_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"Extension 'tiny': source .*gone\.cpp is not there"):
            Extension("tiny", [tmp_path / "gone.cpp"])

    @pytest.mark.parametrize("name", ["", "9lives", "a-b", "../up"])
    def test_a_name_that_is_no_identifier(self, source: Path, name: str) -> None:
        with pytest.raises(ValueError, match="name must be an identifier"):
            Extension(name, [source])


class TestCompiler:
    def test_is_called_by_the_name_it_was_found_under(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As ccache is: one program under the names of many compilers.
        script = f'case "$0" in */c++) exec {REAL_CXX} "$@";; esac\necho "ccache version 4.8"'
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "c++").symlink_to(write_program(tmp_path / "ccache", script))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        built = Extension("tiny", [source]).build()
        assert str(tmp_path / "bin" / "c++") in (built.parent / "build.ninja").read_text()

    @pytest.mark.parametrize(
        ("line", "name"),
        [
            ("g++ (crosstool-NG 1.26.0) 13.2.0", "g++ 13.2.0"),
            ("g++ (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)", "g++ 14.2.1"),
            ("Ubuntu clang version 18.1.3 (1ubuntu1)", "clang++ 18.1.3"),
        ],
    )
    def test_version_is_read_from_what_vendors_print(
        self, tmp_path: Path, line: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", str(write_program(tmp_path / "bin" / "c++", f"echo '{line}'")))
        assert str(toolchain.compiler()) == name


@pytest.mark.skipif(not torch.version.cuda or not toolchain.find_nvcc(), reason="needs a CUDA torch and nvcc")
class TestCuda:
    """CUDA sources, which need no GPU to be compiled."""

    @pytest.fixture
    def cuda_source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
        path = tmp_path / "tiny_kernel.cu"
        path.write_text("__global__ void kernel() {}\nvoid launch() { kernel<<<1, 1>>>(); }\n")
        return path

    def test_sources_join_and_link(self, source: Path, cuda_source: Path, tmp_path: Path) -> None:
        (tmp_path / "runtime.cpp").write_text("#include <cuda_runtime.h>\nint got() { return cudaGetLastError(); }\n")
        built = Extension("tiny", [source, cuda_source, tmp_path / "runtime.cpp"]).build()
        assert b"sm_90" in built.read_bytes()
        ctypes.CDLL(str(built))

    def test_the_host_compiler_may_be_chosen(
        self, cuda_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = Extension("tiny", [cuda_source]).key
        monkeypatch.setenv("CC", str(write_program(tmp_path / "bin" / "gcc", f'exec {REAL_CXX} "$@"')))
        tiny = Extension("tiny", [cuda_source])
        assert tiny.key != before
        assert f"-ccbin {tmp_path / 'bin' / 'gcc'}" in (tiny.build().parent / "build.ninja").read_text()

    @pytest.mark.parametrize("changed", [{"cuda_cflags": ["-lineinfo"]}, {"cuda": False}])
    def test_key_changes_with(self, source: Path, cuda_source: Path, changed: dict[str, object]) -> None:
        assert Extension("tiny", [source, cuda_source], **changed).key != Extension("tiny", [source, cuda_source]).key

    def test_key_changes_with_the_architectures(self, cuda_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = Extension("tiny", [cuda_source]).key
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;8.0")
        assert Extension("tiny", [cuda_source]).key != before

    def test_an_unknown_architecture_is_refused(self, cuda_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "bogus")
        with pytest.raises(ToolchainError, match=r"'bogus'.*TORCH_CUDA_ARCH_LIST"):
            Extension("tiny", [cuda_source]).build()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_native_without_a_gpu_is_a_build_for_the_cpu(
        self, source: Path, cuda_source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
        assert b"sm_" not in Extension("tiny", [source, cuda_source]).build().read_bytes()

    def test_no_nvcc(self, cuda_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(ToolchainError, match=r"no nvcc was found: .*CUDA_HOME"):
            Extension("tiny", [cuda_source]).build()

    def test_a_build_is_found_without_nvcc(
        self, cuda_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = Extension("tiny", [cuda_source]).build()
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert Extension("tiny", [cuda_source]).build() == built

    @pytest.mark.parametrize("link", [True, False])
    def test_the_toolkit_is_found_behind_an_nvcc_on_path(
        self, cuda_source: Path, tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        toolkit = toolchain.find_cuda_home()
        assert toolkit is not None
        if link:
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
        else:
            write_program(tmp_path / "bin" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_HOME", raising=False)
        found = toolchain.find_cuda_home()
        assert found is not None
        assert (found / "include" / "cuda_runtime.h").is_file()

    @pytest.mark.timeout(300)  # nvcc makes forty kernels
    def test_the_worked_example_is_built_for_the_gpu(self, cuda_source: Path) -> None:
        assert b"sm_90" in ops.targets.operators().build().read_bytes()


class TestOperatorLibrary:
    """What the worked example's library asks of a process: libtorch, and no Python."""

    def test_needs_no_python_and_no_openmp_of_its_own(self) -> None:
        dynamic = subprocess.run(["readelf", "-d", ops.extension.library], capture_output=True, text=True, check=True)
        needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic.stdout))
        assert any(name.startswith("libtorch_cpu") for name in needed)
        assert not [name for name in needed if re.search("python|gomp", name)]

    def test_has_no_undefined_python_symbol(self) -> None:
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", ops.extension.library], capture_output=True, text=True, check=True
        )
        assert "GOMP_parallel" in symbols.stdout
        assert not re.findall(r" U _?Py\w+", symbols.stdout)
