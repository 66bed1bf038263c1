"""What a run of tests has looked at: dtype by layout, for every check and device; and what it never reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from . import draws, values
from .registry import CHECKS
from .report import Report

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in values.DTYPES}
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

    def add(self, report: Report) -> None:
        """Counts what a report says was looked at."""
        for run in report.runs:
            self.reached.setdefault((torch.device(run.device).type, run.check), Counter()).update(run.cells)

    def data(self) -> list[Any]:
        """What `merge` takes, made of lists, texts and numbers."""
        return [[*place, [[*cell, count] for cell, count in cells.items()]] for place, cells in self.reached.items()]

    def merge(self, data: Iterable[Any]) -> None:
        """Adds what another process has reached."""
        for device, check, cells in data:
            counter = self.reached.setdefault((device, check), Counter())
            counter.update({(dtype, layout): count for dtype, layout, count in cells})

    def lines(self) -> list[str]:
        """For each device: by dtype and layout, how many checks looked; then by check, the cells never reached."""
        if not self.reached:
            return ["no operator was checked"]
        lines: list[str] = []
        for device in dict.fromkeys(device for device, _ in self.reached):
            checks = [check for check in CHECKS if (device, check) in self.reached]
            lines += [*self._table(device, checks), "", *self._never(device, checks), ""]
        return lines[:-1]

    def _table(self, device: str, checks: list[str]) -> list[str]:
        def entry(dtype: str, layout: str) -> str:
            if (dtype, layout) not in _CELLS:
                return ""
            return str(sum((dtype, layout) in self.reached[device, check] for check in checks)) or "0"

        rows = [(device, *_LAYOUTS), *((dtype, *(entry(dtype, layout) for layout in _LAYOUTS)) for dtype in _DTYPES)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        title = f"{device}: of {len(checks)} checks, how many looked at a dtype in a layout"
        return [title] + [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def _never(self, device: str, checks: list[str]) -> list[str]:
        lines = [f"{device}: cells never reached"]
        for check in checks:
            missing = [cell for cell in _CELLS if not self.reached[device, check][cell]]
            if missing:
                lines.append(f"  {check} ({len(missing)} of {len(_CELLS)}): {_in_words(missing)}")
        return lines if len(lines) > 1 else [*lines, "  none"]


def _in_words(missing: list[Cell]) -> str:
    """Whole dtypes first, then whole layouts of the rest, then single cells."""
    if len(missing) == len(_CELLS):
        return "everything"
    left = set(missing)
    dtypes = [name for name in _DTYPES if all(cell in left for cell in _CELLS if cell[0] == name)]
    rest = [cell for cell in _CELLS if cell[0] not in dtypes]
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
