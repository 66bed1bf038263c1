"""Damaged and forged packages, by a seed; and a process that opens each and says what came of it.

``python support_fuzz.py PACKAGE FOLDER SEED COUNT`` prints one line a case: its kind and outcome.
"""

from __future__ import annotations

import io
import json
import random
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORD = "extra/identity_conv/manifest.json"


def cases(package: Path, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """`count` files made from the one at `package`, each with the kind of its damage."""
    chance = random.Random(seed)
    whole = package.read_bytes()
    with zipfile.ZipFile(package) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    for _ in range(count):
        kind = chance.choice(list(_KINDS))
        yield kind, _KINDS[kind](chance, whole, records)


def _flip(chance: random.Random, whole: bytes, records: Any) -> bytes:
    data = bytearray(whole)
    # As often in the directory and the small records at the end as in the code, which is most of it.
    near_end = chance.random() < 0.5
    at = chance.randrange(len(data) - 12000, len(data)) if near_end else chance.randrange(len(data))
    data[at] ^= 1 << chance.randrange(8)
    return bytes(data)


def _header_byte(chance: random.Random, whole: bytes, records: Any) -> bytes:
    data = bytearray(whole)
    places = [i for i in range(len(data) - 4) if data[i : i + 2] == b"PK" and data[i + 2] in (1, 3, 5)]
    data[min(chance.choice(places) + chance.randrange(46), len(data) - 1)] = chance.randrange(256)
    return bytes(data)


def _truncate(chance: random.Random, whole: bytes, records: Any) -> bytes:
    return whole[: chance.choice([chance.randrange(len(whole)), len(whole) - chance.randrange(1, 3000)])]


def _zip(records: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")
        for name, data in records:
            archive.writestr(name, data)
    return buffer.getvalue()


def _swap(chance: random.Random, whole: bytes, records: list[tuple[str, bytes]]) -> bytes:
    (i, j), changed = chance.sample(range(len(records)), 2), list(records)
    changed[i], changed[j] = (records[i][0], records[j][1]), (records[j][0], records[i][1])
    return _zip(changed)


def _duplicate(chance: random.Random, whole: bytes, records: list[tuple[str, bytes]]) -> bytes:
    name, data = chance.choice(records)
    return _zip([*records, (name, chance.choice([data, b"", records[0][1]]))])


def _drop(chance: random.Random, whole: bytes, records: list[tuple[str, bytes]]) -> bytes:
    gone = chance.randrange(len(records))
    return _zip([record for i, record in enumerate(records) if i != gone])


def _traverse(chance: random.Random, whole: bytes, records: list[tuple[str, bytes]]) -> bytes:
    folder = records[0][0].split("/")[0]
    name = chance.choice(
        ["{}/data/aotinductor/model/../../../../escaped.so", "{}/../escaped", "/escaped", "{}//escaped",
         "../{}/escaped", "{}/data/aotinductor/model/..", "{}/.", "{}/data/aotinductor/model/a\\..\\..\\escaped", "{}/"]
    )  # fmt: skip
    return _zip([*records, (name.format(folder), b"escaped")])


def _huge(chance: random.Random, whole: bytes, records: Any) -> bytes:
    data = bytearray(whole)
    entries = [i for i in range(len(data) - 46) if data[i : i + 4] == b"PK\x01\x02"]
    at = chance.choice(entries) + chance.choice([20, 24, 42, 28, 30, 32])
    struct.pack_into("<I", data, at, chance.choice([0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x80000000, len(data)]))
    return bytes(data)


def _forge(chance: random.Random, whole: bytes, records: list[tuple[str, bytes]]) -> bytes:
    changed = []
    for name, data in records:
        if name.endswith(RECORD):
            document = json.loads(data)
            for _ in range(chance.randrange(1, 4)):
                _change(chance, document)
            data = json.dumps(document).encode()
            if chance.random() < 0.2:
                data = data[: chance.randrange(len(data))]
        changed.append((name, data))
    return _zip(changed)


def _change(chance: random.Random, document: Any) -> None:
    """Changes, removes or adds one value somewhere in a JSON document."""
    node, odd = (
        document,
        [None, -1, 2**63 - 1, -(2**63), 1e308, "", "x" * 5000, [], {}, True, [[[[]]]], "../..", "float64"],
    )
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.8:
            node = node[key]
            continue
        if chance.random() < 0.3:
            del node[key]
        else:
            node[key] = chance.choice(odd)
        return


_KINDS: dict[str, Callable[[random.Random, bytes, Any], bytes]] = {
    "byte": _flip,
    "header": _header_byte,
    "truncation": _truncate,
    "swap": _swap,
    "duplicate": _duplicate,
    "missing": _drop,
    "traversal": _traverse,
    "huge": _huge,
    "forgery": _forge,
}


def main() -> None:
    package, folder, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    import torch

    import identity_conv

    x = torch.randn(2, 3, 8, 9)
    for number, (kind, data) in enumerate(cases(package, seed, count)):
        path = folder / f"case{number % 2}.pt2"
        path.write_bytes(data)
        print(kind, end=" ", flush=True)
        try:
            loaded = identity_conv.load_package(path)
            print("right" if torch.allclose(loaded(x), x, atol=1e-5) else "WRONG")
        except identity_conv.PackageError as error:
            one_line = "\n" not in str(error) and len(str(error)) < 20000
            print(
                error.kind.replace(" ", "-")
                if one_line and not isinstance(error, identity_conv.InputError)
                else f"{error!r}"
            )


if __name__ == "__main__":
    main()
