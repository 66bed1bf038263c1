"""rms_norm, compiled on the first import and whenever its sources change."""

from pathlib import Path

import torch

from identity_conv import Extension

HERE = Path(__file__).parent
extension = Extension("rms_norm", [HERE / "rms_norm.cpp", HERE / "rms_norm.cu"]).load()
ops = extension.ops


def reference(x, residual=None, weight=None, eps=1e-6):
    if x.dim() == 0 or not eps >= 0:
        raise ValueError("x must have a dimension at least, and eps must be 0 or more")
    if residual is not None:
        x = residual.add_(x)
    inverse_rms = (x.double().square().mean(-1) + eps).rsqrt()
    out = x * inverse_rms.unsqueeze(-1)
    out = out if weight is None else out * weight
    return out.to(x.dtype).contiguous(), inverse_rms.to(torch.promote_types(x.dtype, torch.float32))
