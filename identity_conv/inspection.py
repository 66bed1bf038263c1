"""What a package holds, as tables: for `identity-conv inspect`, and for a loaded package in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

_STYLES = {"ok": "green", "warning": "yellow", "fatal": "red"}


class Section(NamedTuple):
    """A table: its head, and its lines."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The findings, the inputs and outputs, the libraries and the records, of what ``inspect_package`` returns."""
    for section in sections(found):
        table = Table(*map(escape, section.columns), box=None)
        for row in section.rows:
            cells = zip(section.columns, map(escape, row), strict=True)
            table.add_row(*(_styled(cell) if column == "verdict" else cell for column, cell in cells))
        yield table


def _styled(verdict: str) -> str:
    # A package may have a file's name that is a column's head.
    return f"[{_STYLES[verdict]}]{verdict}[/]" if verdict in _STYLES else verdict


def sections(found: dict[str, Any]) -> Iterator[Section]:
    """What `tables` shows; of `found` only what is there."""
    yield _facts(found)
    if "findings" in found:
        rows = [(each["check"], each["verdict"], each["text"]) for each in found["findings"]]
        yield Section(("check", "verdict", "found"), rows)
    if found["manifest"]:
        yield _call(found["manifest"])
        yield _libraries(found["manifest"]["libraries"])
    if "records" in found:
        yield Section(("record", "bytes"), [(name, f"{size:,}") for name, size in found["records"].items()])


def _facts(found: dict[str, Any]) -> Section:
    rows = []
    if "device" in found:
        rows.append(("device", found["device"]))
    if "bytes" in found:
        rows.append(("bytes", f"{found['bytes']:,}"))
    if "sha256" in found:
        rows.append(("SHA-256", found["sha256"]))
    if found.get("weights"):
        rows.append(("weights", ", ".join(found["weights"])))
    manifest = found["manifest"]
    if manifest:
        by = [f"{name} {value}" for name, value in _mapping(manifest.get("provenance")).items()]
        by.append(f"torch {_mapping(manifest.get('torch')).get('version')}")
        rows.append(("format", str(manifest["format"])))
        rows.append(("made by", ", ".join(by)))
        rows.append(("example", "recorded" if manifest.get("sample") else "none: it can't be verified"))
    else:
        rows.append(("manifest", "none: a package of stock torch"))
    return Section(("package", found["path"]), rows)


def _call(manifest: dict[str, Any]) -> Section:
    rows = []
    symbols = manifest["symbols"]
    for kind in ("input", "output"):
        for each in map(_mapping, _list(manifest.get(f"{kind}s"))):
            sizes = _list(each.get("sizes"))
            bounds = (
                f"{size} from {symbols[size]['min']} to {symbols[size]['max'] or 'any'}"
                for size in sizes
                if isinstance(size, str) and size in symbols
            )
            name = each.get("name") or each.get("value", "")
            written = f"[{', '.join(map(str, sizes))}]"
            rows.append((f"{kind} {name}", str(each.get("dtype", "")), written, ", ".join(bounds)))
    return Section(("tensor", "dtype", "sizes", "bounds"), rows)


def _mapping(value: Any) -> dict[str, Any]:
    """`value`, or nothing where a forged manifest has something else: loading reads only what it needs."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _libraries(libraries: list[dict[str, Any]]) -> Section:
    rows = []
    for library in libraries:
        name = library["record"].rpartition("/")[2]
        rows += [(name, schema) for schema in library["operators"].values()]
        rows += [(name, f"class {each}") for each in library["classes"]]
    return Section(("library", "registers"), rows)
