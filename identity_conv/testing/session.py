"""A pytest session with checked operators: what the plugin does once a test asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import failures
from .checking import check_op
from .classes import check_class
from .coverage import Coverage
from .report import LISTENERS, CheckFailure, Report
from .state import State
from .subject import Subject


class Session:
    """What is kept over the tests of one process.

    Args:
        corpus: the folder of calls that failed once.
        tier: of the checks that say none.
    """

    def __init__(self, corpus: Path, tier: str):
        self.corpus, self.tier = corpus, tier
        self.coverage = Coverage()
        LISTENERS.append(self.coverage.add)

    def close(self) -> None:
        LISTENERS.remove(self.coverage.add)

    def check(self, op: Any, reference: Any, *, devices: Sequence[str] | None, **options: Any) -> Report:
        """Looks at the calls that failed once, then at all; keeps those that fail now.

        Args:
            op: as of ``check_op``; with `method` among the options a class, as of ``check_class``.
            reference: what it should do.
            devices: where; None for all that the operator has a kernel for.
            options: of ``check_op`` or ``check_class``.

        Raises:
            CheckFailure: of the first that fails.
        """
        options = {"tier": self.tier, "devices": devices, **options}
        method = options.pop("method", None)

        def look(**further: Any) -> Report:
            given = {**options, **further}
            return check_class(op, method, reference, **given) if method else check_op(op, reference, **given)

        name = f"{State.name_of(op)}.{method}" if method else Subject(op, reference, {}).name
        try:
            if failed_once := list(failures.kept(self.corpus, name)):
                look(inputs=failed_once)
            return look()
        except CheckFailure as failure:
            for violation in failure.violations:
                failures.keep(self.corpus, name, violation)
            raise
