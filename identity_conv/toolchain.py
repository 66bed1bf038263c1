"""What this machine has to build with: compilers, ninja, the CUDA toolkit, and torch's own facts."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import settings

#: torch's headers need C++20 from 2.13 on, and C++17 before.
MINIMUM_GCC = {"c++20": (11, 0), "c++17": (9, 3)}
MINIMUM_CLANG = {"c++20": (14, 0), "c++17": (9, 0)}

#: The newest g++ that nvcc takes, by nvcc's release, newest first: CUDA's installation guide, "Host
#: Compiler Support Policy".
NEWEST_GCC_OF_NVCC = [((13, 0), 15), ((12, 8), 14), ((12, 4), 13), ((12, 0), 12), ((11, 4), 11)]

#: What a compiler needs at most over torch's headers, in bytes.
MEMORY_OF_A_COMPILER = 3 << 29

OLDEST_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 14)


class BuildError(ImportError):
    """A library could not be built or used. The message says why and what to do."""


class ToolchainError(BuildError):
    """This machine lacks something that a build needs."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the program and the version it reports."""

    path: str
    kind: str  # "g++" or "clang++"
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"


def torch_version() -> tuple[int, int]:
    """The (major, minor) of the torch that is imported."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor).group())  # type: ignore[union-attr]


@functools.cache
def check_torch() -> None:
    """Refuses a torch that is too old, and notes, once, one that is newer than tested.

    Raises:
        BuildError: torch is older than 2.11.
    """
    import torch

    oldest = ".".join(map(str, OLDEST_TORCH))
    if torch_version() < OLDEST_TORCH:
        raise BuildError(
            f"identity_conv needs torch {oldest} or newer, got {torch.__version__}: pip install 'torch>={oldest}'"
        )
    if torch_version() > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        print(
            f"identity_conv: torch {torch.__version__} is newer than the versions tested ({oldest} to {newest})",
            file=sys.stderr,
        )


def cpp_standard() -> str:
    """The C++ standard that torch's headers need."""
    return "c++20" if torch_version() >= (2, 13) else "c++17"


def torch_facts() -> dict[str, str]:
    """What a library built against this torch depends on."""
    import torch

    return {
        "torch": torch.__version__,
        "torch git": torch.version.git_version or "unknown",
        "C++11 ABI": str(torch.compiled_with_cxx11_abi()),
    }


def torch_folder() -> Path:
    """The folder that torch is installed in."""
    import torch

    return Path(torch.__file__).parent


def folders() -> list[Path]:
    """Where headers and libraries lie that are no project's: torch's, CUDA's, the compilers' and the system's."""
    compilers = [Path(os.path.realpath(path)).parent.parent for path in (find_cxx(), find_cc()) if path]
    own = [torch_folder(), *filter(None, [find_cuda_home()]), Path(sys.base_prefix) / "include"]
    # A compiler in /usr/bin doesn't make all of /usr the toolchain's.
    return [*own, Path("/usr/include"), Path("/usr/lib"), *(each for each in compilers if each != Path("/usr"))]


def platform() -> str:
    """The operating system and processor, such as ``linux x86_64``."""
    return f"{sys.platform} {os.uname().machine}"


def find_cxx() -> str | None:
    """The C++ compiler: CXX, else c++, else g++.

    Links are kept: ccache, or clang for clang++, is one program that acts by the name it is called by.
    """
    chosen = settings.CXX.value()
    for name in [chosen] if chosen else ["c++", "g++"]:
        if found := shutil.which(name):
            return os.path.abspath(found)
    return None


def find_cc() -> str | None:
    """The program that CC names, which nvcc is then given as its host compiler."""
    chosen = settings.CC.value()
    return shutil.which(chosen) if chosen else None


def archiver() -> str:
    """The program that joins objects to an archive.

    Raises:
        ToolchainError: there is none.
    """
    names = ("ar", "gcc-ar", "llvm-ar")
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    raise ToolchainError(f"no archiver was found, of {', '.join(names)}: install binutils, which comes with g++")


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME, else the folder around nvcc on PATH, else the usual place.

    nvcc on PATH may be a script that runs one elsewhere: a folder that has the headers too comes first.
    """
    if chosen := settings.CUDA_HOME.value():
        homes = [Path(chosen)]
    else:
        on_path = shutil.which("nvcc")
        homes = [Path(os.path.realpath(on_path)).parent.parent] if on_path else []
        homes.append(Path("/usr/local/cuda"))
    homes = [home for home in homes if (home / "bin" / "nvcc").is_file()]
    return min(homes, key=lambda home: not (home / "include" / "cuda_runtime.h").is_file(), default=None)


def find_nvcc() -> str | None:
    """The CUDA toolkit's nvcc."""
    home = find_cuda_home()
    return str(home / "bin" / "nvcc") if home else None


def compiler(*, for_cuda: bool = False) -> Compiler:
    """The C++ compiler that torch's headers accept, and nvcc too where `for_cuda`.

    CXX decides. Where it is unset, the first of c++, g++ and the versioned ones that is accepted.

    Raises:
        ToolchainError: there is none, it doesn't answer, or none is accepted.
    """
    path = find_cxx()
    if path is None and settings.CXX.value():
        raise ToolchainError(
            f"CXX must name a C++ compiler, and {settings.CXX.value()!r} is not a program: unset it, or name another"
        )
    if path is None:
        raise ToolchainError(
            f"no C++ compiler found (no c++ or g++ on PATH): install g++ {MINIMUM_GCC[cpp_standard()][0]} or newer "
            "(Debian: apt-get install g++), or set CXX"
        )
    others = [] if settings.CXX.value() else [f"g++-{version}" for version in range(16, 8, -1)]
    refusals = []
    for each in (path, *filter(None, map(shutil.which, others))):
        found = _identify(each)
        refusal = _why_not(found, for_cuda)
        if refusal is None:
            return found
        refusals.append(refusal)
    raise ToolchainError(refusals[0])


def _why_not(found: Compiler, for_cuda: bool) -> str | None:
    import torch

    minimum = (MINIMUM_CLANG if found.kind == "clang++" else MINIMUM_GCC)[cpp_standard()]
    if found.version < minimum:
        return (
            f"{found} ({found.path}) is too old for torch {torch.__version__}, whose headers need {cpp_standard()}: "
            f"install {found.kind} {minimum[0]} or newer, or name another with CXX"
        )
    nvcc = find_nvcc() if for_cuda else None
    if nvcc and found.kind == "g++":
        release = tuple(map(int, nvcc_version(nvcc).split(".")))
        newest = next((gcc for since, gcc in NEWEST_GCC_OF_NVCC if release >= since), None)
        if newest and found.version[0] > newest:
            return (
                f"{found} ({found.path}) is too new for nvcc {nvcc_version(nvcc)}, which takes g++ up to {newest}: "
                f"install g++-{newest}, or name it with CXX"
            )
    return None


def jobs() -> int:
    """How many compilers may run at once: MAX_JOBS, else by cores and memory, of this process and of its cgroup.

    Raises:
        ToolchainError: MAX_JOBS isn't a number from 1 on.
    """
    if asked := settings.MAX_JOBS.value():
        if not asked.isdecimal() or not int(asked):
            raise ToolchainError(f"{settings.MAX_JOBS.name} must be a number from 1 on, got {asked!r}")
        return int(asked)
    cores, memory = float(len(os.sched_getaffinity(0))), float("inf")
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    for file, unit in (("/sys/fs/cgroup/memory.max", 1), ("/proc/meminfo", 1024)):
        try:
            text = Path(file).read_text()
            found = re.search(r"MemAvailable:\s*(\d+)", text) or re.match(r"(\d+)$", text.strip())
        except OSError:
            continue
        if found:
            memory = min(memory, int(found.group(1)) * unit)
    return max(1, int(min(cores, memory // MEMORY_OF_A_COMPILER)))


def cuda_runtime_flags(folder: Path, *, found_at_start: bool = False) -> list[str]:
    """What a linker must be given to find ``-lcudart``, which torch asks for.

    Nothing where the toolkit isn't found. pip's CUDA runtime has ``libcudart.so`` only under its version: then
    a link of the plain name is made in `folder`. `found_at_start` lets a program find it, which starts before
    torch has loaded it.
    """
    home = find_cuda_home()
    places = [home / place for place in ("lib64", "lib", "targets/x86_64-linux/lib")] if home else []
    places = [place for place in places if (place / "libcudart.so").exists()] or [
        *sorted((torch_folder().parent / "nvidia").glob("*/lib")),
        *places,
    ]
    for place in places:
        versioned = next(iter(sorted(place.glob("libcudart.so*"))), None)
        if versioned is None:
            continue
        if versioned.name != "libcudart.so":
            (folder / "libcudart.so").symlink_to(versioned)
        rpath = [f"-Wl,-rpath,{place}"] if found_at_start else []
        return [f"-L{folder if versioned.name != 'libcudart.so' else place}", *rpath]
    return []


def cpp_runtime_flags(compiler: Compiler) -> list[str]:
    """What a linker must be given for a library to run on the libstdc++ that torch runs on.

    Nothing, as a rule. But a compiler installed without ``libstdc++.so``, as slim images have it, finds
    the static archive and puts a second C++ runtime into each library; the two disagree on locales,
    and the first number written to a stream, or the first regular expression, crashes.
    """

    def find(file: str) -> str | None:
        path = _run([compiler.path, f"-print-file-name={file}"]).strip()
        return path if os.path.isabs(path) else None

    if find("libstdc++.so") or not find("libstdc++.a"):
        return []
    return [find("libstdc++.so.6") or "-l:libstdc++.so.6"]


def nvcc_version(nvcc: str) -> str:
    """The release that nvcc reports, such as 13.0."""
    return _remembered(nvcc, _ask_nvcc)


def compiler_identity(path: str) -> str:
    """The compiler's real path and the version it reports; runs it only the first time."""
    return f"{os.path.realpath(path)} {_remembered(path, _ask_compiler)}"


def _identify(path: str) -> Compiler:
    kind, _, version = _remembered(path, _ask_compiler).partition(" ")
    return Compiler(path, kind, tuple(int(part) for part in version.split(".")))


def _ask_compiler(path: str) -> str:
    line = _run([path, "--version"]).partition("\n")[0]
    versions = re.findall(r"\d+\.\d+(?:\.\d+)?", line)
    if not versions:
        raise ToolchainError(f"{path} doesn't say its version with --version: set CXX to g++ or clang++")
    # g++ puts the vendor's package version, in brackets, before its own.
    return f"clang++ {versions[0]}" if "clang" in line else f"g++ {versions[-1]}"


def _ask_nvcc(path: str) -> str:
    found = re.search(r"release ([\d.]+)", _run([path, "--version"]))
    if not found:
        raise ToolchainError(f"{path} doesn't say its release with --version: set CUDA_HOME to a CUDA toolkit")
    return found.group(1)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{command[0]} doesn't run: {error}") from error
    return done.stdout


def _remembered(program: str, ask) -> str:
    """What `ask` says of a program, asked again only when its path, size or time changes."""
    stat = os.stat(program)
    identity = f"{program} {os.path.realpath(program)} {stat.st_size} {stat.st_mtime_ns}"
    record = settings.cache_dir() / "compilers.json"
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict) or not re.search(r"\b\d+\.\d+", str(known.get(identity, "0.0"))):
        known = {}  # damaged
    if identity not in known:
        known[identity] = ask(program)
        try:
            settings.make_private(record.parent)
            settings.write_at_once(record, json.dumps(known, indent=1))
        except OSError:
            pass  # only a memory; the build itself says what is wrong with the folder
    return known[identity]


def ninja_dir() -> Path:
    """The folder of the ninja program: of its Python package, else on PATH.

    Raises:
        ToolchainError: there is none.
    """
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        try:
            import ninja

            found = os.path.join(ninja.BIN_DIR, "ninja")
        except ImportError:
            raise ToolchainError("no ninja found, which runs the compilers: pip install ninja") from None
    return Path(found).parent


@functools.cache
def gpu_architectures() -> tuple[str, ...]:
    """Compute capabilities of the GPUs that torch may use, such as ("9.0",); empty without one.

    Asked of NVML, which neither initialises CUDA nor spoils a later fork.
    """
    import torch

    if not torch.version.cuda or torch.cuda.device_count() == 0:
        return ()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count, found = ctypes.c_uint(), set()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            raise OSError("NVML doesn't answer")
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(
                index, ctypes.byref(device)
            ) or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
                raise OSError("NVML doesn't answer")
            found.add((major.value, minor.value))
    except OSError:
        found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"{major}.{minor}" for major, minor in sorted(found))


def cuda_architectures(asked: str | None = None) -> str | None:
    """What CUDA sources are compiled for, or None where they stay out.

    They join when torch has CUDA and architectures are asked for, here or in TORCH_CUDA_ARCH_LIST, or
    a GPU is visible.
    """
    import torch

    if not torch.version.cuda:
        return None
    chosen = asked or settings.CUDA_ARCH_LIST.value()
    if chosen and chosen != "native":
        return chosen
    visible = gpu_architectures()
    return ";".join((*visible[:-1], f"{visible[-1]}+PTX")) if visible else None


def why_no_cuda() -> str:
    """Why CUDA sources stay out here."""
    import torch

    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    return f"no GPU is visible and {settings.CUDA_ARCH_LIST.name} names no architecture"
