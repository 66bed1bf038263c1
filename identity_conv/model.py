"""The custom operator and class as layers, and a model that mixes them with native ones."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .ops import identity_conv


class IdentityConvCustomOp(nn.Module):
    """The operator ``my_ops::identity_conv_op`` as a layer: any dense tensor in, its copy out.

    Shape:
        input and output alike, any; any dtype.

    Raises:
        ValueError: in ``forward``, the input is sparse, quantized, nested or mkldnn.
    """

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


def keep_in_state_dict(module: nn.Module, name: str) -> None:
    """Puts the state of a custom class's object into ``module.state_dict()``, and takes it from there.

    Without this a ``state_dict`` has nothing of an object, as torch has it; ``deepcopy``, ``pickle`` and
    ``torch.save`` of the whole module keep it either way.

    Args:
        module: any module.
        name: its attribute that is the object, of a class with ``def_pickle``.

    Raises:
        TypeError: the attribute is no such object.

    Example::

        >>> layer = IdentityConvCustomClass(3)
        >>> keep_in_state_dict(layer, "conv")
        >>> layer.state_dict()
        OrderedDict({'conv': (1, ('channels', 3))})
    """
    obj = getattr(module, name, None)
    if not isinstance(obj, torch.ScriptObject) or "__getstate__" not in obj._method_names():  # type: ignore[attr-defined]
        raise TypeError(
            f"keep_in_state_dict: name must be an attribute that is an object of a custom class with def_pickle, "
            f"got {name!r}, {type(obj).__name__}"
        )
    # By functions of a module, so that the module is still pickled.
    module.register_state_dict_post_hook(functools.partial(_save_object, name))
    module.register_load_state_dict_pre_hook(functools.partial(_load_object, name))


def _save_object(name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    state_dict[prefix + name] = getattr(module, name).__getstate__()[0]


def _load_object(
    name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any, strict: bool, missing: list[str],
    *others: Any,
) -> None:  # fmt: skip
    if prefix + name not in state_dict:
        missing.append(prefix + name)
        return
    new: Any = torch.ScriptObject.__new__(torch.ScriptObject)
    new.__setstate__((state_dict.pop(prefix + name), getattr(module, name).__getstate__()[1]))
    setattr(module, name, new)


def _check_channels(channels: int) -> None:
    """The layers' one argument, checked before torch says it in many lines."""
    if isinstance(channels, bool) or not isinstance(channels, int) or not 1 <= channels < 2**31:
        raise ValueError(f"channels must be an int from 1 to 2**31 - 1, got {channels!r}")


def _identity_conv2d(channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels, kernel_size=1, bias=False)
    nn.init.dirac_(conv.weight)
    return conv
