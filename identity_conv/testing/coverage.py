"""What a run of tests has looked at: dtype by layout, for every check and device; and what it never reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from ..wording import counted
from . import draws, values
from .registry import CHECKS
from .report import Report


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(dtype): dtype for dtype in values.DTYPES}
_LAYOUTS = ("dense", *draws.LAYOUTS)

Cell = tuple[str, str]  # dtype, layout


def _is_possible(dtype: torch.dtype, layout: str) -> bool:
    return (layout != "conj" or dtype.is_complex) and (layout != "neg" or dtype in values.NEGATABLE)


#: Every dtype in every layout that it can have.
_CELLS = [(name, layout) for name, dtype in _DTYPES.items() for layout in _LAYOUTS if _is_possible(dtype, layout)]


class Coverage:
    """How often each cell of dtype x layout x check x device was reached."""

    def __init__(self) -> None:
        self.reached: dict[tuple[str, str], Counter[Cell]] = {}  # by device, check
        self.dtypes: set[str] = set()  # that an operator takes

    def add(self, report: Report) -> None:
        """Counts what a report says was looked at."""
        self.dtypes |= {_name(dtype) for dtype in report.dtypes}
        for run in report.runs:
            self.reached.setdefault((torch.device(run.device).type, run.check), Counter()).update(run.cells)

    def data(self) -> list[Any]:
        """What `merge` takes, made of lists, texts and numbers."""
        reached = [[*place, [[*cell, count] for cell, count in cells.items()]] for place, cells in self.reached.items()]
        return [sorted(self.dtypes), reached]

    def merge(self, data: Iterable[Any]) -> None:
        """Adds what another process has reached."""
        dtypes, reached = data
        self.dtypes |= set(dtypes)
        for device, check, cells in reached:
            counter = self.reached.setdefault((device, check), Counter())
            counter.update({(dtype, layout): count for dtype, layout, count in cells})

    def lines(self) -> list[str]:
        """For each device: by dtype and layout, how many checks looked; then by check, the cells never reached."""
        if not self.reached:
            return ["no operator was checked"]
        lines: list[str] = []
        if left_out := [name for name in _DTYPES if name not in self.dtypes]:
            lines += [f"left out by dtypes, or refused by the reference, in every test: {', '.join(left_out)}", ""]
        for device in dict.fromkeys(device for device, _ in self.reached):
            checks = [check for check in CHECKS if (device, check) in self.reached]
            lines += [*self._table(device, checks), "", *self._never(device, checks), ""]
        return lines[:-1]

    def _table(self, device: str, checks: list[str]) -> list[str]:
        def entry(dtype: str, layout: str) -> str:
            if (dtype, layout) not in _CELLS:
                return ""
            return str(sum((dtype, layout) in self.reached[device, check] for check in checks)) or "0"

        taken = [name for name in _DTYPES if name in self.dtypes]
        rows = [(device, *_LAYOUTS), *((dtype, *(entry(dtype, layout) for layout in _LAYOUTS)) for dtype in taken)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        title = f"{device}: of {counted(len(checks), 'check')}, how many looked at a dtype in a layout"
        return [title] + [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def _never(self, device: str, checks: list[str]) -> list[str]:
        lines = [f"{device}: cells never reached"]
        cells = [cell for cell in _CELLS if cell[0] in self.dtypes]
        for check in checks:
            missing = [cell for cell in cells if not self.reached[device, check][cell]]
            if missing:
                lines.append(f"  {check} ({len(missing)} of {len(cells)}): {_in_words(missing, cells)}")
        return lines if len(lines) > 1 else [*lines, "  none"]


def _in_words(missing: list[Cell], cells: list[Cell]) -> str:
    """Whole dtypes first, then whole layouts of the rest, then single cells."""
    if len(missing) == len(cells):
        return "everything"
    left = set(missing)
    dtypes = [
        name for name in _DTYPES if (of := [cell for cell in cells if cell[0] == name]) and all(c in left for c in of)
    ]
    rest = [cell for cell in cells if cell[0] not in dtypes]
    layouts = [
        name for name in _LAYOUTS if (of := [cell for cell in rest if cell[1] == name]) and all(c in left for c in of)
    ]
    single = [f"{dtype} {layout}" for dtype, layout in missing if dtype not in dtypes and layout not in layouts]
    parts = [
        *([f"in any layout {', '.join(dtypes)}"] if dtypes else []),
        *([f"of the other dtypes, {', '.join(layouts)}" if dtypes else f"{', '.join(layouts)}"] if layouts else []),
        *([", ".join(single)] if single else []),
    ]
    return "; ".join(parts)
