"""What `identity-conv inspect` prints of a package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

_STYLES = {"ok": "green", "warning": "yellow", "fatal": "red"}


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The findings, the inputs and outputs, the libraries and the records, of what ``inspect_package`` returns."""
    yield _facts(found)
    yield _findings(found["findings"])
    manifest = found["manifest"] or {}
    if manifest:
        yield _call(manifest)
        yield _libraries(manifest["libraries"])
    records = Table("record", "bytes", box=None)
    for name, size in found["records"].items():
        records.add_row(escape(name), f"{size:,}")
    yield records


def _facts(found: dict[str, Any]) -> Table:
    table = Table("package", escape(found["path"]), box=None)
    manifest = found["manifest"]
    table.add_row("bytes", f"{found['bytes']:,}")
    table.add_row("SHA-256", found["sha256"])
    if manifest is None:
        table.add_row("manifest", "none: a package of stock torch")
        return table
    table.add_row("format", str(manifest["format"]))
    made = manifest.get("provenance", {})
    by = ", ".join(f"{name} {value}" for name, value in made.items())
    table.add_row("made by", f"{by}, torch {manifest.get('torch', {}).get('version')}")
    table.add_row("example", "recorded" if manifest.get("sample") else "none: it can't be verified")
    return table


def _findings(findings: list[dict[str, str]]) -> Table:
    table = Table("check", "verdict", "found", box=None)
    for each in findings:
        style = _STYLES[each["verdict"]]
        table.add_row(each["check"], f"[{style}]{each['verdict']}[/]", escape(each["text"]))
    return table


def _call(manifest: dict[str, Any]) -> Table:
    table = Table("tensor", "dtype", "sizes", "bounds", box=None)
    for kind, tensors in (("input", manifest["inputs"]), ("output", manifest.get("outputs", []))):
        for each in tensors:
            sizes = each.get("sizes", [])
            bounds = (
                f"{size} from {manifest['symbols'][size]['min']} to {manifest['symbols'][size]['max'] or 'any'}"
                for size in sizes
                if isinstance(size, str) and size in manifest["symbols"]
            )
            name = each.get("name") or each.get("value", "")
            table.add_row(f"{kind} {name}", each.get("dtype", ""), escape(str(sizes)), ", ".join(bounds))
    return table


def _libraries(libraries: list[dict[str, Any]]) -> Table:
    table = Table("library", "registers", box=None)
    for library in libraries:
        name = library["record"].rpartition("/")[2]
        for schema in library["operators"].values():
            table.add_row(name, escape(schema))
        for each in library["classes"]:
            table.add_row(name, f"class {each}")
    return table
