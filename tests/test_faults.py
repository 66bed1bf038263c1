"""What goes wrong around builds, done for real: kills, interrupts, races, full disks; and what users have reported."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_build import MARK_AS_COMMAND, NO_COMPILER, ROOT, TINY, environment, run_python, write_program

from identity_conv import BuildError, Extension, ToolchainError, toolchain
from identity_conv import cache as cache_module

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("cache")]

CXX = toolchain.find_cxx()

BUILD = (
    f"{MARK_AS_COMMAND}import sys; from identity_conv import Extension; print(Extension('tiny', [sys.argv[1]]).build())"
)


def slow_compiler(tmp_path: Path, seconds: float) -> Path:
    """A compiler that takes its time, and says that it is at it by a file named by its process."""
    (tmp_path / "running").mkdir(exist_ok=True)
    mark = f"{tmp_path}/running/$$"
    return write_program(
        tmp_path / "bin" / "g++",
        f'case "$*" in *" -c "*) touch {mark}; sleep {seconds}; rm {mark};; esac\nexec {CXX} "$@"',
    )


def start(source: Path, **changes: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(source)],
        cwd="/",
        env=environment(changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_a_compiler(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    while not list((tmp_path / "running").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def compilers_alive(tmp_path: Path) -> list[int]:
    """Those that run; one that is only waiting for its parent to look is dead."""
    alive = []
    for mark in (tmp_path / "running").iterdir():
        try:
            state = Path("/proc", mark.name, "stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            alive.append(int(mark.name))
    return alive


class TestInterrupt:
    def test_ends_the_compilers_within_a_second(self, source: Path, tmp_path: Path) -> None:
        builder = start(source, CXX=slow_compiler(tmp_path, 30))
        wait_for_a_compiler(tmp_path)
        begin = time.monotonic()
        builder.send_signal(signal.SIGINT)
        _, text = builder.communicate(timeout=20)
        assert time.monotonic() - begin < 2  # the process's own end included
        assert compilers_alive(tmp_path) == []
        assert "KeyboardInterrupt" in text
        assert ctypes.CDLL(str(Extension("tiny", [source]).build())).answer() == 42

    def test_ends_compilers_alone_also_by_a_link_to_the_cache(self, tmp_path: Path) -> None:
        folder, link = tmp_path / "build", tmp_path / "link"
        folder.mkdir()
        link.symlink_to(folder)
        mark = {**os.environ, cache_module.BUILDING: str(link)}
        compiler = subprocess.Popen(["sleep", "60"], cwd=folder, env=mark)
        elsewhere = subprocess.Popen(["sleep", "60"], cwd=tmp_path, env=mark)
        shell = subprocess.Popen(["sleep", "60"], cwd=folder)  # an author who reads the log there
        try:
            cache_module.end_processes_in(link)
            assert compiler.wait(timeout=5) == -signal.SIGKILL
            time.sleep(0.3)  # for the others to end, if they were to
            assert shell.poll() is elsewhere.poll() is None
        finally:
            for process in (compiler, shell, elsewhere):
                process.kill()
                process.wait()

    def test_a_fork_while_another_thread_builds_can_build(self, source: Path) -> None:
        code = f"""{MARK_AS_COMMAND}
import os, sys, threading
from identity_conv import Extension, building, loading
held, done = threading.Event(), threading.Event()
def hold():
    with building._build_lock, loading._lock:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    Extension("tiny", [sys.argv[1]]).load()
    os._exit(0)
_, status = os.waitpid(child, 0)
done.set()
sys.exit(status)
"""
        done = run_python("-c", code, str(source))
        assert done.returncode == 0, done.stderr

    def test_leaves_the_lock_free(self, source: Path, tmp_path: Path) -> None:
        compiler = slow_compiler(tmp_path, 30)
        builder = start(source, CXX=compiler)
        wait_for_a_compiler(tmp_path)
        builder.send_signal(signal.SIGINT)
        builder.communicate(timeout=20)
        slow_compiler(tmp_path, 0)  # the same program, by size and time another
        begin = time.monotonic()
        done = start(source, CXX=compiler)
        assert done.wait(timeout=60) == 0, done.communicate()
        assert time.monotonic() - begin < 30


def kill_at_random(source: Path, tmp_path: Path, times: int) -> None:
    """Kills builders without warning, at any moment of a build, and builds after each."""
    compiler = slow_compiler(tmp_path, 0.2)
    draws = random.Random(0)
    for attempt in range(times):
        source.write_text(f"{TINY}// {attempt}\n")
        builder = start(source, CXX=compiler)
        time.sleep(draws.uniform(0.5, 3.5))
        builder.kill()
        builder.communicate()
        done = run_python("-c", BUILD, str(source), CXX=compiler)
        assert done.returncode == 0, done.stderr
        assert ctypes.CDLL(done.stdout.strip()).answer() == 42


def test_a_kill_at_any_moment_leaves_a_cache_that_works(source: Path, tmp_path: Path) -> None:
    kill_at_random(source, tmp_path, 4)


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_many_kills_at_any_moment_leave_a_cache_that_works(source: Path, tmp_path: Path) -> None:
    kill_at_random(source, tmp_path, 40)


def race(source: Path, tmp_path: Path, processes: int) -> None:
    log = tmp_path / "log"
    compiler = write_program(
        tmp_path / "bin" / "g++", f'case "$*" in *" -c "*) echo compiled >> {log}; sleep 1;; esac; exec {CXX} "$@"'
    )
    builders = [start(source, CXX=compiler) for _ in range(processes)]
    results = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * processes, results
    assert len({out for out, _ in results}) == 1
    assert log.read_text().count("compiled") == 1


@pytest.mark.night
def test_eight_processes_at_once_build_once(source: Path, tmp_path: Path) -> None:
    race(source, tmp_path, 8)


def test_eight_threads_at_once_build_once(source: Path, tmp_path: Path) -> None:
    code = (
        f"{MARK_AS_COMMAND}import sys, threading; from identity_conv import Extension\n"
        "found = []\n"
        "build = lambda: found.append(Extension('tiny', [sys.argv[1]]).build())\n"
        "threads = [threading.Thread(target=build) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(found), len(set(found)))"
    )
    done = run_python("-c", code, str(source))
    assert done.stdout == "8 1\n", done.stderr
    assert done.stderr.count("compiling libtiny.so") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", folder], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small file system can't be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_named_and_room_is_enough_to_go_on(
    source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDENTITY_CONV_CACHE_DIR", str(small_disk))
    filler = small_disk / "filler"
    for left in (0, 8 << 10, 32 << 10):
        filler.write_bytes(b"")
        filler.write_bytes(b"x" * max(0, shutil.disk_usage(small_disk).free - left))
        with pytest.raises(BuildError, match="No space left on device"):
            Extension("tiny", [source]).build()
    filler.unlink()
    assert ctypes.CDLL(str(Extension("tiny", [source]).build())).answer() == 42


class TestReported:
    """Failures that users of torch.utils.cpp_extension reported, each with what happens here."""

    def test_a_lock_that_a_killed_builder_left(self, source: Path, tmp_path: Path) -> None:
        """pytorch/pytorch#189245: every later load waits for ever."""
        compiler = slow_compiler(tmp_path, 30)
        builder = start(source, CXX=compiler)
        wait_for_a_compiler(tmp_path)
        builder.kill()
        builder.communicate()
        slow_compiler(tmp_path, 0)
        begin = time.monotonic()
        done = run_python("-c", BUILD, str(source), CXX=compiler)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - begin < 30

    def test_as_many_compilers_as_the_machine_has_cores(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """PASSIONLab/OpenEquivariance#207: in a small cgroup on a large host the compilers kill each other."""
        files = {"/sys/fs/cgroup/cpu.max": "300000 100000\n", "/sys/fs/cgroup/memory.max": "max\n"}
        files["/proc/meminfo"] = "MemTotal: 264000000 kB\nMemAvailable: 250000000 kB\n"
        read = Path.read_text
        monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: files.get(str(path)) or read(path, *a, **k))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        assert toolchain.jobs() == 3
        files["/sys/fs/cgroup/memory.max"] = str(4 << 30)
        assert toolchain.jobs() == 2
        files["/sys/fs/cgroup/memory.max"] = str(1 << 20)
        assert toolchain.jobs() == 1
        monkeypatch.setenv("MAX_JOBS", "5")
        assert toolchain.jobs() == 5
        for wrong in ("many", "0", "-1", "1.5"):
            monkeypatch.setenv("MAX_JOBS", wrong)
            with pytest.raises(toolchain.ToolchainError, match=f"MAX_JOBS must be a number from 1 on, got '{wrong}'"):
                toolchain.jobs()

    def test_a_torch_with_cuda_and_no_gpu(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """pytorch/pytorch#137261: IndexError in the search for architectures."""
        cuda = tmp_path / "kernel.cu"
        cuda.write_text("not even C++")
        monkeypatch.setattr("torch.version.cuda", "13.0")
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        toolchain.gpu_architectures.cache_clear()
        assert Extension("tiny", [source, cuda]).build().is_file()
        with pytest.raises(ToolchainError, match=r"asks for CUDA \(cuda=True\), and no GPU is visible"):
            Extension("tiny", [source, cuda], cuda=True).build()

    def test_a_cuda_runtime_without_its_plain_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """MrTornado24/Next3D#25: ld cannot find -lcudart; pip's runtime has libcudart.so.13 alone."""
        toolkit = tmp_path / "toolkit"
        (toolkit / "lib64").mkdir(parents=True)
        runtime = tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
        runtime.parent.mkdir(parents=True)
        runtime.write_bytes(b"")
        monkeypatch.setattr(toolchain, "find_cuda_home", lambda: toolkit)
        monkeypatch.setattr(toolchain, "torch_folder", lambda: tmp_path / "site" / "torch")
        build = tmp_path / "build"
        build.mkdir()
        assert toolchain.cuda_runtime_flags(build) == [f"-L{build}"]
        assert (build / "libcudart.so").resolve() == runtime
        (toolkit / "lib64" / "libcudart.so").write_bytes(b"")
        assert toolchain.cuda_runtime_flags(build) == [f"-L{toolkit / 'lib64'}"]

    def test_a_library_of_yesterdays_torch(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """triton-lang/triton#37, openvinotoolkit/nncf#1120: undefined symbols after an upgrade."""
        old = Extension("tiny", [source]).build()
        monkeypatch.setattr("torch.version.git_version", "another")
        assert Extension("tiny", [source]).build() != old

    def test_a_ninja_that_is_not_on_path(self, source: Path) -> None:
        """pytorch/pytorch#140015: the environment isn't activated, and its ninja isn't found."""
        done = run_python("-c", BUILD, str(source), PATH="/usr/bin:/bin")
        assert done.returncode == 0, done.stderr

    def test_a_compiler_too_new_for_nvcc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """pytorch/pytorch#136556, Eyeline-Labs/FlashDepth#2: unsupported GNU version."""
        new = write_program(tmp_path / "bin" / "g++", "echo 'g++ (X) 15.1.0'")
        nvcc = write_program(tmp_path / "toolkit" / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.4, V12'")
        monkeypatch.setattr(toolchain, "find_nvcc", lambda: str(nvcc))
        monkeypatch.setenv("CXX", str(new))
        with pytest.raises(ToolchainError, match=r"15\.1\.0 .* is too new for nvcc 12\.4, which takes g\+\+ up to 13"):
            toolchain.compiler(for_cuda=True)
        # Without CXX another that is installed is taken.
        write_program(tmp_path / "bin" / "g++-13", "echo 'g++ (X) 13.2.0'")
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        assert str(toolchain.compiler(for_cuda=True)) == "g++ 13.2.0"

    def test_a_cuda_home_that_is_a_list(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """SeanNaren/warp-ctc#153: CUDA_HOME=':/usr/local/cuda-9.0:...' goes into every flag."""
        monkeypatch.setenv("CUDA_HOME", f":{tmp_path}:/usr/local/cuda")
        assert toolchain.find_nvcc() is None

    def test_two_extensions_of_one_name(self, source: Path, tmp_path: Path) -> None:
        """PASSIONLab/OpenEquivariance#156: processes that want different builds of a name wait for each other."""
        other = tmp_path / "other" / "tiny.cpp"
        other.parent.mkdir()
        other.write_text(TINY.replace("42", "7"))
        first, second = Extension("tiny", [source]).build(), Extension("tiny", [other]).build()
        assert (ctypes.CDLL(str(first)).answer(), ctypes.CDLL(str(second)).answer()) == (42, 7)

    def test_torch_is_imported_after_the_library(self, source: Path) -> None:
        """pytorch/extension-cpp#6: undefined symbol THPVariableClass where torch comes second."""
        code = (
            f"{MARK_AS_COMMAND}import sys; from identity_conv import Extension; Extension('tiny', [sys.argv[1]]).load()"
        )
        assert run_python("-c", code, str(source)).returncode == 0


class TestCacheCommand:
    def identity_conv(self, *arguments: str):
        return run_python("-m", "identity_conv", *arguments)

    def test_lists_explains_and_cleans(self, source: Path, cache: Path, tmp_path: Path) -> None:
        kept, gone = Extension("kept", [source]).build(), Extension("gone", [source]).build()
        listed = json.loads(self.identity_conv("cache", "list", "--json").stdout)
        assert {(entry["name"], entry["finished"]) for entry in listed} == {("kept", True), ("gone", True)}
        assert gone.parent.name in self.identity_conv("cache", "list").stdout
        done = self.identity_conv("cache", "clean", "gone", "--yes")
        assert done.stdout.startswith("removed 1 build, ")
        assert kept.is_file()
        assert not gone.exists()
        assert self.identity_conv("cache", "clean").returncode == 1  # asks, and nobody answers
        assert kept.is_file()

    def test_cleans_nothing_that_is_not_there(self, source: Path, cache: Path) -> None:
        done = self.identity_conv("cache", "clean", "tiny", "--yes", "--json")
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            done.stderr == "identity-conv: cache clean: NAME must be that of a build, and there is none, got 'tiny'\n"
        )
        kept = Extension("tiny", [source]).build(), Extension("other", [source]).build()
        done = self.identity_conv("cache", "clean", "tony")  # known before anybody is asked
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "identity-conv: cache clean: NAME must be other or tiny, got 'tony'\n"
        assert all(file.is_file() for file in kept)

    def test_cleans_a_folder_that_is_a_link(self, source: Path, tmp_path: Path) -> None:
        folder = Extension("tiny", [source]).build().parent
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
        assert "removed 1 build, " in self.identity_conv("cache", "clean", "--yes").stdout
        assert not folder.is_symlink()
        assert (tmp_path / "moved" / "libtiny.so").is_file()  # what it names isn't the cache's

    def test_asks_nobody_where_standard_input_is_closed(self) -> None:
        command = f'exec "{sys.executable}" -m identity_conv cache clean <&-'
        done = subprocess.run(
            ["sh", "-c", command], cwd="/", env=environment({}), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "give --yes" in done.stderr

    def test_names_the_variable_of_a_home_that_is_not_known(self) -> None:
        done = run_python("-m", "identity_conv", "cache", "list", IDENTITY_CONV_CACHE_DIR="~nouser/x")
        assert done.returncode == 1
        assert done.stderr == (
            "identity-conv: IDENTITY_CONV_CACHE_DIR must name a folder, got '~nouser/x', whose home isn't known\n"
        )

    def test_leaves_what_is_being_built(self, source: Path, tmp_path: Path) -> None:
        builder = start(source, CXX=slow_compiler(tmp_path, 3))
        wait_for_a_compiler(tmp_path)
        assert "removed 0 builds" in self.identity_conv("cache", "clean", "--yes").stdout
        assert builder.wait(timeout=60) == 0

    def test_builds_and_explains_an_authors_extension(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "authors.py").write_text(
            f"from identity_conv import Extension\next = Extension('tiny', [{str(source)!r}])\n"
        )
        (tmp_path / "broken.py").write_text("ext = (\n")
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])}
        done = run_python("-m", "identity_conv", "cache", "explain", "authors:ext", **path)
        assert done.stdout == "tiny: will be built, because\n  there is no finished build of tiny\n"
        Extension("tiny", [source]).build()
        done = run_python("-m", "identity_conv", "cache", "explain", "authors:ext", **path)
        assert done.stdout.startswith("tiny: built, ")
        source.write_text(f"{source.read_text()}\n// changed\n")
        done = run_python("-m", "identity_conv", "cache", "explain", "authors:ext", **path)
        assert re.search(r"source tiny\.cpp: [0-9a-f]{12}… → [0-9a-f]{12}…$", done.stdout, re.MULTILINE)
        for name, sentence in [
            ("authors:nothing", "has no Extension named nothing, but ext"),
            ("authors", "an extension is named MODULE:EXTENSION, got 'authors'"),
            ("nobody:ext", "nobody can't be imported (ModuleNotFoundError: No module named 'nobody')"),
            ("broken:ext", "broken can't be imported (SyntaxError: "),
        ]:
            done = run_python("-m", "identity_conv", "cache", "explain", name, **path)
            assert done.returncode == 1
            assert sentence in done.stderr
            assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        "then",
        [
            "ext = Extension('tiny', [SOURCE]).load()",
            "ext = Extension('tiny', [SOURCE]).load()\nanswer = torch.ops.tiny.answer",
            "ext = Extension('tiny', [SOURCE]).load()\nanswer = ext.ops.answer",
            "ext = Extension('tiny', [SOURCE])\nlibrary = ext.build()",
        ],
        ids=["loads", "loads and uses", "loads and uses its namespace", "builds"],
    )
    def test_explains_without_building_what_the_module_builds(
        self, then: str, source: Path, cache: Path, tmp_path: Path
    ) -> None:
        code = f"import torch\nfrom identity_conv import Extension\n{then.replace('SOURCE', repr(str(source)))}\n"
        (tmp_path / "authors.py").write_text(code)
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])}
        for _ in range(2):
            done = run_python("-m", "identity_conv", "cache", "explain", "authors:ext", **path)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == "tiny: will be built, because\n  there is no finished build of tiny\n"
        # Elsewhere it builds and loads as ever, and is explained after that.
        built = Extension("tiny", [source]).build()
        done = run_python("-m", "identity_conv", "cache", "explain", "authors:ext", **path)
        assert (done.returncode, done.stdout) == (0, f"tiny: built, {built}\n"), done.stderr

    def test_explains_nothing_of_a_module_that_does_not_come_to_the_extension(
        self, source: Path, tmp_path: Path
    ) -> None:
        first = f"Extension('first', [{str(source)!r}]).build()"
        code = f"from identity_conv import Extension\n{first}\next = Extension('tiny', [{str(source)!r}])\n"
        (tmp_path / "authors.py").write_text(code)
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])}
        done = run_python("-m", "identity_conv", "cache", "explain", "authors:ext", **path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "identity-conv: authors:ext: authors can't be imported (NotBuilt: libfirst.so isn't built, and nothing is "
            "built only to look)\n"
        )


class TestDoctor:
    def report(self, *arguments: str, **changes: str | None) -> tuple[int, dict[str, dict[str, str]]]:
        done = run_python("-m", "identity_conv", "doctor", "--json", *arguments, **changes)
        assert done.stdout, done.stderr
        return done.returncode, {each["fact"]: each for each in json.loads(done.stdout)["findings"]}

    def test_looks_quickly(self) -> None:
        status, facts = self.report("--quick")
        assert status == 0
        assert {"Python", "torch", "C++ compiler", "ninja", "cache"} <= set(facts)
        assert all(each["verdict"] != "fatal" for each in facts.values())

    def test_without_a_compiler(self) -> None:
        status, facts = self.report("--quick", PATH="", CXX=None)
        assert status == 1
        assert facts["C++ compiler"]["verdict"] == "fatal"
        assert "no C++ compiler found" in facts["C++ compiler"]["value"]

    @pytest.mark.parametrize(
        ("name", "value", "sentence"),
        [
            ("MAX_JOBS", "many", "MAX_JOBS must be a number from 1 on, got 'many'"),
            ("MAX_JOBS", "0", "MAX_JOBS must be a number from 1 on, got '0'"),
            ("CXX", "nothing", "CXX must name a C++ compiler, and 'nothing' is not a program"),
            ("IDENTITY_CONV_PREFIX", "/nothing", "IDENTITY_CONV_PREFIX=/nothing holds no installation"),
            ("TMPDIR", "/nothing", "packages can't be opened there"),
        ],
    )
    def test_a_variable_that_cannot_be_used(self, name: str, value: str, sentence: str) -> None:
        status, facts = self.report("--quick", **{name: value})
        assert status == 1
        assert (facts[name]["value"], facts[name]["verdict"]) == (value, "fatal")
        assert facts[name]["remedy"].startswith(sentence)
        if name == "CXX":  # the same, in the same words
            assert facts["C++ compiler"]["value"] == facts[name]["remedy"]

    @pytest.mark.parametrize(("name", "value"), [("CUDA_HOME", "/nothing"), ("CC", "nothing")])
    def test_a_variable_that_only_cuda_needs(self, name: str, value: str) -> None:
        _, facts = self.report("--quick", **{name: value})
        assert facts[name]["verdict"] == "warning"

    @pytest.mark.parametrize(("value", "verdict"), [("9.0;banana", "fatal"), ("8.0 9.0+PTX", "ok"), ("native", "ok")])
    def test_architectures_that_torch_does_not_know(self, value: str, verdict: str) -> None:
        status, facts = self.report("--quick", TORCH_CUDA_ARCH_LIST=value)
        found = facts["TORCH_CUDA_ARCH_LIST"]
        if not torch.version.cuda:
            assert found["verdict"] == "warning"
            assert "is ignored: torch" in found["remedy"]
            return
        assert found["verdict"] == verdict
        assert verdict == "ok" or (status == 1 and "torch can't compile for" in found["remedy"])

    def test_without_torch(self, tmp_path: Path) -> None:
        # As where torch isn't installed: no module, no distribution.
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.metadata as m, sys\nsys.modules['torch'] = None\nfind = m.version\n"
            "def version(name):\n    if name == 'torch': raise m.PackageNotFoundError(name)\n    return find(name)\n"
            "m.version = version\n"
        )
        path = os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])
        status, facts = self.report(PYTHONPATH=path)
        assert status == 1
        assert (facts["torch"]["value"], facts["torch"]["verdict"]) == ("not installed", "fatal")

    def test_a_cache_that_cannot_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        status, facts = self.report("--quick", IDENTITY_CONV_CACHE_DIR=str(tmp_path / "file"))
        assert status == 1
        assert facts["cache"]["verdict"] == "fatal"

    def test_each_line_is_printed_as_soon_as_it_is_known(self) -> None:
        # The last check waits until the lines before it have been read here.
        code = f"""
{MARK_AS_COMMAND}
from identity_conv import cli, diagnosis
diagnosis._library_probe = lambda: (diagnosis.Finding("asked", input()) for _ in range(1))
diagnosis._package_probe = lambda: iter(())
cli.main()
"""
        command, line = [sys.executable, "-c", code, "doctor"], ""
        with subprocess.Popen(
            command, env=environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as started:
            assert started.stdin is not None
            assert started.stdout is not None
            watchdog = threading.Timer(100, started.kill)
            watchdog.start()
            for line in started.stdout:
                if line.startswith("ok: cache: "):
                    print("now", file=started.stdin, flush=True)
                if line.startswith("ok: asked: "):
                    break
            watchdog.cancel()
        assert line == "ok: asked: now\n"
        assert started.returncode == 0

    def test_a_probe_that_crashes_is_a_finding(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from identity_conv import diagnosis

        finding = diagnosis._probe("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
        assert (finding.value, finding.verdict) == ("crashed by signal 11", "fatal")
        assert diagnosis._probe("fails", "raise SystemExit('why')", tmp_path).value == "why"
        assert capsys.readouterr().err == "identity_conv: crash ...\nidentity_conv: fails ...\n"

    @pytest.mark.night
    def test_acts(self) -> None:
        status, facts = self.report()
        assert status == 0
        assert facts["compile and load a library"]["value"] == "works"
        assert facts["compile and run a package"]["value"] == "works"

    def test_a_failed_import_carries_the_verdict(self) -> None:
        done = run_python("-c", "import identity_conv", PATH="", CXX=None)
        assert done.returncode == 1
        assert "ToolchainError: no C++ compiler found" in done.stderr
        assert "fatal: C++ compiler: no C++ compiler found" in done.stderr
        assert "`identity-conv doctor` looks further" in done.stderr

    @pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails"])
    def test_a_failed_import_shows_none_of_what_raised_it_but_to_logging(self, fault: str, tmp_path: Path) -> None:
        failing = write_program(
            tmp_path / "g++",
            'case "$*" in *" -c "*) echo "a.cpp:1:1: error: a fault" >&2; exit 1;; esac; exec c++ "$@"',
        )
        changes = NO_COMPILER if fault == "no compiler" else {"CXX": failing}

        def frames(start: str) -> list[str]:
            done = run_python(
                "-c", f"{start}import identity_conv", IDENTITY_CONV_CACHE_DIR=tmp_path / "cache", **changes
            )
            assert done.returncode == 1
            assert ("a.cpp:1:1: error: a fault (the whole output is in " in done.stderr) == (fault != "no compiler")
            return re.findall(r'^ +File "(.*)", line', done.stderr, re.MULTILINE)

        init = str(ROOT / "identity_conv" / "__init__.py")
        assert frames("") == ["<string>", init, init]
        logged = frames("import logging; logging.basicConfig(level=logging.DEBUG); ")
        assert str(ROOT / "identity_conv" / "building.py") in logged
