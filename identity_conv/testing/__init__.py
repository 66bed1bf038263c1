"""Checks any kernel by property: the inputs that tell a right one from a wrong one, drawn and shrunk.

hypothesis (``pip install identity_conv[testing]``) draws and shrinks; without it a fixed corpus of
plans is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call import Call
    from .checking import check_op
    from .classes import check_class
    from .compare import Comparison, close, exact, ulp
    from .context import Context
    from .plan import Guarded, SharedStorage, TensorPlan
    from .report import CheckFailure, Report, Violation
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
    "CheckFailure": "report",
    "Comparison": "compare",
    "Context": "context",
    "Guarded": "plan",
    "Report": "report",
    "SharedStorage": "plan",
    "State": "state",
    "TensorPlan": "plan",
    "Violation": "report",
    "broadcastable": "strategies",
    "calls": "strategies",
    "check_class": "classes",
    "check_op": "checking",
    "close": "compare",
    "contexts": "strategies",
    "dtypes": "strategies",
    "exact": "compare",
    "layouts": "strategies",
    "plans": "strategies",
    "shapes": "strategies",
    "shared_storage": "strategies",
    "states": "strategies",
    "tensors": "strategies",
    "ulp": "compare",
}

__all__ = [
    "Call",
    "CheckFailure",
    "Comparison",
    "Context",
    "Guarded",
    "Report",
    "SharedStorage",
    "State",
    "TensorPlan",
    "Violation",
    "broadcastable",
    "calls",
    "check_class",
    "check_op",
    "close",
    "contexts",
    "dtypes",
    "exact",
    "layouts",
    "plans",
    "shapes",
    "shared_storage",
    "states",
    "tensors",
    "ulp",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
