"""Checks any kernel by property: the inputs that tell a right one from a wrong one, drawn and shrunk.

hypothesis (``pip install identity_conv[testing]``) draws and shrinks; without it a fixed corpus of
plans is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Guarded, TensorPlan

_HOMES = {
    "Guarded": "plan",
    "TensorPlan": "plan",
}

__all__ = ["Guarded", "TensorPlan"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
