"""A loaded package under load: threads, streams, CUDA graphs, weights, and what it leaves behind."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support_build import environment
from test_package import close_to
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import identity_conv
from identity_conv import targets


class Weights(torch.nn.Module):
    """(x @ weight.T + bias + shift) * scale, with weights large, small and scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 64)
        self.register_buffer("shift", torch.ones(64))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.shift) * self.scale


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Weights]]:
    """A package of Weights for each device, and the model."""
    found = {}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        model = Weights().to(device).eval()
        program = identity_conv.export(
            model, (torch.randn(3, 4, device=device),), dynamic_shapes=({0: Dim("n", max=64)},)
        )
        path = tmp_path_factory.mktemp(device) / "weights.pt2"
        found[device] = identity_conv.compile_package(program, path), model
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that this process, and those that it starts, use for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import os, sys, torch, identity_conv\n" + code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


# --- weights ---


def test_weights_are_listed_by_the_names_of_the_model(device: str, weights) -> None:
    path, model = weights[device]
    package = identity_conv.load_package(path)
    state = model.state_dict()
    assert package.constant_names() == sorted(state)
    constants = package.constants()
    for name, value in state.items():
        assert torch.equal(constants[name], value)
    constants["scale"].zero_()
    assert package.constants()["scale"] == 2


@pytest.mark.parametrize("layout", ["plain", "transposed", "part of more", "expanded", "requires grad", "elsewhere"])
def test_loaded_weights_are_used_and_the_others_stay(device: str, weights, layout: str) -> None:
    path, model = weights[device]
    package = identity_conv.load_package(path)
    new = {
        "plain": torch.randn(64, 4, device=device),
        "transposed": torch.randn(4, 64, device=device).t(),
        "part of more": torch.randn(9, 64, 7, device=device)[3, :, 1:5],
        "expanded": torch.randn(1, 4, device=device).expand(64, 4),
        "requires grad": torch.randn(64, 4, device=device, requires_grad=True),
        "elsewhere": torch.randn(64, 4),
    }[layout]
    x = torch.randn(5, 4, device=device)
    package(x)
    package.load_constants({"linear.weight": new})
    expected = (x @ new.detach().to(device).t() + model.linear.bias + model.shift) * 2
    torch.testing.assert_close(package(x), expected.detach(), **close_to(expected))
    with torch.no_grad():
        new.detach().zero_()
    torch.testing.assert_close(package(x), expected.detach(), **close_to(expected))
    package.load_constants({"scale": torch.tensor(3.0)})
    torch.testing.assert_close(package(x), expected.detach() * 1.5, **close_to(expected))


def test_weights_that_do_not_fit_leave_the_old_ones(device: str, weights) -> None:
    path, _ = weights[device]
    package = identity_conv.load_package(path)
    x = torch.randn(5, 4, device=device)
    before = package(x)
    good = torch.zeros(64, 4)
    for wrong, sentence in [
        ({"linear.weight": good, "shift": torch.zeros(63)}, r"constant shift: size must be \[64\], got \[63\]"),
        ({"linear.weight": good, "scale": torch.tensor(1)}, "constant scale: dtype must be float32, got int64"),
        ({"linear.weight": good, "weight": good}, "constant weight: the package has none of this name"),
        ({"linear.weight": good, "shift\0": good}, "the package has none of this name"),
        ({"linear.weight": good, "shift": torch.zeros(64).to_sparse()}, "constant shift: must be a dense"),
        ({"linear.weight": good, "shift": torch.zeros(64, device="meta")}, "constant shift: must be a plain tensor"),
    ]:
        with pytest.raises(RuntimeError, match=sentence):
            package.load_constants(wrong)
        assert torch.equal(package(x), before)
    for wrong in ({"shift": 3}, {3: good}, [good], None):
        with pytest.raises(TypeError):
            package.load_constants(wrong)
    assert torch.equal(package(x), before)


def test_each_call_sees_all_old_or_all_new_weights(device: str, weights) -> None:
    path, _ = weights[device]
    package = identity_conv.load_package(path, num_runners=4)
    x = torch.ones(3, 4, device=device)
    sets = [
        {"linear.weight": torch.full((64, 4), v), "linear.bias": torch.full((64,), v), "shift": torch.full((64,), v)}
        for v in (1.0, 2.0)
    ]
    package.load_constants(sets[0])
    until = time.monotonic() + 2
    calls = []

    def call() -> None:
        count = 0
        while time.monotonic() < until:
            y = package(x)
            assert y.unique().tolist() in ([12.0], [24.0])
            count += 1
        calls.append(count)

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(call) for _ in range(8)]
        swaps = 0
        while time.monotonic() < until:
            package.load_constants(sets[swaps % 2])
            swaps += 1
        for each in running:
            each.result()
    assert swaps > 10
    assert min(calls) > 10


# --- threads, devices and options ---


@pytest.mark.parametrize("num_runners", [1, 4])
def test_sixteen_threads_get_the_serial_results_from_the_first_call_on(device: str, weights, num_runners: int) -> None:
    path, model = weights[device]
    xs = [torch.randn(1 + i, 4, device=device) for i in range(16)]
    with torch.no_grad():
        expected = [model(x) for x in xs]
    for _ in range(5):
        package = identity_conv.load_package(path, num_runners=num_runners)
        start = threading.Barrier(16)

        def call(i: int, package=package, start=start) -> list[torch.Tensor]:
            start.wait()
            return [package(xs[i]) for _ in range(20)]

        with ThreadPoolExecutor(16) as pool:
            for i, results in enumerate(pool.map(call, range(16))):
                for y in results:
                    torch.testing.assert_close(y, expected[i], **close_to(expected[i]))


def test_options_out_of_range_are_refused(weights) -> None:
    path, _ = weights["cpu"]
    for options, sentence in [
        ({"num_runners": 0}, "num_runners must be 1 to 1024, got 0"),
        ({"num_runners": -3}, "num_runners must be 1 to 1024, got -3"),
        ({"num_runners": 10**6}, "num_runners must be 1 to 1024, got 1000000"),
        ({"device": "cuda"}, "device must be of type cpu, for which the package was compiled, got cuda"),
        ({"expected_sha256": ""}, 'expected_sha256 must be 64 hexadecimal digits, got ""'),
        ({"expected_sha256": "0" * 63 + "g"}, "expected_sha256 must be 64 hexadecimal digits"),
        ({"cuda_graph": "yes"}, "cuda_graph must be False, True or 'reuse outputs', got 'yes'"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            identity_conv.load_package(path, **options)
    assert identity_conv.load_package(path, device="cpu").device == torch.device("cpu")


def test_gradients_are_not_promised(weights) -> None:
    package = identity_conv.load_package(weights["cpu"][0])
    x = torch.randn(3, 4)
    assert not package(x.clone().requires_grad_()).requires_grad
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="input x: must have no forward-mode tangent"):
        package(forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_refused_call_keeps_nothing(weights) -> None:
    package = identity_conv.load_package(weights["cpu"][0])
    x = torch.randn(3, 5)
    before = sys.getrefcount(x), x._use_count()
    for _ in range(100):
        with pytest.raises(RuntimeError, match="input x: size of dimension 1 must be 4, got 5"):
            package(x)
    assert (sys.getrefcount(x), x._use_count()) == before


@pytest.mark.parametrize("call", [lambda p, x: p(), lambda p, x: p(x, x), lambda p, x: p(x, y=x), lambda p, x: p([x])])
def test_missing_and_extra_arguments_are_refused(weights, call: Callable) -> None:
    package = identity_conv.load_package(weights["cpu"][0])
    with pytest.raises(TypeError):
        call(package, torch.randn(3, 4))


def test_a_closed_package_says_so(weights) -> None:
    with identity_conv.load_package(weights["cpu"][0]) as package:
        package(torch.randn(3, 4))
    package.close()
    assert repr(package) == f"Package({str(weights['cpu'][0])!r}, closed)"
    for use in (lambda: package(torch.randn(3, 4)), package.constants, lambda: package.load_constants({})):
        with pytest.raises(ValueError, match="the package is closed"):
            use()


def test_closing_waits_for_the_calls_under_way(weights) -> None:
    path, model = weights["cpu"]
    x = torch.randn(64, 4)
    expected = model(x).detach()
    for _ in range(20):
        package = identity_conv.load_package(path)

        def call(package=package) -> int:
            for count in range(200):
                try:
                    y = package(x)
                except ValueError:
                    return count
                torch.testing.assert_close(y, expected)
            return 200

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(call) for _ in range(4)]
            package.close()
            for each in running:
                each.result()


@pytest.mark.parametrize("mode", ["fake tensors", "autocast", "dispatch", "vmap", "grad", "meta by default"])
def test_modes_of_the_thread_take_no_part_in_a_call(packages: dict[str, Path], mode: str) -> None:
    """Compiled code takes what operators return for plain memory: a fake tensor's would end the process."""
    x, seen = torch.randn(2, 3, 8, 9), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def use() -> torch.Tensor:
        with identity_conv.load_package(packages["cpu"]) as package:
            package.load_constants({"native1.weight": package.constants()["native1.weight"]})
            package.verify()
            return package(x)

    if mode in ("vmap", "grad"):
        results = []
        transform = torch.vmap if mode == "vmap" else torch.func.grad
        transform(lambda v: (results.append(use()), v * 2)[1])(torch.ones(3) if mode == "vmap" else torch.ones(()))
        (y,) = results
    else:
        modes = {
            "fake tensors": FakeTensorMode,
            "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            "dispatch": Watch,
            "meta by default": lambda: torch.device("meta"),
        }
        with modes[mode]():
            y = use()
    assert seen == []
    torch.testing.assert_close(y, x, **close_to(x))


FORK = """
package = identity_conv.load_package(sys.argv[1])
x = torch.randn(64, 3, 64, 64)
package(x)  # from here on there are threads of OpenMP
def use(package):
    # numpy compares: torch's own operators, too, wait for threads that the child doesn't have
    try: return bool((abs(package(x).numpy() - x.numpy()) < 1e-5).all())
    except identity_conv.ExecutionError as error: return str(error)
child = os.fork()
if child == 0:
    print(use(package), flush=True)
    with identity_conv.load_package(sys.argv[1]) as own:
        print(use(own), flush=True)
    package.close()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), use(package))
"""


def test_a_forked_process_opens_a_package_of_its_own(packages: dict[str, Path], temporary: Path) -> None:
    done, _ = python(FORK, packages["cpu"]).communicate(timeout=120)
    inherited, own, parent = done.splitlines()
    assert inherited.startswith("the package was opened before this process was forked")
    assert (own, parent) == ("True", "0 True")
    assert list(temporary.iterdir()) == []


# --- what it leaves behind ---

MEASURE = """
import gc
def state():
    gc.collect()
    maps = len(open("/proc/self/maps").read().splitlines())
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return maps, resident, len(os.listdir("/proc/self/fd"))
"""


def test_two_hundred_loads_grow_neither_disk_nor_memory(packages: dict[str, Path], temporary: Path) -> None:
    code = (
        MEASURE + "x = torch.randn(2, 3, 8, 8)\n"
        "def load(count):\n"
        "    for _ in range(count):\n"
        "        package = identity_conv.load_package(sys.argv[1])\n"
        "        package(x)\n"
        "        try: package(x[:, :2])\n"
        "        except RuntimeError: pass\n"
        "load(50)\n"
        "before = state()\n"
        "load(200)\n"
        "print(*(b - a for a, b in zip(before, state())), len(os.listdir(os.environ['TMPDIR'])))"
    )
    done, _ = python(code, packages["cpu"]).communicate()
    maps, resident, files, folders = map(int, done.split())
    assert maps <= 5
    assert resident < 2 << 20
    assert files <= 0
    assert folders == 0


def test_twenty_processes_at_once_leave_nothing(packages: dict[str, Path], temporary: Path, tmp_path: Path) -> None:
    program, library = targets.program().build(), targets.operators().build()
    x = torch.randn(2, 3, 8, 8)
    torch.save(x, tmp_path / "x.pt")
    command = [program, packages["cpu"], "--library", library, "--input", tmp_path / "x.pt", "--output"]
    running = [subprocess.Popen([*command, tmp_path / f"y{i}.pt"]) for i in range(20)]
    assert [each.wait() for each in running] == [0] * 20
    for i in range(20):
        torch.testing.assert_close(torch.load(tmp_path / f"y{i}.pt"), x)
    assert list(temporary.iterdir()) == []


def test_a_process_that_ends_with_packages_open_leaves_nothing(weights, temporary: Path) -> None:
    code = (
        "import ctypes\n"
        "package = identity_conv.load_package(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del package\n"
        "    os._exit(len(os.listdir(os.environ['TMPDIR'])))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1\n"
        "print(len(os.listdir(os.environ['TMPDIR'])), flush=True)\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(package))  # Python's own end doesn't free it\n"
    )
    done, _ = python(code, weights["cpu"][0]).communicate()
    assert done.strip() == "1"
    assert list(temporary.iterdir()) == []


def test_the_next_load_clears_up_after_a_crash_and_nothing_else(weights, temporary: Path) -> None:
    path, _ = weights["cpu"]
    code = "package = identity_conv.load_package(sys.argv[1])\nprint(flush=True)\ninput()\npackage(torch.randn(3, 4))"
    crashed, living = (python(code, path) for _ in range(2))
    for each in (crashed, living):
        each.stdout.readline()
    (temporary / "identity_conv-of-another").mkdir()
    assert len(list(temporary.iterdir())) == 3
    crashed.send_signal(signal.SIGKILL)
    crashed.wait()
    with identity_conv.load_package(path):
        # Its own, the living one's and the other.
        assert len(list(temporary.iterdir())) == 3
    living.communicate("\n")
    assert living.returncode == 0
    assert [each.name for each in temporary.iterdir()] == ["identity_conv-of-another"]


def test_a_failed_load_leaves_nothing(packages: dict[str, Path], temporary: Path, tmp_path: Path) -> None:
    """A package whose library isn't one, but whose checksums are right."""
    with (
        zipfile.ZipFile(packages["cpu"]) as source,
        zipfile.ZipFile(tmp_path / "model.pt2", "w") as copy,
    ):
        for record in source.infolist():
            data = source.read(record)
            copy.writestr(record, b"\x7fELF" + bytes(200) if record.filename.endswith("wrapper.so") else data)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            identity_conv.load_package(tmp_path / "model.pt2")
    assert list(temporary.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing(weights, temporary: Path) -> None:
    """As a limit on the size of files shows it."""
    code = (
        "import resource\n"
        "identity_conv.load_package(sys.argv[1]).close()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try: identity_conv.load_package(sys.argv[1])\n"
        "except identity_conv.HostError as error: print(error)\n"
    )
    done, _ = python(code, weights["cpu"][0]).communicate(timeout=120)
    assert "cannot be written to" in done
    assert done.count("\n") == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_program_leaves_nothing(
    packages: dict[str, Path], program: Path, temporary: Path, tmp_path: Path, how: signal.Signals
) -> None:
    torch.save(torch.randn(2, 3, 8, 8), tmp_path / "x.pt")
    command = [program, packages["cpu"], "--input", tmp_path / "x.pt", "--repeat", "1000000000"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(temporary.glob("*/data/aotinductor/model/*.so")) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (1, "identity-conv-run: interrupted\n")
    assert list(temporary.iterdir()) == []


def test_a_folder_for_temporary_files_that_is_missing_is_named(
    weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"missing can't be used \(.*\): set TMPDIR to another"):
        identity_conv.load_package(weights["cpu"][0])


# --- CUDA graphs ---


def test_without_a_gpu_graphs_are_left_out_with_a_reason(weights) -> None:
    path, model = weights["cpu"]
    package = identity_conv.load_package(path, cuda_graph=True)
    x = torch.randn(3, 4)
    with pytest.warns(RuntimeWarning, match="runs without a CUDA graph: the package was compiled for cpu"):
        package(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(package(x), model(x).detach())
    assert package.cuda_graph_fallback == "the package was compiled for cpu"
    assert identity_conv.load_package(path).cuda_graph_fallback == ""


@pytest.mark.gpu
def test_graphs_give_the_model_s_results_and_memory_of_their_own(weights) -> None:
    path, model = weights["cuda"]
    package = identity_conv.load_package(path, cuda_graph=True)
    kept = []
    for n in (3, 5, 3, 5, 3, 5, 3, 7, 0, 0, 0):
        x = torch.randn(n, 4, device="cuda")
        with torch.no_grad():
            kept.append((package(x), model(x)))
    assert package.cuda_graph_fallback == ""
    for got, expected in kept:
        torch.testing.assert_close(got, expected, **close_to(torch.ones(1, device="cuda")))


@pytest.mark.gpu
def test_a_graph_replays_where_the_model_would_be_run(weights) -> None:
    """Seen by what the GPU was given: one launch of a graph, none of a kernel."""
    package = identity_conv.load_package(weights["cuda"][0], cuda_graph=True)
    x = torch.randn(3, 4, device="cuda")
    for _ in range(3):
        package(x)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        package(x)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "cudaGraphLaunch" in names
    assert not any("LaunchKernel" in name for name in names)


@pytest.mark.gpu
def test_reused_outputs_are_overwritten_by_the_next_call_of_their_sizes(weights) -> None:
    package = identity_conv.load_package(weights["cuda"][0], cuda_graph="reuse outputs")
    xs = [torch.randn(3, 4, device="cuda") for _ in range(4)]
    for x in xs[:2]:
        package(x)
    first = package(xs[2])
    second = package(xs[3])
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.gpu
def test_the_number_of_graphs_is_bounded(weights) -> None:
    path, model = weights["cuda"]
    package = identity_conv.load_package(path, cuda_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for n in range(1, 25):
                x = torch.randn(n, 4, device="cuda")
                with torch.no_grad():
                    torch.testing.assert_close(package(x), model(x), **close_to(torch.ones(1, device="cuda")))
            for n in range(1, 17):
                package(torch.randn(n, 4, device="cuda"))
                package(torch.randn(n, 4, device="cuda"))
        package(torch.randn(30, 4, device="cuda"))
    assert package.cuda_graph_fallback == "there are graphs for 16 combinations of input sizes already"


@pytest.mark.gpu
def test_graphs_on_several_threads_and_streams_give_the_serial_results(weights) -> None:
    path, model = weights["cuda"]
    package = identity_conv.load_package(path, cuda_graph=True)
    xs = [torch.randn(1 + i % 4, 4, device="cuda") for i in range(16)]
    with torch.no_grad():
        expected = [model(x) for x in xs]
    torch.cuda.synchronize()

    def call(i: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [package(xs[i]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(16) as pool:
        for i, results in enumerate(pool.map(call, range(16))):
            for y in results:
                torch.testing.assert_close(y, expected[i], **close_to(torch.ones(1, device="cuda")))


@pytest.mark.gpu
def test_graphs_follow_replaced_weights(weights) -> None:
    package = identity_conv.load_package(weights["cuda"][0], cuda_graph=True)
    x = torch.ones(3, 4, device="cuda")
    for value in (1.0, 2.0, 3.0):
        package.load_constants(
            {
                "linear.weight": torch.full((64, 4), value),
                "linear.bias": torch.zeros(64),
                "shift": torch.zeros(64),
                "scale": torch.tensor(1.0),
            }
        )
        for _ in range(4):
            assert package(x).unique().tolist() == [4 * value]
    assert package.cuda_graph_fallback == ""


SYNCHRONIZING = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
at::Tensor through_host(const at::Tensor& x) { return x.cpu().to(x.device()); }
at::Tensor like(const at::Tensor& x) { return at::empty_like(x); }
TORCH_LIBRARY(test_runtime, m) { m.def("through_host(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(test_runtime, CPU, m) { m.impl("through_host", through_host); }
TORCH_LIBRARY_IMPL(test_runtime, CUDA, m) { m.impl("through_host", through_host); }
TORCH_LIBRARY_IMPL(test_runtime, Meta, m) { m.impl("through_host", like); }
"""


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_runs_without_a_graph_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "through_host.cpp").write_text("#include <ATen/ops/empty_like.h>\n" + SYNCHRONIZING)
    extension = identity_conv.Extension("through_host", [tmp_path / "through_host.cpp"])
    extension.load()

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.ops.test_runtime.through_host(x) + 1

    program = identity_conv.export(Model(), (torch.randn(3, 4, device="cuda"),))
    path = identity_conv.compile_package(program, tmp_path / "model.pt2")
    package = identity_conv.load_package(path, cuda_graph=True)
    x = torch.randn(3, 4, device="cuda")
    with pytest.warns(RuntimeWarning, match=r"runs without a CUDA graph: the call can't be captured \("):
        assert [torch.equal(package(x), x + 1) for _ in range(6)] == [True] * 6
    # What a failed capture must not leave: a generator, an allocator and a stream in its state.
    torch.randn(8, device="cuda")
    torch.empty(1 << 20, device="cuda").zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2)


@pytest.mark.gpu
def test_graphs_give_their_memory_back(weights) -> None:
    x = torch.randn(64, 4, device="cuda")

    def load(count: int) -> int:
        for _ in range(count):
            with identity_conv.load_package(weights["cuda"][0], cuda_graph=True) as package:
                for _ in range(3):
                    package(x)
        del package
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    load(3)
    before = load(3)
    assert load(30) <= before


@pytest.mark.gpu
def test_a_package_runs_on_the_current_stream(packages: dict[str, Path]) -> None:
    package = identity_conv.load_package(packages["cuda"])
    x = torch.randn(64, 3, 512, 512, device="cuda")
    package(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.mul_(0)
        y = package(x)
    assert not stream.query()
    stream.synchronize()
    assert not y.any()


@pytest.mark.gpu
def test_a_device_that_is_not_there_is_refused(packages: dict[str, Path]) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=f"device cuda:{count} was asked for, and cuda has {count} device"):
        identity_conv.load_package(packages["cuda"], device=f"cuda:{count}")
    last = torch.device("cuda", count - 1)
    package = identity_conv.load_package(packages["cuda"], device=last)
    assert package.device == last
    x = torch.randn(2, 3, 8, 8, device=last)
    torch.testing.assert_close(package(x), x, **close_to(x))
