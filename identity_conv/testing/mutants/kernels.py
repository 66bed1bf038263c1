"""A kernel of which it is known whether it is right, and where it comes from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import settings
from ...extension import Extension
from ..compare import Comparison

_NAMESPACES = {"cpu": "identity_conv_mutants", "cuda": "identity_conv_mutants_cuda"}


@dataclass(frozen=True)
class Kernel:
    """An operator or a class, and what is known of it.

    Attributes:
        name: in its library's namespace; with ``::`` an operator of another library.
        kind: the kind of bug, or what a right one shows.
        bug: a sentence; empty if it is right.
        checks: names as of ``check_op(skip=...)``: a report of the bug must have one of them; none if it is right.
        witness: takes the operator or the class and gives True where it is wrong; None if it is right.
        device: "cpu" or "cuda".
        reference: what it should do.
        compare: how values are compared with the reference's; None for bit by bit.
        skip: checks that can't be asked of it, each with the reason, as of ``check_op``.
        tier: the first tier of ``check_op`` at which the bug can show.
        needs: what a machine must have for the bug to show: "2 GPUs", "20 GiB", "24 GPU-GiB", or nothing.
    """

    name: str
    kind: str
    bug: str = ""
    checks: tuple[str, ...] = ()
    witness: Callable[[Any], bool] | None = field(default=None, repr=False)
    device: str = "cpu"
    reference: Callable[..., Any] = field(default=torch.clone, repr=False)
    compare: Comparison | None = None
    skip: Mapping[str, str] = field(default_factory=dict)
    tier: str = "quick"
    needs: str = ""

    @property
    def is_right(self) -> bool:
        return not self.checks

    @property
    def is_class(self) -> bool:
        return self.name[0].isupper()

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self.name, self.device)  # its functions can't travel

    def get(self) -> Any:
        """The operator or the class; builds and loads its library if need be."""
        if "::" in self.name:
            namespace, _, name = self.name.partition("::")
            return getattr(getattr(torch.ops, namespace), name)
        load(self.device)
        owner = torch.classes if self.is_class else torch.ops
        return getattr(getattr(owner, _NAMESPACES[self.device]), self.name)


def find(name: str, device: str = "cpu") -> Kernel:
    """The kernel of that name in the table.

    Raises:
        LookupError: there is none.
    """
    from .table import MUTANTS, RIGHT

    for kernel in (*MUTANTS, *RIGHT):
        if (kernel.name, kernel.device) == (name, device):
            return kernel
    raise LookupError(f"name must be one of the kernels for {device}, got {name!r}")


@functools.cache
def load(device: str = "cpu") -> Extension:
    """The library of the kernels for a device, loaded; built if need be, which takes about half a minute."""
    folder = settings.source_dir() / "mutants" / ("" if device == "cpu" else device)
    # Unoptimised: it builds faster, and a read that has no effect is made all the same.
    return Extension(
        _NAMESPACES[device], sorted(folder.glob("*.c*")), include_dirs=[folder.parent], cflags=["-O1"]
    ).load()
