"""What a check found: violations, and a report of what was looked at."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..wording import counted


@dataclass(frozen=True)
class Violation:
    """One property that does not hold.

    Attributes:
        check: the check's name, as `skip` takes it.
        sentence: what was violated.
        device: where.
        case: the call that shows it, shrunk: a ``Call``, or None where no single call does.
        reproducer: a stand-alone Python script that shows it, or an empty text.
        op: the operator as ``namespace::name.overload``, or an empty text.
        libraries: what holds it, to be loaded first.
    """

    check: str
    sentence: str
    device: str = "cpu"
    case: Any = None
    reproducer: str = ""
    op: str = ""
    libraries: tuple[str, ...] = ()

    def to_cpp(self) -> str:
        """A stand-alone C++ program that makes the call; it links to libtorch alone.

        Raises:
            ValueError: there is no single call of a registered operator to show.
        """
        if self.case is None or not self.op:
            raise ValueError(f"{self.check}: there is no call of a registered operator to write in C++")
        from . import reproducer

        library = self.libraries[0] if len(self.libraries) == 1 else None
        return reproducer.cpp(self.case, self.op, library=library, device=self.device)

    def under_sanitizer(self, tool: str = "memcheck") -> str:
        """What compute-sanitizer says of the reproducer, run in a process of its own without torch's memory cache.

        Args:
            tool: memcheck, initcheck, racecheck or synccheck.

        Raises:
            ValueError: there is no reproducer, or it isn't on CUDA.
            FileNotFoundError: compute-sanitizer isn't installed.
        """
        if not self.reproducer or not self.device.startswith("cuda"):
            raise ValueError(f"{self.check}: there is no reproducer on CUDA to run")
        from ..toolchain import find_nvcc

        nvcc = find_nvcc()
        program = shutil.which("compute-sanitizer") or (
            nvcc and shutil.which("compute-sanitizer", path=str(Path(nvcc).parent))
        )
        if not program:
            raise FileNotFoundError("compute-sanitizer is neither on PATH nor beside nvcc")
        command = [program, "--tool", tool, sys.executable, "-c", self.reproducer]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
        return done.stdout + done.stderr

    def _repr_html_(self) -> str:
        from .. import display
        from .call import Call

        parts = [display.heading(f"{self.check} ({self.device}): {self.sentence}")]
        if self.case is not None:
            parts.append(display.sentence(f"with {self.case!r}"))
        if isinstance(self.case, Call):
            parts += [display.memory(plan).svg for plan in self.case.plans[: display.PICTURES]]
        if self.reproducer:
            parts.append(display.folded("a program that shows it", self.reproducer))
        return display.page(*parts)

    def __str__(self) -> str:
        lines = [f"{self.check} ({self.device}): {self.sentence}"]
        if self.case is not None:
            lines.append(f"  with {self.case!r}")
        if self.reproducer:
            lines.append("  reproduce:")
            lines += [f"    {line}" for line in self.reproducer.rstrip().splitlines()]
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """What was violated, and by which call, in one line."""
        sentence = self.sentence.partition("\n")[0]
        return f"{self.check} ({self.device}): {sentence}" + (f", with {self.case!r}" if self.case else "")


@dataclass
class CheckRun:
    """One check on one device: how many calls it looked at, and for how long."""

    check: str
    device: str
    cases: int = 0
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    #: What is no violation and yet worth knowing, such as ``func.grad: refused by torch``.
    notes: list[str] = field(default_factory=list)
    #: How often each (dtype, layout) was reached; a tensor may have several layouts.
    cells: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass
class Report:
    """What :func:`check_op` looked at.

    Attributes:
        subject: the operator or method.
        tier, seed: as asked for.
        runs: every check that ran, one for each device.
        skipped: name to reason, of the checks that were left out.
        notes: what holds for the whole run, such as that hypothesis is missing.
        dtypes: what was looked at, and what neither the author left out nor the reference refuses.
    """

    subject: str
    tier: str
    seed: int
    runs: list[CheckRun] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    dtypes: tuple[Any, ...] = ()

    @property
    def violations(self) -> list[Violation]:
        """Everything that was violated, in the order of the checks."""
        return [violation for run in self.runs for violation in run.violations]

    @property
    def reported(self) -> list[str]:
        """What is no violation and yet worth knowing, each with its check's name."""
        return [*self.notes, *(f"{run.check}: {note}" for run in self.runs for note in run.notes)]

    @property
    def cases(self) -> int:
        """How many calls were looked at."""
        return sum(run.cases for run in self.runs)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table: check, device, verdict, calls, seconds."""
        table = [
            (
                run.check,
                run.device,
                f"{len(run.violations)} violated" if run.violations else "holds" if run.cases else "nothing to look at",
                str(run.cases),
                f"{run.seconds:.2f}",
            )
            for run in self.runs
        ]
        return table + [(name, "", f"skipped: {reason}", "", "") for name, reason in sorted(self.skipped.items())]

    def _headline(self) -> str:
        verdict = counted(len(self.violations), "violation") if self.violations else "no violation"
        return (
            f"{self.subject}: {verdict} in {counted(self.cases, 'call')}, tier {self.tier}, seed {self.seed}, "
            f"{self.seconds:.1f} s"
        )

    def __repr__(self) -> str:
        rows = [("check", "device", "verdict", "calls", "s"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [self._headline()]
        for row in rows:
            cells = [
                cell.rjust(width) if column > 2 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  {note}" for note in self.reported]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from .. import display

        parts = [
            display.heading(self._headline()),
            display.table(("check", "device", "verdict", "calls", "s"), self.rows()),
            display.notes(self.reported),
        ]
        found = self.violations
        parts += [violation._repr_html_() for violation in found[: display.VIOLATIONS]]
        if len(found) > display.VIOLATIONS:
            parts.append(display.sentence(f"and {counted(len(found) - display.VIOLATIONS, 'more violation')}"))
        return display.page(*parts)


#: Called with every report, also one of violations; the pytest plugin listens.
LISTENERS: list[Callable[[Report], None]] = []


class CheckFailure(AssertionError):
    """An operator violates what was asked of it.

    Attributes:
        violations: all of them, each with its check, a sentence, the shrunk call and a reproducer.
        report: what was looked at.
    """

    def __init__(self, report: Report):
        self.report = report
        super().__init__(report)

    @property
    def violations(self) -> list[Violation]:
        """All of them, in the order of the checks."""
        return self.report.violations

    def __str__(self) -> str:
        found = self.violations
        head = f"{self.report.subject}: {counted(len(found), 'violation')}"
        lines = [f"{head} ({', '.join(dict.fromkeys(each.check for each in found))})", str(found[0])]
        if len(found) > 1:
            lines.append("also, and maybe for the same reason (each has its program in the exception's .violations):")
        return "\n".join([*lines, *(f"  {each.line}" for each in found[1:])])
