"""How AOTInductor is asked to compile: its settings, the compiler that it is given, and when it is used.

They save what every package would pay for again, by settings of torch's own, and have what is left of the first
done side by side. What is private in torch is touched as it is in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from . import settings, targets, toolchain

#: What ATen's vectors of each instruction set are compiled with, of those that this processor may have.
_VECTOR_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx512vnni")


def configs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of ``torch._inductor.config`` that a package is compiled with; those `given` win.

    Raises:
        ToolchainError: the machine has no compiler that torch's headers accept.
    """
    # Not where a package is only loaded: importing it takes a second.
    from torch._inductor import config

    given = dict(given or {})
    # Weights of a few elements stay weights, which can be replaced, where they would become literals.
    found: dict[str, Any] = {"always_keep_tensor_constants": True}
    if "cpp.cxx" not in given:
        compiler = toolchain.compiler()
        found["cpp.cxx"] = (None, _script(compiler))
        # torch knows what vectors the processor has, and would compile ATen's to learn that the compiler has them too.
        # What another compiler has, it learns.
        if config.cpp.vec_isa_ok is None and _compiles_vectors(compiler.path):
            found["cpp.vec_isa_ok"] = True
    # It names the precompiled header with this program.
    if shutil.which("openssl") is None:
        found["aot_inductor.precompile_headers"] = False
    return found | given


def compile_program(program: ExportedProgram, path: Path, configs: Mapping[str, Any]) -> None:
    """Compiles `program` under the settings `configs` into an archive at `path`."""
    with _headers_precompiled_meanwhile(program, configs):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(configs))


@contextlib.contextmanager
def _headers_precompiled_meanwhile(program: ExportedProgram, configs: Mapping[str, Any]) -> Iterator[None]:
    """Compiles in threads the headers that inductor precompiles only when all is lowered, and one after the other.

    It finds them, or waits for them by its own lock; where they aren't what it wants, or failed, it does as without
    this. The end waits for the compilers: none is left running.
    """
    from torch._inductor import config, cpu_vec_isa

    # The settings of torch 2.11 are those of all threads, later ones those of a context.
    with config.patch(dict(configs)), ThreadPoolExecutor(toolchain.jobs()) as threads:
        if config.aot_inductor.precompile_headers:
            vectors = cpu_vec_isa.pick_vec_isa()  # not in a thread: while it looks it changes what others read
            device, size = _device_type(program), 0
            if config.aot_inductor.package_constants_in_so:
                size = sum(value.numel() * value.element_size() for value in program.state_dict.values())
            for of_wrapper in (True, False):
                run = contextvars.copy_context().run
                threads.submit(run, _precompile_header, device, vectors, size, of_wrapper=of_wrapper)
        yield


def _device_type(program: ExportedProgram) -> str:
    values = [node.meta.get("val") for node in program.graph.nodes]
    found = {value.device.type for value in values if isinstance(value, torch.Tensor)} - {"cpu", "meta"}
    return found.pop() if found else "cpu"


def _precompile_header(device: str, vectors: Any, size_of_weights: int, *, of_wrapper: bool) -> None:
    """Precompiles the header of the wrapper or of the kernels as inductor does, in ``AotCodeCompiler.compile``."""
    from torch._inductor import codecache, cpp_builder, utils

    wrapper = codecache._get_cpp_wrapper_header(device, aot_mode=True)
    header = wrapper if of_wrapper else codecache._get_cpp_prefix_header(device)
    if header is None:
        return  # a GPU's kernels aren't C++
    key = cpp_builder.CppTorchDeviceOptions(vec_isa=vectors, device_type=device, aot_mode=True)
    command = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=key).get_command_line()
    external, mapped = utils.determine_aoti_mmap_flags(size_of_weights)
    # The order is part of what torch remembers a header by.
    codecache._precompile_header(
        header,
        repr(command),
        **({"min_optimize": True} if of_wrapper else {}),
        aot_mode=True,
        device_type=device,
        use_mmap_weights=mapped,
        use_mmap_weights_external=external,
        use_relative_path=False,
        vec_isa=vectors,
    )


@functools.cache
def _compiles_vectors(compiler: str) -> bool:
    if toolchain.platform() != "linux x86_64":
        return False
    command = [compiler, *_VECTOR_FLAGS, "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _script(compiler: toolchain.Compiler) -> str:
    """A compiler that takes std::regex as it was compiled once (``src/aotinductor/regex.h``).

    Without that it is half of what a wrapper compiles.
    """
    regex = targets.regex().build(use_prefix=False)
    header = shlex.quote(str(settings.source_dir() / "aotinductor" / "regex.h"))
    # All of it, and kept inside: libtorch comes before it, and has symbols of the same names.
    link = ["-Wl,--whole-archive", str(regex), "-Wl,--no-whole-archive", f"-Wl,--exclude-libs,{regex.name}"]
    return _in_front_of(compiler, link, f'*.wrapper.cpp) exec {shlex.quote(compiler.path)} "$@" -include {header} ;;\n')


def linking_compiler() -> str:
    """The C++ compiler, linking with the C++ runtime that torch's libraries use, and not changed in anything else."""
    return _in_front_of(toolchain.compiler(), [], "")


def _in_front_of(compiler: toolchain.Compiler, link: list[str], compiling: str) -> str:
    """A script in front of the compiler, which also precompiles headers: only linking takes the flags `link`."""
    real = shlex.quote(compiler.path)
    link = [*link, *toolchain.cpp_runtime_flags(compiler)]
    text = (
        "#!/bin/sh\n"
        "for argument; do case $argument in\n"
        f'-shared) exec {real} "$@" {shlex.join(link)} ;;\n'
        f"{compiling}"
        "esac; done\n"
        f'exec {real} "$@"\n'
    )
    # Inductor tells g++ from clang++ by the program's name.
    script = settings.cache_dir() / "linking" / hashlib.sha256(text.encode()).hexdigest()[:16] / compiler.kind
    if not script.exists():
        settings.make_private(script.parent)
        settings.write_at_once(script, text, mode=0o700)
    return str(script)
