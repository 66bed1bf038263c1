"""muladd, compiled on the first import and whenever its sources change."""

from pathlib import Path

import torch

from identity_conv import Extension

HERE = Path(__file__).parent
extension = Extension("muladd", [HERE / "muladd.cpp", HERE / "muladd.cu"]).load()
ops = extension.ops


def reference(a, b, c):
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    y = a.to(wide) * b.to(wide) + c
    return torch.empty_like(a * b).copy_(y)  # whose strides are those of a * b


@torch.library.register_fake("muladd::muladd")
def _(a, b, c):
    return a * b
