"""How objects show themselves in a notebook: their HTML and SVG, as text.

All text is escaped, there is no script, and what is long is cut. It is read on a light ground and on a dark one: text
and lines have the reader's own colour, fills are tints. Nothing here imports torch.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .wording import counted

if TYPE_CHECKING:
    from .testing.plan import TensorPlan

#: Rows of a table, and letters of a cell, that are shown.
ROWS, LETTERS = 60, 400
#: Violations of a report, and tensors of a violation, that are shown.
VIOLATIONS, PICTURES = 8, 3

_GOOD, _DOUBTFUL, _BAD = "#2e8b57", "#b8860b", "#dc3545"
#: What a cell below "verdict" may say, a count before it left out.
_VERDICTS = {"ok": _GOOD, "holds": _GOOD, "warning": _DOUBTFUL, "fatal": _BAD, "violated": _BAD}

_LEFT = "text-align:left"


def cut(text: str, letters: int = LETTERS) -> str:
    """`text`, or its beginning with a sign that there is more."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def place(path: Path) -> str:
    """A path as one would write it here: from the working folder, else from the home, else whole."""
    try:
        for folder, mark in ((Path.cwd(), Path()), (Path.home(), Path("~"))):
            if path.is_relative_to(folder):
                return str(mark / path.relative_to(folder))
    except (OSError, RuntimeError):  # the folder is gone, or there is no home
        pass
    return str(path)


def page(*parts: str) -> str:
    """What ``_repr_html_`` returns."""
    return f"<div>{''.join(parts)}</div>"


def heading(text: str) -> str:
    """The first line, which says what the object is."""
    return f'<p style="margin:.3em 0"><b>{html.escape(cut(text))}</b></p>'


def sentence(text: str) -> str:
    """A line of text."""
    return f'<p style="margin:.3em 0">{html.escape(cut(text))}</p>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells below "verdict" have their colour. No columns, no head."""
    every = list(rows)
    head = "".join(f'<th style="{_LEFT}">{html.escape(column)}</th>' for column in columns)
    verdict = columns.index("verdict") if "verdict" in columns else -1
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in every[:ROWS]:
        cells = (_cell(text, position == verdict) for position, text in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if len(every) > ROWS:
        lines.append(f'<tr><td style="{_LEFT}" colspan="{len(every[0])}">and {len(every) - ROWS:,} more</td></tr>')
    return f"<table>{''.join(lines)}</table>"


def _cell(text: str, is_verdict: bool) -> str:
    colour = _VERDICTS.get(re.sub(r"^\d+ ", "", text)) if is_verdict else None
    tint = f";color:{colour};font-weight:bold" if colour else ""
    return f'<td style="{_LEFT}{tint}">{html.escape(cut(text))}</td>'


def notes(texts: Sequence[str]) -> str:
    """A list of sentences; nothing of none."""
    items = [f"<li>{html.escape(cut(text))}</li>" for text in texts[:ROWS]]
    if len(texts) > ROWS:
        items.append(f"<li>and {len(texts) - ROWS:,} more</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


def folded(summary: str, text: str) -> str:
    """A text of many lines, folded away under `summary`."""
    return (
        f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(cut(text, 10 * LETTERS))}</pre></details>"
    )


@dataclass(frozen=True)
class Picture:
    """A drawing; in a notebook it shows itself.

    Attributes:
        svg: the drawing as the text of an SVG file.
    """

    svg: str

    def _repr_html_(self) -> str:
        return page(self.svg)

    def __repr__(self) -> str:
        return f"Picture({counted(len(self.svg), 'letter')} of SVG)"


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" fill="currentColor" style="max-width:100%;height:auto" '
        f'font-family="monospace" font-size="11">{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, title: str = "", more: str = "") -> str:
    said = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{more}>{said}</rect>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{html.escape(text)}</text>'


_LETTER = 6.7  # the width of one at the size of _svg
_LINE = 22  # the height of a cell, and of a box


def _ends(every: range, first: int, last: int) -> list[int | None]:
    """All of them, or those at both ends with None between."""
    if len(every) <= first + last + 1:
        return list(every)
    return [*every[:first], None, *every[-last:]]


# The memory of a tensor.

#: What may become of an element of the storage, and how it is drawn.
_FILLS = {
    "the tensor's": 'fill="#4c8bf5" fill-opacity=".4"',
    "of several indices": 'fill="#9b59b6" fill-opacity=".5"',
    "a special value": 'fill="#e67e22" fill-opacity=".6"',
    "not the tensor's": 'fill="none" stroke-dasharray="2 2"',
    "offset": 'fill="#888888" fill-opacity=".4"',
    "guard": 'fill="#dc3545" fill-opacity=".25"',
}


def memory(plan: TensorPlan) -> Picture:
    """The storage of a planned tensor, element by element, between the guards of ``build_guarded``.

    A line is a step of the second innermost dimension; before it stands the byte of the storage where it begins. A cell
    of the tensor shows its first index, or its special value.
    """
    elements, size = plan.storage_bytes // plan.dtype.itemsize, plan.dtype.itemsize
    pitch, lead = plan.line()
    # Of an offset of many lines the last one is enough.
    begin = max(0, (plan.offset + lead) // pitch - 1)
    lines = _ends(range(begin, -(-(elements + lead) // pitch)), 8, 3)
    columns = _ends(range(pitch), 12, 6)
    specials = plan.special_elements()

    boxes: dict[str, list[tuple[int, int, str]]] = {}
    labels: list[tuple[int, int, str]] = []
    numbers: list[str] = []
    for row, line in enumerate(lines):
        numbers.append("" if line is None else f"{max(line * pitch - lead, 0) * size:,}")
        for column, step in enumerate(columns):
            if line is None or step is None:
                labels.append((row, column, "⋮" if line is None else "…"))
            elif 0 <= (element := line * pitch + step - lead) < elements:
                kind, label, said = _element(plan, element, specials.get(element, ""))
                boxes.setdefault(kind, []).append((row, column, said))
                labels.append((row, column, label))

    wide = max(26.0, _LETTER * max((len(label) for *_, label in labels), default=0) + 8)
    left = _LETTER * max(map(len, numbers), default=0) + 8
    across, top = max(wide * len(columns), 180.0), _LINE + 6
    below = top + len(lines) * _LINE + 6
    before = "guard" + (f", and {counted(plan.misalignment, 'byte')} to misalign" if plan.misalignment else "")
    parts = [_bar(left, 0, across, before), _bar(left, below, across, "guard")]
    for kind, cells in boxes.items():
        drawn = (_rect(left + x * wide, top + y * _LINE, wide, _LINE, said) for y, x, said in cells)
        parts.append(f'<g stroke="currentColor" stroke-opacity=".5" {_FILLS[kind]}>{"".join(drawn)}</g>')
    texts = (_text(left + (x + 0.5) * wide, top + y * _LINE + 15, label) for y, x, label in labels if label)
    parts.append(f'<g text-anchor="middle">{"".join(texts)}</g>')
    starts = (_text(left - 6, top + y * _LINE + 15, number) for y, number in enumerate(numbers) if number)
    parts.append(f'<g text-anchor="end" fill-opacity=".7">{"".join(starts)}</g>')
    legend, wide = _legend(left, below + _LINE + 8, [kind for kind in _FILLS if kind in boxes])
    return Picture(_svg(max(left + across, wide) + 1, below + 2 * _LINE + 8, [*parts, legend]))


def _element(plan: TensorPlan, element: int, special: str) -> tuple[str, str, str]:
    """What an element of the storage is, its label, and what a pointer that rests on it is told."""
    size = plan.dtype.itemsize
    where = f"bytes {element * size:,} to {(element + 1) * size - 1:,}"
    owner = plan.owner(element)
    if owner is None:
        kind = "offset" if element < plan.offset else "not the tensor's"
        return kind, "", f"{where}: {kind}"
    index, times = owner
    label = ",".join(map(str, index)) if len(index) < 5 else ""
    others = f" and {counted(times - 1, 'more index', 'more indices')}" if times > 1 else ""
    said = f"{where}: {list(index)}{others}"
    if special:
        return "a special value", special, f"{said}, {special}"
    return ("of several indices" if times > 1 else "the tensor's"), label, said


def _bar(x: float, y: float, width: float, text: str) -> str:
    box = _rect(x, y, width, _LINE, more=f' stroke="currentColor" stroke-opacity=".5" {_FILLS["guard"]}')
    return box + _text(x + width / 2, y + 15, text, ' text-anchor="middle"')


def _legend(x: float, y: float, kinds: Iterable[str]) -> tuple[str, float]:
    """The kinds beside samples of them, and where that ends."""
    parts = []
    for kind in kinds:
        parts.append(_rect(x, y + 4, 12, 12, more=f' stroke="currentColor" stroke-opacity=".5" {_FILLS[kind]}'))
        parts.append(_text(x + 17, y + 14, kind))
        x += 17 + _LETTER * len(kind) + 16
    return "".join(parts), x


# An exported graph.

_TINTS = {"data": "#2e8b57", "state": "#888888", "native": "#4c8bf5", "operator": "#e67e22", "class": "#9b59b6"}
#: What a custom operator's namespace isn't.
_NATIVE = frozenset({"aten", "prim", "prims", "higher_order", ""})


@dataclass(frozen=True)
class _Step:
    """A line of the drawn graph: an input, a call or the output."""

    name: str
    label: str
    kind: str
    result: str
    sources: tuple[str, ...]  # steps
    state: tuple[str, ...]  # weights, buffers and objects


def graph(program: Any) -> Picture:
    """The graph of an exported program, in the order of execution.

    Inputs and the output are green, native operators blue, custom ones orange, calls of a class's methods purple;
    weights, buffers and objects stand grey beside what takes them. Below a step stands what it gives.

    Args:
        program: an ``ExportedProgram``.

    Example::

        >>> picture = graph(export(IdentityModel(), (torch.randn(2, 3, 8, 8),)))
    """
    every = _steps(program)
    shown = _ends(range(len(every)), 30, 10)
    steps = [None if position is None else every[position] for position in shown]
    state = [[_width(text) for text in step.state] if step else [] for step in steps]
    left = max((sum(widths) + 4 * len(widths) + 14 for widths in state if widths), default=0.0)
    wide = max((max(_width(step.label), 2 * _LETTER * len(step.result)) for step in steps if step), default=0.0)
    middle, right = left + wide / 2, left + wide
    lines = {step.name: line for line, step in enumerate(steps) if step}
    boxes, arrows = [], []
    for line, step in enumerate(steps):
        y = 2 * line * _LINE
        if step is None:
            boxes.append(_text(middle, y + 15, f"⋮ {len(every) - len(steps) + 1:,} more", ' text-anchor="middle"'))
            continue
        boxes.append(_box(left, y, wide, step.label, step.kind))
        if step.result:
            boxes.append(_text(middle + 6, y + _LINE + 15, step.result, ' font-size="9" fill-opacity=".7"'))
        end = left - 14
        for text, width in zip(reversed(step.state), reversed(state[line]), strict=True):
            boxes.append(_box(end - width, y, width, text, "state"))
            end -= width + 4
        if step.state:
            arrows.append(_arrow(f"M{left - 14:g} {y + 11}h8", left, y + 11, "l-6 -4v8z"))
        for source in step.sources:
            if source not in lines:
                continue
            above = 2 * lines[source] * _LINE
            if lines[source] == line - 1:
                arrows.append(_arrow(f"M{middle:g} {above + _LINE}V{y - 6}", middle, y, "l-4 -6h8z"))
            else:
                out = right + 10 + 8 * min(line - lines[source], 8)
                path = f"M{right:g} {above + 11}C{out:g} {above + 11} {out:g} {y + 11} {right + 6:g} {y + 11}"
                arrows.append(_arrow(path, right, y + 11, "l6 -4v8z"))
    return Picture(_svg(right + 70, 2 * len(steps) * _LINE - _LINE + 2, [*arrows, *boxes]))


def _steps(program: Any) -> list[_Step]:
    signature = program.graph_signature
    state = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind.name != "USER_INPUT"}
    steps = []
    for node in program.graph.nodes:
        if node.op == "get_attr":
            state[node.name] = str(node.target)
        if node.name in state:
            continue
        fed = [each.name for each in node.all_input_nodes]
        label, kind = _call(node) if node.op == "call_function" else (node.name, "data")
        sources = tuple(name for name in fed if name not in state)
        beside = tuple(cut(str(state[name]), 40) for name in fed if name in state)
        steps.append(_Step(node.name, cut(label, 60), kind, cut(_described(node.meta.get("val")), 50), sources, beside))
    return steps


def _call(node: Any) -> tuple[str, str]:
    """What a node calls, and its kind."""
    name = str(node.target) if hasattr(node.target, "namespace") else getattr(node.target, "__name__", str(node.target))
    if name == "call_torchbind":
        return f"{name}: {node.args[1]}", "class"
    return name, "native" if getattr(node.target, "namespace", "") in _NATIVE else "operator"


def _described(value: Any) -> str:
    """The dtype and sizes of what a node gives; nothing of what isn't a tensor."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_described, value[:3]))
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]"


def _width(text: str) -> float:
    return _LETTER * len(text) + 16


def _box(x: float, y: float, width: float, text: str, kind: str) -> str:
    more = f' rx="4" stroke="currentColor" stroke-opacity=".5" fill="{_TINTS[kind]}" fill-opacity=".35"'
    return _rect(x, y, width, _LINE, more=more) + _text(x + width / 2, y + 15, text, ' text-anchor="middle"')


def _arrow(path: str, x: float, y: float, head: str) -> str:
    return f'<path d="{path}" fill="none" stroke="currentColor"/><path d="M{x:g} {y:g}{head}"/>'
