"""A finished installation in one folder: `identity-conv build --prefix` lays it down, import uses it.

::

    bin/identity-conv-run           the program without Python
    lib/lib<name>.so                operator libraries
    lib/identity_conv/              the Python binding of the runtime, and what it was all made for
    include/identity_conv/*.h
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import __version__, cache, settings, toolchain
from .toolchain import BuildError

RECORD = Path("lib") / "identity_conv" / "prefix.json"
_FOLDERS = {"library": Path("lib"), "module": Path("lib") / "identity_conv", "program": Path("bin")}


@dataclass(frozen=True)
class Built:
    """A file to lay down: what it is, where it is, and the digest of the sources that it was made from."""

    kind: str
    path: Path
    sources: str


def find(prefix: Path, file_name: str, kind: str, sources: str) -> Path | None:
    """The file of that name in `prefix`, or None where it has none.

    Raises:
        BuildError: `prefix` holds no installation, one made for another torch, ABI, platform or Python, or a
            file made from other sources.
    """
    setting = f"{settings.PREFIX.name}={prefix}"
    remedy = f"lay it down again with `identity-conv build --prefix {prefix}`, or unset {settings.PREFIX.name}"
    here = _facts()
    try:
        record = json.loads((prefix / RECORD).read_text())
        made_for = {name: record[name] for name in here}
    except OSError:
        raise BuildError(f"{setting} holds no installation of identity_conv: {remedy}") from None
    except (ValueError, TypeError, KeyError):
        raise BuildError(f"{setting} has a damaged record {RECORD}: {remedy}") from None
    for name, fact in here.items():
        if made_for[name] != fact:
            raise BuildError(f"{setting} was made for {name} {made_for[name]}, and this is {name} {fact}: {remedy}")
    path = prefix / _FOLDERS[kind] / file_name
    if not path.is_file():
        return None
    if record.get("sources", {}).get(file_name) != sources:
        raise BuildError(f"{setting} has a {file_name} that was made from other sources than those here: {remedy}")
    cache.check_private(path)
    return path


def lacks(prefix: Path, file_name: str) -> BuildError:
    """The error that a prefix without one of this package's own files gives."""
    return BuildError(
        f"{settings.PREFIX.name}={prefix} has no {file_name}: lay it down with "
        f"`identity-conv build --prefix {prefix}`, or unset {settings.PREFIX.name}"
    )


def install(prefix: Path, files: Sequence[Built]) -> list[Path]:
    """Copies built files and the headers into `prefix`; returns what was laid down.

    Each file takes its place by rename, so a process that has the old one mapped keeps it.
    """
    laid = []
    headers = sorted((settings.source_dir() / "include" / "identity_conv").glob("*.h"))
    wanted = [(_FOLDERS[file.kind] / file.path.name, file.path) for file in files]
    wanted += [(Path("include") / "identity_conv" / header.name, header) for header in headers]
    # Without its record an installation is refused: one that is half of another torch is never used.
    record = prefix / RECORD
    record.unlink(missing_ok=True)
    for place, file in wanted:
        target = prefix / place
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"the prefix {prefix} can't be written ({error.strerror})") from error
        scratch = target.with_name(f".{target.name}.new")
        shutil.copy2(file, scratch)
        scratch.replace(target)
        laid.append(target)
    record.parent.mkdir(parents=True, exist_ok=True)
    sources = {file.path.name: file.sources for file in files}
    record.write_text(json.dumps({**_facts(), "sources": sources}, indent=1))
    return [*laid, record]


def _facts() -> dict[str, str]:
    return {
        "identity_conv": __version__,
        **toolchain.torch_facts(),
        "platform": toolchain.platform(),
        "Python": sys.implementation.cache_tag,
    }
