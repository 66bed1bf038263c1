"""Timings beside what one would use otherwise: interleaved pairs, medians, intervals of the ratio."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .wording import counted

#: More than any card's L2, written between two runs so that neither finds its input there.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Comparison:
    """One thing timed beside its baseline.

    `ratio` is ours / baseline, the median over interleaved pairs: below 1 is faster. `low` and `high`
    bound it by a 95 % bootstrap interval; where they enclose 1 the difference is noise.
    """

    name: str
    baseline: str
    ours_us: float
    baseline_us: float
    ratio: float
    low: float
    high: float
    terabytes_per_second: float | None = None

    @property
    def verdict(self) -> str:
        return "noise" if self.low <= 1 <= self.high else "faster" if self.high < 1 else "slower"


def compare(
    name: str,
    baseline_name: str,
    ours: Callable[[], float],
    baseline: Callable[[], float],
    *,
    pairs: int,
    bytes_moved: int | None = None,
    warm_up: bool = True,
) -> Comparison:
    """Calls both by turns, `pairs` times after once to warm up, and compares the seconds they return."""
    if warm_up:
        ours(), baseline()
    times = []
    for pair in range(pairs):
        # Which goes first alternates: the second may find the other's warmth.
        if pair % 2:
            second, first = baseline(), ours()
        else:
            first, second = ours(), baseline()
        times.append((first, second))
    ratios = [first / second for first, second in times]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=pairs)) for _ in range(500))
    seconds = statistics.median(first for first, _ in times)
    return Comparison(
        name,
        baseline_name,
        seconds * 1e6,
        statistics.median(second for _, second in times) * 1e6,
        statistics.median(ratios),
        medians[12],
        medians[-13],
        bytes_moved / seconds / 1e12 if bytes_moved else None,
    )


def run(suite: str) -> Iterator[Comparison]:
    """The comparisons of `suite`, each as soon as it is measured."""
    return SUITES[suite]()


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    import torch

    facts = {"torch": torch.__version__, "cores": str(len(os.sched_getaffinity(0))), "date": time.strftime("%Y-%m-%d")}
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
    return facts


def record(comparisons: list[Comparison]) -> dict[str, Any]:
    """The comparisons and the machine, ready for JSON."""
    return {"machine": machine(), "comparisons": [asdict(each) | {"verdict": each.verdict} for each in comparisons]}


#: What a table in Markdown shows of :func:`cells`, and how each column is aligned.
_IN_MARKDOWN = {"what": "---", "µs": "---:", "beside": "---", "ratio": "---:", "95 %": "---", "TB/s": "---:"}


def cells(comparison: Mapping[str, Any]) -> dict[str, str]:
    """What tables show of one comparison of a record, by column."""
    bandwidth = comparison["terabytes_per_second"]
    return {
        "what": comparison["name"],
        "beside": comparison["baseline"],
        "µs": f"{comparison['ours_us']:.1f}",
        "baseline µs": f"{comparison['baseline_us']:.1f}",
        "TB/s": f"{bandwidth:.2f}" if bandwidth else "",
        "ratio": f"{comparison['ratio']:.3f}",
        "95 %": f"{comparison['low']:.3f} to {comparison['high']:.3f}",
        "verdict": comparison["verdict"],
    }


def heading(record: Mapping[str, Any]) -> str:
    """The machine that a record was taken on, in a line."""
    return ", ".join(f"{name} {fact}" for name, fact in record["machine"].items())


def table(record: Mapping[str, Any]) -> str:
    """A record as a table in Markdown, under the machine that it was taken on."""
    rows = [cells(each) for each in record["comparisons"]]
    lines = [list(_IN_MARKDOWN), list(_IN_MARKDOWN.values()), *([row[each] for each in _IN_MARKDOWN] for row in rows)]
    return "\n".join([heading(record), "", *(f"| {' | '.join(line)} |" for line in lines)])


def _took(work: Callable[[], object]) -> float:
    """Seconds of `work`, without those that its result takes to go."""
    begin = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - begin
    del kept
    return seconds


def timer(call: Callable[[], Any], device: str, bytes_moved: int) -> Callable[[], float]:
    """What times one call: for :func:`compare`, which calls it by turns with another's.

    Many of a short call are timed together, since one would drown in the clock's own cost. A longer one on a GPU is
    timed there, behind a write of more bytes than the L2 holds.

    Args:
        device: "cpu" or "cuda".
        bytes_moved: about as many as the call reads and writes, which tells how long it is.

    Returns:
        A function that makes the call, once or many times, and returns the seconds of one.
    """
    import torch

    if device == "cuda" and bytes_moved > 1 << 20:
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def time_on_gpu() -> float:
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return time_on_gpu

    repeat = max(1, 200_000 // (bytes_moved // 10 + 200))

    def calls() -> None:
        for _ in range(repeat):
            call()
        if device == "cuda":
            torch.cuda.synchronize()

    return lambda: _took(calls) / repeat


def _against_clone(name: str, x: Any) -> Comparison:
    import torch

    return _against(name, x, "torch.ops.aten.clone", lambda: torch.ops.aten.clone(x))


def _against_copy(name: str, x: Any) -> Comparison:
    """Beside a bare copy (``cudaMemcpyAsync`` on a GPU) into memory that is there already."""
    y = x.clone()
    return _against(name, x, "a copy into given memory", lambda: y.copy_(x))


def _against(name: str, x: Any, baseline_name: str, other: Callable[[], Any]) -> Comparison:
    import torch

    op = torch.ops.my_ops.identity_conv_op
    if not torch.equal(op(x), x):
        raise RuntimeError(f"bench: {name}: the operator's result isn't its input")
    # An expanded tensor is read once, however often its elements are written.
    written = x.numel() * x.element_size()
    size = written + min(written, x.untyped_storage().nbytes())
    device = x.device.type
    pairs = 31 if size < 1 << 28 else 15
    ours, baseline = timer(lambda: op(x), device, size), timer(other, device, size)
    return compare(f"{device} {name}", baseline_name, ours, baseline, pairs=pairs, bytes_moved=size)


def _devices() -> list[str]:
    import torch

    from . import ops  # noqa: F401  loads the operator

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _operator() -> Iterator[Comparison]:
    import torch

    for device in _devices():
        largest = 33 if device == "cuda" else 28
        for bits in (0, 12, 16, 20, 22, 26, 28, 30, 33):
            if bits <= largest:
                x = torch.zeros(1 << bits, dtype=torch.uint8, device=device)
                yield _against_clone(f"dense {1 << bits} B", x)
                yield _against_copy(f"dense {1 << bits} B", x)
                del x
        for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.complex128):
            x = torch.zeros((1 << 26) // dtype.itemsize, dtype=dtype, device=device)
            yield _against_clone(f"dense 64 MiB {dtype}", x)


def _layouts() -> Iterator[Comparison]:
    import torch

    for device in _devices():
        side = 16384 if device == "cuda" else 2048
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
            base = torch.zeros(side, side + 64 // dtype.itemsize, dtype=dtype, device=device)
            square = base.view(-1)[: side * side].view(side, side)
            views = {
                "rows padded by 16 B": base[:, : side + 16 // dtype.itemsize],
                "rows with odd pitch": base.view(-1)[: side * (side + 1)].view(side, side + 1)[:, :side],
                "dense, start off by one": base.view(-1)[1 : 1 + side * side],
                "last dimension in steps of two": square[:, ::2],
                "3 columns of many": square.view(-1, 16)[:, :3],
                "expanded rows": square[:1].expand(side, -1),
                "5-d slice": square.view(16, side // 16, 16, side // 256, 16)[:, 1:, 1:, 1:, 1:],
                "transposed slice": square[:, 1:].t(),
            }
            for name, view in views.items():
                yield _against_clone(f"{name} {dtype}", view)


def drawn_views(device: str, count: int = 200, seed: int = 0) -> Iterator[Any]:
    """Views of all sorts, of some bytes up to 64 MiB on a GPU and 8 MiB on the CPU: the layouts nobody thought of."""
    import torch

    draws = random.Random(seed)
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
    most = 1 << (26 if device == "cuda" else 23)
    for _ in range(count):
        dtype, rank = draws.choice(dtypes), draws.randint(1, 5)
        # The logarithm of the size in elements, shared out over the dimensions.
        total = math.log2(most / dtype.itemsize) - draws.uniform(0, 16)
        cuts = sorted(draws.uniform(0, total) for _ in range(rank - 1))
        shares = [high - low for low, high in itertools.pairwise([0, *cuts, total])]
        sizes = [max(1, int(2**share)) for share in shares]
        steps = [draws.choice((1, 1, 1, 2, 3)) for _ in sizes]
        pads = [draws.choice((0, 0, 1, 3, 16)) for _ in sizes]
        if math.prod(size * step + pad for size, step, pad in zip(sizes, steps, pads, strict=True)) > 8 * most:
            steps = [1] * rank
            pads = [0] * (rank - 1) + pads[-1:]
        whole = [size * step + pad for size, step, pad in zip(sizes, steps, pads, strict=True)]
        # No byte of 127 and more: every number equals itself.
        numbers = torch.randint(0, 127, [math.prod(whole) * dtype.itemsize], dtype=torch.uint8, device=device)
        base = numbers.view(dtype).view(whole)
        starts = [draws.randint(0, pad) for pad in pads]
        view = base[
            tuple(
                slice(start, start + size * step, step) for size, step, start in zip(sizes, steps, starts, strict=True)
            )
        ]
        order = list(range(rank))
        if draws.random() < 0.5:
            draws.shuffle(order)
        view = view.permute(order)
        if draws.random() < 0.15:  # one dimension is one element, over and over
            dim = draws.randrange(rank)
            view = view.narrow(dim, 0, 1).expand(view.shape)
        yield view


def _drawn() -> Iterator[Comparison]:
    for device in _devices():
        for x in drawn_views(device):
            yield _against_clone(f"{x.dtype} {tuple(x.shape)}, strides {x.stride()} + {x.storage_offset()}", x)


def _calls() -> Iterator[Comparison]:
    """What one call costs from Python, with hardly anything to copy: each way to call beside torch's same way."""
    import torch

    import identity_conv

    class Clone(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.clone(x)

    for device in _devices():
        x = torch.randn(1, 3, 8, 8, device=device)
        wanted = x.clone().requires_grad_()
        op, clone = torch.ops.my_ops.identity_conv_op, torch.ops.aten.clone
        layer, class_layer = identity_conv.IdentityConvCustomOp(), identity_conv.IdentityConvCustomClass(3)
        for name, ours, baseline_name, baseline, argument in (
            ("operator", op, "torch.ops.aten.clone", clone, x),
            ("operator, grad wanted", op, "torch.ops.aten.clone", clone, wanted),
            ("identity_conv", identity_conv.identity_conv, "torch.clone", torch.clone, x),
            ("class method", class_layer.conv.forward, "torch.ops.aten.clone", clone, x),
            ("layer of the operator", layer, "a layer of torch.clone", Clone(), x),
            ("layer of the class", class_layer, "a layer of torch.clone", Clone(), x),
        ):
            times = (timer(partial(each, argument), device, 0) for each in (ours, baseline))
            yield compare(f"{device} call: {name}", baseline_name, *times, pairs=31)


def _startup() -> Iterator[Comparison]:
    """Cold and warm imports in fresh processes, and the program's first result."""
    with tempfile.TemporaryDirectory() as folder:

        def seconds(code: str, **environment: str) -> float:
            command, values = [sys.executable, "-c", code], os.environ | environment
            return _took(lambda: subprocess.run(command, env=values, check=True, capture_output=True))

        def cold(*flags: str) -> Callable[[], float]:
            def build() -> float:
                cache = Path(folder) / "cold"
                shutil.rmtree(cache, ignore_errors=True)
                code = (
                    "import sys, _identity_conv_entry; from identity_conv import targets; "
                    f"e = targets.operators(); e.cflags = {list(flags)!r}; e.build()"
                )
                return seconds(code, IDENTITY_CONV_CACHE_DIR=str(cache), PYTHONPATH=_path())

            return build

        yield compare(
            "cold build",
            "the same sources with torch/extension.h",
            cold(),
            cold("-include", "torch/extension.h"),
            pairs=1,
            warm_up=False,
        )
        warm = {"IDENTITY_CONV_CACHE_DIR": str(Path(folder) / "warm"), "PYTHONPATH": _path()}
        seconds("import identity_conv", **warm)
        yield compare(
            "warm import",
            "import torch",
            lambda: seconds("import torch, identity_conv", **warm),
            lambda: seconds("import torch", **warm),
            pairs=9,
        )
        yield _first_result(Path(folder))


def _first_result(folder: Path) -> Comparison:
    """A process from its start to the first result: the program, and Python with torch's own loader."""
    import torch

    import identity_conv

    from . import targets

    x = torch.randn(2, 3, 8, 8)
    program = identity_conv.export(identity_conv.IdentityModel(), (x,))
    package = identity_conv.compile_package(program, folder / "model.pt2")
    library, given = targets.operators().build(), folder / "x.pt"
    torch.save(x, given)
    runner: list[str | Path] = [targets.program().build(), package, "--input", given, "--output", folder / "y.pt"]
    code = (
        f"import torch; torch.ops.load_library({str(library)!r}); "
        f"torch._inductor.aoti_load_package({str(package)!r})(torch.load({str(given)!r}))"
    )

    def seconds(*command: str | Path) -> float:
        return _took(lambda: subprocess.run(command, check=True, capture_output=True))

    return compare(
        "first result of identity-conv-run",
        "Python and aoti_load_package",
        lambda: seconds(*runner),
        lambda: seconds(sys.executable, "-c", code),
        pairs=7,
    )


def _package() -> Iterator[Comparison]:
    """A loaded package beside torch's own loader, which checks no input."""
    import torch

    import identity_conv

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for device in _devices():
            yield from _package_calls(device, folder)
        program = identity_conv.export(identity_conv.IdentityModel(), (torch.randn(2, 3, 8, 8),))
        demo = identity_conv.compile_package(program, folder / "model.pt2")

        def load(loader: Callable[[str], Any]) -> Callable[[], float]:
            return lambda: _took(lambda: loader(str(demo)))

        yield compare(
            "load of the demo model",
            "aoti_load_package, warm",
            load(identity_conv.load_package),
            load(torch._inductor.aoti_load_package),
            pairs=15,
        )
        yield _first_result(folder)


def _package_calls(device: str, folder: Path) -> Iterator[Comparison]:
    import torch

    import identity_conv

    class Operators(torch.nn.Module):
        def __init__(self, count: int):
            super().__init__()
            self.count = count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.count):
                x = identity_conv.identity_conv(x)
            return x

    x = torch.randn(1, 3, 8, 8, device=device)

    def compiled(count: int) -> str:
        program = identity_conv.export(Operators(count), (x,))
        return str(identity_conv.compile_package(program, folder / f"{device}{count}.pt2"))

    def timed(call: Callable[[Any], Any], count: int = 200) -> Callable[[], float]:
        def calls() -> None:
            for _ in range(count):
                call(x)
            if device == "cuda":
                torch.cuda.synchronize()

        return lambda: _took(calls) / count

    path = compiled(1)
    ours, stock = identity_conv.load_package(path), torch._inductor.aoti_load_package(path)
    if not torch.equal(ours(x), stock(x)):
        raise RuntimeError("bench: the package's result isn't the loader's")
    name = f"{device} call from Python, one operator"
    yield compare(name, "aoti_load_package", timed(ours), timed(stock), pairs=101)

    def in_cpp(of_torch: str | None) -> Callable[[], float]:
        return lambda: ours._package.time_calls(of_torch, 500, x)

    name = f"{device} call in C++, one operator"
    yield compare(name, "AOTIModelPackageLoader::run", in_cpp(None), in_cpp(path), pairs=101)
    if device == "cuda":
        path = compiled(8)
        graphed = identity_conv.load_package(path, cuda_graph=True)
        stock = torch._inductor.aoti_load_package(path)
        for _ in range(3):
            graphed(x)
        yield compare("CUDA graph of eight operators", "aoti_load_package", timed(graphed), timed(stock), pairs=101)


_COMPILE = """
import sys, time, torch, identity_conv
from pathlib import Path
from identity_conv import aotinductor
program = identity_conv.export(identity_conv.IdentityModel(), (torch.randn(2, 3, 8, 8),))
path = Path(sys.argv[2], "model.pt2")
begin = time.perf_counter()
if sys.argv[1] == "ours":
    aotinductor.compile_program(program, path, aotinductor.configs(None))
else:
    settings = {"cpp.cxx": (None, aotinductor.linking_compiler())}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
print(time.perf_counter() - begin)
"""


def _compile() -> Iterator[Comparison]:
    """AOTInductor under this package's settings and under its own, where nothing is remembered, and after that."""
    with tempfile.TemporaryDirectory() as name:

        def compiled(settings: str, *, first: bool) -> Callable[[], float]:
            folder = Path(name) / settings

            def seconds() -> float:
                if first:
                    shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(exist_ok=True)
                # Where inductor keeps what it compiles, and its precompiled headers.
                places = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TMPDIR": str(folder)}
                done = subprocess.run(
                    [sys.executable, "-c", _COMPILE, settings, folder],
                    env=os.environ | places | {"PYTHONPATH": _path()},
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                )
                return float(done.stdout.split()[-1])

            return seconds

        # The first after `identity-conv build`, which compiles what this package has of its own.
        for what, first, pairs in (("the first package", True, 3), ("a later package", False, 5)):
            ours, stock = compiled("ours", first=first), compiled("torch", first=first)
            # Nothing to warm: the first finds nothing, and the later ones find what it left.
            yield compare(f"compiling {what}", "aoti_compile_and_package", ours, stock, pairs=pairs, warm_up=False)


def _threads() -> Iterator[Comparison]:
    """A call of a package in C++ while several threads make calls, in seconds of all for each call, beside one's."""
    import torch

    import identity_conv

    with tempfile.TemporaryDirectory() as folder:
        for device in _devices():
            x = torch.randn(2, 3, 32, 32, device=device)
            program = identity_conv.export(identity_conv.IdentityModel(), (x,))
            path = identity_conv.compile_package(program, Path(folder) / f"{device}.pt2")
            with identity_conv.load_package(path) as alone:
                for count in (2, 4, 8, 16):
                    with identity_conv.load_package(path, num_runners=count) as package:
                        name = f"{device} a package's call, {counted(count, 'thread')}"
                        ours, one = _calls_in_threads(package, x, count), _calls_in_threads(alone, x, 1)
                        yield compare(name, "one thread", ours, one, pairs=15)


def _calls_in_threads(package: Any, x: Any, count: int) -> Callable[[], float]:
    """Times `count` threads that call `package` from C++: seconds of all of them for each call."""
    calls = 1000

    def in_each(_: int) -> float:
        return package._package.time_calls(None, calls, x)

    def seconds() -> float:
        with ThreadPoolExecutor(count) as threads:
            return _took(lambda: list(threads.map(in_each, range(count)))) / (count * calls)

    return seconds


#: The factor between the sizes that are compared below; what grows linearly takes as many times as long.
_GROWTH = 4


def _growth() -> Iterator[Comparison]:
    """Export, compilation and build of four times as much, beside four times the time: not slower, not above linear."""
    import torch

    import identity_conv

    from . import cache

    x = torch.randn(2, 3, 8, 8)

    def timed(work: Callable[[], object], times: int = 1) -> Callable[[], float]:
        return lambda: times * _took(work)

    def layers(count: int) -> torch.nn.Module:
        return torch.nn.Sequential(*(identity_conv.IdentityModel() for _ in range(count // 4)))

    library = "bench_growth"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}))
        stack.callback(cache.clean, library)
        fresh = iter(range(1_000_000))

        def export(count: int) -> Callable[[], object]:
            model = layers(count)
            return lambda: identity_conv.export(model, (x,))

        def compile_layers(count: int) -> Callable[[], object]:
            def work() -> object:
                # Another size each time: inductor remembers what it compiled.
                program = identity_conv.export(layers(count), (torch.randn(2, 3, 8, 8 + next(fresh)),))
                return identity_conv.compile_package(program, folder / "model.pt2")

            return work

        def build(count: int) -> Callable[[], object]:
            def work() -> object:
                source = folder / "operators.cpp"
                kernels = [f"at::Tensor f{i}(const at::Tensor& x) {{ return at::clone(x); }}" for i in range(count)]
                defined = [f'm.def("f{i}(Tensor x) -> Tensor"); m.impl("f{i}", &f{i});' for i in range(count)]
                # Other text each time: what is in the cache isn't built again.
                headers = ["#include <ATen/ops/clone.h>", "#include <torch/library.h>"]
                lines = [*headers, f"// {time.time_ns()}", *kernels]
                source.write_text("\n".join([*lines, f"TORCH_LIBRARY({library}, m) {{", *defined, "}", ""]))
                return identity_conv.Extension(library, [source]).build()

            return work

        for what, work, counts, unit, pairs in (
            ("export", export, (4, 16, 64, 256), "layers", 7),
            ("export and compile_package", compile_layers, (4, 16, 64), "layers", 3),
            ("build", build, (4, 16, 64), "operators", 3),
        ):
            for small in counts[:-1]:
                yield compare(
                    f"{what} of {_GROWTH * small} {unit}",
                    f"linear growth from {small}",
                    timed(work(_GROWTH * small)),
                    timed(work(small), _GROWTH),
                    pairs=pairs,
                    warm_up=small == counts[0],
                )


def _scaling() -> Iterator[Comparison]:
    """Ranks of a torchrun beside one of them."""
    import torch

    gpus = torch.cuda.device_count()
    threads = {} if gpus else {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus or 2)]
    done = subprocess.run(
        [*torchrun, "-m", "identity_conv.scaling", "cuda" if gpus else "cpu"],
        env=os.environ | threads | {"PYTHONPATH": _path()},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield Comparison(**json.loads(line))


def _path() -> str:
    package = Path(__file__).resolve().parent
    folders = [str(package.parent), str(package / "entry"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


#: Every suite by its name on the command line.
SUITES: dict[str, Callable[[], Iterator[Comparison]]] = {
    "operator": _operator,
    "package": _package,
    "layouts": _layouts,
    "drawn": _drawn,
    "calls": _calls,
    "startup": _startup,
    "compile": _compile,
    "growth": _growth,
    "threads": _threads,
    "scaling": _scaling,
}
