"""The instruction sets that AOTInductor's compiler may use, which a host of the package must have.

This module touches what is private in torch for that; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

#: Instruction sets that compilers use by themselves, or inductor's kernels ask for: what a compiler defines where one
#: may be used, and what Linux calls it.
_NAMES = {
    "__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2", "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe", "__AVX__": "avx", "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c",
    "__BMI__": "bmi1", "__BMI2__": "bmi2", "__LZCNT__": "abm", "__AVXVNNI__": "avx_vnni", "__AVX512F__": "avx512f",
    "__AVX512DQ__": "avx512dq", "__AVX512CD__": "avx512cd", "__AVX512BW__": "avx512bw", "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma", "__AVX512VBMI__": "avx512vbmi", "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni", "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq", "__AVX512BF16__": "avx512_bf16", "__AVX512FP16__": "avx512_fp16",
    "__AMX_TILE__": "amx_tile", "__AMX_INT8__": "amx_int8", "__AMX_BF16__": "amx_bf16", "__AMX_FP16__": "amx_fp16",
    "__ARM_NEON": "asimd", "__ARM_FEATURE_ATOMICS": "atomics", "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_QRDMX": "asimdrdm", "__ARM_FEATURE_FP16_SCALAR_ARITHMETIC": "fphp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp", "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm", "__ARM_FEATURE_SVE": "sve", "__ARM_FEATURE_SVE2": "sve2",
    "__ARM_FEATURE_SVE_BF16": "svebf16", "__ARM_FEATURE_SVE_MATMUL_INT8": "svei8mm",
}  # fmt: skip


def compiled_for(configs: Mapping[str, Any], *, device: str) -> list[str]:
    """The instruction sets, by Linux's names, of code that AOTInductor compiles under the settings `configs`.

    Its own flags decide, which are ``-march=native`` unless ``cpp.march`` says otherwise (from torch 2.13 on), and
    its compiler is asked what they allow.
    """
    # Not where a package is only loaded: importing them takes a second.
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    with config.patch(dict(configs)):
        # Only kernels for the CPU are compiled for vectors of a width; asking for it compiles probes.
        vectors = cpu_vec_isa.pick_vec_isa() if device == "cpu" else cpu_vec_isa.invalid_vec_isa
        compiler = cpp_builder.get_cpp_compiler()
        options = cpp_builder.CppTorchOptions(vec_isa=vectors, aot_mode=True)
    flags = [f"-{flag}" for flag in options.get_cflags()]
    flags += [flag for given in options.get_passthrough_args() for flag in shlex.split(given)]
    command = [compiler, *(flag for flag in flags if flag.startswith("-m")), "-dM", "-E", "-x", "c++", "/dev/null"]
    defined = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return sorted(_NAMES[macro] for macro in set(defined) & _NAMES.keys())
