"""The part of the table that needs a GPU."""

from __future__ import annotations

from .kernels import Kernel

ON_CUDA: tuple[Kernel, ...] = ()
RIGHT_ON_CUDA: tuple[Kernel, ...] = ()
