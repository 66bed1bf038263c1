"""Checks any kernel by property: the inputs that tell a right one from a wrong one, drawn and shrunk.

hypothesis (``pip install identity_conv[testing]``) draws and shrinks; without it a fixed corpus of
plans is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call import Call
    from .context import Context
    from .plan import Guarded, SharedStorage, TensorPlan
    from .state import State
    from .strategies import (
        broadcastable,
        calls,
        contexts,
        dtypes,
        layouts,
        plans,
        shapes,
        shared_storage,
        states,
        tensors,
    )

_HOMES = {
    "Call": "call",
    "Context": "context",
    "Guarded": "plan",
    "SharedStorage": "plan",
    "State": "state",
    "TensorPlan": "plan",
    "broadcastable": "strategies",
    "calls": "strategies",
    "contexts": "strategies",
    "dtypes": "strategies",
    "layouts": "strategies",
    "plans": "strategies",
    "shapes": "strategies",
    "shared_storage": "strategies",
    "states": "strategies",
    "tensors": "strategies",
}

__all__ = [
    "Call",
    "Context",
    "Guarded",
    "SharedStorage",
    "State",
    "TensorPlan",
    "broadcastable",
    "calls",
    "contexts",
    "dtypes",
    "layouts",
    "plans",
    "shapes",
    "shared_storage",
    "states",
    "tensors",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
