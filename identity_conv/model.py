"""The custom operator and class as layers, and a model that mixes them with native ones."""

from __future__ import annotations

import torch
from torch import nn

from .ops import identity_conv


class IdentityConvCustomOp(nn.Module):
    """The operator ``my_ops::identity_conv_op`` as a layer: any dense tensor in, its copy out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return identity_conv(x)


class IdentityConvCustomClass(nn.Module):
    """The class ``my_ops::IdentityConvClass`` as a layer.

    Args:
        channels: the channels of the input, at least 1.

    Shape:
        input and output ``(N, channels, H, W)``, any dtype.

    Raises:
        ValueError: `channels` is no int, or less than 1; in ``forward``, the input has another rank or other channels.
    """

    def __init__(self, channels: int):
        super().__init__()
        _check_channels(channels)
        self.conv = torch.classes.my_ops.IdentityConvClass(channels=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv.forward(x)

    def extra_repr(self) -> str:
        return f"channels={self.conv.channels}"


class IdentityModel(nn.Module):
    """Native convolution, custom class, native convolution, custom operator: the identity four times.

    The native layers are 1 × 1 convolutions with the identity for weight. The output equals the
    input for finite values: exactly on CPU; on CUDA within what the convolutions' arithmetic allows,
    which is TF32 by default (10 bits of mantissa; ``torch.backends.cudnn.allow_tf32 = False`` is exact).

    Args:
        channels: the channels of the input, at least 1.

    Shape:
        input and output ``(N, channels, H, W)``, floating point, of the model's dtype.

    Example::

        >>> model = IdentityModel(channels=3)
        >>> x = torch.randn(2, 3, 8, 8)
        >>> torch.equal(model(x), x)
        True
    """

    def __init__(self, channels: int = 3):
        super().__init__()
        _check_channels(channels)
        self.native1 = _identity_conv2d(channels)
        self.custom_class = IdentityConvCustomClass(channels)
        self.native2 = _identity_conv2d(channels)
        self.custom_op = IdentityConvCustomOp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.custom_op(self.native2(self.custom_class(self.native1(x))))


def _check_channels(channels: int) -> None:
    """The layers' one argument, checked before torch says it in many lines."""
    if isinstance(channels, bool) or not isinstance(channels, int) or not 1 <= channels < 2**31:
        raise ValueError(f"channels must be an int from 1 to 2**31 - 1, got {channels!r}")


def _identity_conv2d(channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels, kernel_size=1, bias=False)
    nn.init.dirac_(conv.weight)
    return conv
