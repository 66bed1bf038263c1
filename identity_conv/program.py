"""From a model to an exported program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Exports `model` with its custom operators and classes in the graph.

    Args:
        model: any module; custom classes may be attributes of it.
        args, kwargs: example inputs. Dimensions that `dynamic_shapes` doesn't name are fixed to theirs.
        dynamic_shapes: as ``torch.export.export`` takes it.

    Raises:
        TypeError: `args` isn't a tuple.

    Example::

        >>> program = export(IdentityModel(), (torch.randn(2, 3, 8, 8),))
        >>> "call_torchbind" in str(program.graph)
        True
    """
    if not isinstance(args, tuple):
        raise TypeError(f"export: args must be a tuple of the model's positional arguments, got {type(args).__name__}")
    return torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False)
