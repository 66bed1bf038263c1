"""The operator library of the worked example, and the operator's Python side.

Importing this module builds the library if need be, and loads it.
"""

from __future__ import annotations

from typing import Any

import torch

from . import sharding, targets
from .extension import Extension

extension = Extension._of(targets.operators()).load()


@torch.library.register_vmap("my_ops::identity_conv_op")
def _batching_rule(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    return identity_conv(x), in_dims[0]


sharding.pointwise("my_ops::identity_conv_op", keeps_partial=sharding.EVERY_PARTIAL)


def identity_conv(x: torch.Tensor) -> torch.Tensor:
    """A fresh tensor with the values of `x`.

    Args:
        x: any dense (strided) tensor: every dtype that ``torch.clone`` copies, any shape and strides,
            on any device.

    Returns:
        A tensor with `x`'s shape, dtype and device, and the strides of ``torch.clone(x)``; values are
        equal bit for bit.

    Raises:
        ValueError: `x` is sparse, quantized, nested or mkldnn.

    Example::

        >>> import torch, identity_conv
        >>> identity_conv.identity_conv(torch.arange(3))
        tensor([0, 1, 2])
    """
    return torch.ops.my_ops.identity_conv_op(x)
