"""How good is a test? Kernels that are wrong in one way each, right ones beside them, and a score.

Each mutant copies its input and is right but for one bug of a kind that public reports tell of; it comes with a
witness, a few lines that prove it wrong, and with the checks of which one must speak of it. Their sources
(``src/mutants``) are C++ and CUDA and are built when they are first asked for.

Example::

    >>> from identity_conv.testing import mutants
    >>> mutants.kill_score(mutants.checked)  # doctest: +SKIP
    check_op, check_class: caught 95 of 95, for the right reason 95, false alarms 0 of 16 in 20942 calls, 714 s
"""

from __future__ import annotations

from .kernels import Kernel, load
from .score import (
    Checker,
    Outcome,
    Score,
    Verdict,
    checked,
    has,
    hypothesis_torch,
    kill_score,
    make_tensor_and_gradcheck,
    opcheck,
    table,
)
from .table import MUTANTS, RIGHT
from .witness import witnessed

__all__ = [
    "MUTANTS",
    "RIGHT",
    "Checker",
    "Kernel",
    "Outcome",
    "Score",
    "Verdict",
    "checked",
    "has",
    "hypothesis_torch",
    "kill_score",
    "load",
    "make_tensor_and_gradcheck",
    "opcheck",
    "table",
    "witnessed",
]
