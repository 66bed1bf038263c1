"""rms_norm, compiled on the first import and whenever its sources change."""

from pathlib import Path

import torch

from identity_conv import Extension

HERE = Path(__file__).parent
extension = Extension("rms_norm", [HERE / "rms_norm.cpp", HERE / "rms_norm.cu"]).load()
ops = extension.ops


def reference(x, residual=None, weight=None, eps=1e-6):
    if x.dim() == 0 or (weight is not None and weight.shape != x.shape[-1:]):
        raise ValueError("what isn't taken")
    if residual is not None:
        x = residual.add_(x)
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    inverse_rms = (wide.square().mean(-1) + eps).rsqrt()
    out = wide * inverse_rms.unsqueeze(-1)
    return (out if weight is None else out * weight).to(x.dtype).contiguous(), inverse_rms
