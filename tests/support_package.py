"""What the tests of packages share: copies of a package with records changed."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from identity_conv import manifest

Records = dict[str, bytes]


def rewrite(package: Path, target: Path, change: Callable[[Records], None]) -> Path:
    """A copy of `package` at `target` whose records, by their names, `change` has changed."""
    with zipfile.ZipFile(package) as source:
        folder = source.namelist()[0].split("/", 1)[0]
        records = {name.removeprefix(f"{folder}/"): source.read(name) for name in source.namelist()}
    change(records)
    with zipfile.ZipFile(target, "w") as copy:
        for name, data in records.items():
            copy.writestr(f"{folder}/{name}", data)
    return target


def sign(records: Records) -> None:
    """Gives the records the digests that packaging would give them."""
    described = json.loads(records[manifest.RECORD])
    own = (manifest.RECORD, manifest.DIGEST)
    described["records"] = {n: hashlib.sha256(d).hexdigest() for n, d in records.items() if n not in own}
    records[manifest.RECORD] = json.dumps(described).encode()
    records[manifest.DIGEST] = hashlib.sha256(records[manifest.RECORD]).hexdigest().encode()


def with_manifest(package: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy whose manifest `change` has changed, or returned as text, with its digest made right."""

    def forge(records: Records) -> None:
        described = json.loads(records[manifest.RECORD])
        text = change(described)
        records[manifest.RECORD] = (text if isinstance(text, str) else json.dumps(described)).encode()
        records[manifest.DIGEST] = hashlib.sha256(records[manifest.RECORD]).hexdigest().encode()

    return rewrite(package, target, forge)


def without_libraries(package: Path, target: Path) -> Path:
    """A copy that carries no operator library, as packages of format 1 may."""

    def drop(records: Records) -> None:
        for name in [name for name in records if name.startswith(manifest.LIBRARIES)]:
            del records[name]
        described = json.loads(records[manifest.RECORD]) | {"libraries": []}
        records[manifest.RECORD] = json.dumps(described).encode()
        sign(records)

    return rewrite(package, target, drop)
