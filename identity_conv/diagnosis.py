"""What works on this machine and what doesn't: each fact with a verdict and a remedy.

Nothing here needs torch to be importable or a build to succeed: what could crash runs in a process of
its own, and a crash is a finding.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from . import __version__, building, cache, progress, settings, targets, toolchain
from .wording import counted

Verdict = Literal["ok", "warning", "fatal"]

PROBE_TIMEOUT_S = 300
LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    fact: str
    value: str
    verdict: Verdict = "ok"
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.fact}: {self.value}{f'; {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True)
class Report:
    """All findings; in a notebook it shows itself as a table."""

    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether nothing is fatal."""
        return all(finding.verdict != "fatal" for finding in self.findings)

    def json(self) -> str:
        """The findings as a JSON document."""
        return json.dumps({"healthy": self.healthy, "findings": [asdict(each) for each in self.findings]}, indent=1)

    def _repr_html_(self) -> str:
        from . import display

        rows = [(each.fact, each.value, each.verdict, each.remedy) for each in self.findings]
        return display.page(display.table(("fact", "found", "verdict", "what to do"), rows))


def doctor(*, probes: bool = True) -> Report:
    """Looks at all that a build and a package need.

    Args:
        probes: compile, load and run a small library, and a small AOTInductor package, in processes of
            their own; half a minute the first time.

    Returns:
        What was found, each with a verdict and a remedy. Nothing is raised: what fails is a finding.

    Example::

        >>> doctor(probes=False).healthy
        True
    """
    return Report(list(findings(probes=probes)))


def findings(*, probes: bool) -> Iterator[Finding]:
    """What :func:`doctor` finds, each as soon as it is known."""
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _torch, _compiler, _ninja, _cuda, _cache, _settings]
    if probes:
        checks += [_library_probe, _package_probe]
    for check in checks:
        yield from _guarded(check)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The check's findings; one more where it fails itself, for the report always prints."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(check.__name__.strip("_"), f"{type(error).__name__}: {error}", "fatal", "see the message")


def _python() -> Iterator[Finding]:
    yield Finding("identity_conv", __version__)
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()) or 'unknown C library'}"
    linux = sys.platform == "linux"
    yield Finding("system", system, "ok" if linux else "fatal", "" if linux else "use Linux")


def _torch() -> Iterator[Finding]:
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "not installed", "fatal", "pip install 'torch>=2.11'")
        return
    try:
        import torch
    except Exception as error:
        yield Finding("torch", f"{installed} doesn't import: {error}", "fatal", "pip install --force-reinstall torch")
        return
    oldest, newest = (".".join(map(str, each)) for each in (toolchain.OLDEST_TORCH, toolchain.NEWEST_TESTED_TORCH))
    version = toolchain.torch_version()
    text = f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if version < toolchain.OLDEST_TORCH:
        yield Finding("torch", text, "fatal", f"pip install 'torch>={oldest}'")
    elif version > toolchain.NEWEST_TESTED_TORCH:
        yield Finding("torch", text, "warning", f"newer than tested ({oldest} to {newest}): report what fails")
    else:
        yield Finding("torch", text)


def _compiler() -> Iterator[Finding]:
    if "torch" not in sys.modules:
        return
    try:
        found = toolchain.compiler(for_cuda=bool(toolchain.cuda_architectures()))
    except toolchain.ToolchainError as error:
        yield Finding("C++ compiler", str(error), "fatal", "see the message")
        return
    yield Finding("C++ compiler", f"{found} ({found.path})")
    if flags := toolchain.cpp_runtime_flags(found):
        yield Finding(
            "C++ runtime",
            f"the compiler has only the static libstdc++: linking with {' '.join(flags)}",
            "warning",
            "nothing for identity_conv; other builds need the shared libstdc++.so",
        )


def _ninja() -> Iterator[Finding]:
    try:
        yield Finding("ninja", str(toolchain.ninja_dir() / "ninja"))
    except toolchain.ToolchainError as error:
        yield Finding("ninja", str(error), "fatal", "pip install ninja")


def _cuda() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.version.cuda:
        yield Finding("CUDA", "not in this torch: CUDA sources stay out")
        return
    gpus = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(gpus)) if gpus else "none visible"
    driver = Path("/proc/driver/nvidia/version")
    if not gpus and driver.exists():
        yield Finding("GPU", names, "warning", "a driver is there: see CUDA_VISIBLE_DEVICES and nvidia-smi")
    else:
        yield Finding("GPU", names)
    nvcc, archs = toolchain.find_nvcc(), toolchain.cuda_architectures()
    if archs is None:
        yield Finding("CUDA sources", f"stay out: {toolchain.why_no_cuda()}")
        return
    if nvcc is None:
        yield Finding("nvcc", "not found", "fatal", "install the CUDA toolkit, or set CUDA_HOME to it")
        return
    release = toolchain.nvcc_version(nvcc)
    same = release.split(".")[0] == torch.version.cuda.split(".")[0]
    yield Finding(
        "nvcc",
        f"{release} ({nvcc}), for {archs}",
        "ok" if same else "fatal",
        "" if same else f"torch needs CUDA {torch.version.cuda.split('.')[0]}: set CUDA_HOME to such a toolkit",
    )


def _cache() -> Iterator[Finding]:
    folder = settings.cache_dir()
    try:
        settings.make_private(folder)
        cache.check_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, toolchain.BuildError) as error:
        yield Finding("cache", f"{folder}: {error}", "fatal", f"set {settings.CACHE_DIR.name} to a folder of yours")
        return
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {counted(len(cache.entries()), 'build')}, {free / (1 << 30):.1f} GiB free"
    low = free < LEAST_FREE_BYTES
    yield Finding("cache", text, "warning" if low else "ok", "identity-conv cache clean" if low else "")


def _settings() -> Iterator[Finding]:
    for setting in settings.ALL:
        if value := setting.value():
            try:
                yield Finding(setting.name, value, *_judged(setting, value))
            except toolchain.BuildError as error:
                yield Finding(setting.name, value, "fatal", str(error))


def _judged(setting: settings.Setting, value: str) -> tuple[Verdict, str]:
    """A variable's verdict and remedy, by what reads it.

    Raises:
        BuildError: it can't be used.
    """
    torch = sys.modules.get("torch")
    if setting is settings.MAX_JOBS:
        toolchain.jobs()
    if setting is settings.CUDA_HOME and not toolchain.find_cuda_home():
        return "warning", "it has no bin/nvcc, which CUDA sources need: name the CUDA toolkit's folder, or unset it"
    if setting is settings.CC and not toolchain.find_cc():
        return "warning", "it is not a program, which nvcc needs: name a C++ compiler, or unset it"
    if setting is settings.TMPDIR and not os.access(value, os.W_OK | os.X_OK):
        return "fatal", "packages can't be opened there: name a folder that can be written, or unset it"
    if torch is None:
        return "ok", ""
    if setting is settings.PREFIX:
        targets.operators().build()  # it is taken from there, or refused
    if setting is settings.CXX:
        toolchain.compiler(for_cuda=bool(toolchain.cuda_architectures()))
    if setting is settings.CUDA_ARCH_LIST and not torch.version.cuda:
        return "warning", f"nothing, since it is ignored: {toolchain.why_no_cuda()}"
    if setting is settings.CUDA_ARCH_LIST and (archs := toolchain.cuda_architectures()):
        building.check_architectures(archs)
    return "ok", ""


_LIBRARY_PROBE = """
import sys, torch
sys.modules["_identity_conv_entry"] = sys
from identity_conv import Extension
ext = Extension("identity_conv_probe", [sys.argv[1]]).load()
assert int(torch.ops.identity_conv_probe.answer(torch.ones(3))) == 3
"""

_LIBRARY_SOURCE = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
static int64_t answer(const at::Tensor& x) { return x.numel(); }
TORCH_LIBRARY(identity_conv_probe, m) { m.def("answer(Tensor x) -> int"); }
TORCH_LIBRARY_IMPL(identity_conv_probe, CompositeExplicitAutograd, m) { m.impl("answer", &answer); }
"""

_PACKAGE_PROBE = """
import sys, torch
sys.modules["_identity_conv_entry"] = sys
from identity_conv import compile_package
model = torch.nn.Linear(2, 2)
program = torch.export.export(model, (torch.ones(1, 2),))
path = compile_package(program, sys.argv[1] + ".pt2")
torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run([torch.ones(1, 2)])
"""


def _library_probe() -> Iterator[Finding]:
    if "torch" in sys.modules:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(_LIBRARY_SOURCE)
            yield _probe("compile and load a library", _LIBRARY_PROBE, source)


def _package_probe() -> Iterator[Finding]:
    if "torch" in sys.modules:
        with tempfile.TemporaryDirectory() as folder:
            yield _probe("compile and run a package", _PACKAGE_PROBE, Path(folder) / "probe")


def _probe(fact: str, code: str, argument: Path) -> Finding:
    progress.say(f"{fact} ...")
    # Where this package was imported from, also when it isn't installed.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, argument],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(fact, f"no end after {PROBE_TIMEOUT_S} s", "fatal", "see which process of it hangs")
    if done.returncode == 0:
        return Finding(fact, "works")
    if done.returncode < 0:
        return Finding(fact, f"crashed by signal {-done.returncode}", "fatal", "another compiler, named by CXX, may do")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(fact, last, "fatal", "see the message")
