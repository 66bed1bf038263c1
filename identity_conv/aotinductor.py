"""How AOTInductor is asked to compile: its settings, and the compiler that it is given.

Both save what every package would pay for again, by settings of torch's own; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

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
