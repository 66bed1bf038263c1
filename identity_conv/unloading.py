"""Taking a library of operators out of the process, with what points into it left valid.

This module touches what is private in torch for that; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import _ctypes
import ctypes
import gc
import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from . import registry

_MAP_FIXED_NOREPLACE = 0x100000
_MAP_PRIVATE_ANONYMOUS = 0x22
_NOBODYS_KEY = "FPGA"  # a dispatch key that no device of today's uses

_keepers: dict[str, torch.library.Library] = {}


def unload(path: Path, handle: int, operators: Mapping[str, str], successors: Mapping[str, str]) -> bool:
    """Closes the library at `path`; whether all of it has left.

    An operator that a successor has with the same schema lives on: whoever holds it calls the new code.
    Another is gone, and says so to whoever holds it. The library's memory stays readable and executable where it
    was, for what points into it: types of signatures in the dispatcher, deleters of tensors that it made.

    Args:
        operators, successors: names and schemas, of this library and of the one that comes.
    """
    lives_on = {name for name, schema in operators.items() if successors.get(name) == schema}
    # A registration that does nothing, on a key that nothing uses, keeps the dispatcher's entry.
    for operator in sorted(lives_on - _keepers.keys()):
        _keepers[operator] = torch.library.Library(operator.split("::")[0], "IMPL")
        _keepers[operator].impl(operator, torch.library.fallthrough_kernel, _NOBODYS_KEY)
    gone = set(operators) - lives_on
    for operator in gone & _keepers.keys():
        _keepers.pop(operator)._destroy()
    segments = [(start, size, how, ctypes.string_at(start, size)) for start, size, how in _segments(path)]
    _ctypes.dlclose(handle)
    if any(registry.schema_of(name) is not None for name in operators) or _segments(path):
        return False
    _lay_down(segments)
    _end(gone)
    return True


def _end(operators: set[str]) -> None:
    """Lets every Python object that stands for an operator which goes say so, where it would call what is gone."""
    if not operators:
        return

    def ended(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this operator has been replaced (its library was edited and loaded again): look it up anew")

    packets = {name.partition(".")[0] for name in operators}
    for each in gc.get_objects():
        if type(each) is torch._ops.OpOverload and each.name() in operators:
            each._op = each._op_dk = ended
        elif type(each) is torch._ops.OpOverloadPacket and each._qualified_op_name in packets:
            each._op = ended


def _segments(path: Path) -> list[tuple[int, int, str]]:
    """Address, size and permissions of the library's memory, with the zeroed data that follows its file's."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        parts = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)", line)
        if not parts:
            continue
        start, end = int(parts[1], 16), int(parts[2], 16)
        follows = bool(found) and not parts[4] and "w" in parts[3] and sum(found[-1][:2]) == start
        if parts[4] == str(path.resolve()) or follows:
            found.append((start, end - start, parts[3]))
    return [segment for segment in found if "r" in segment[2]]


def _lay_down(segments: Iterable[tuple[int, int, str, bytes]]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, size, how, content in segments:
        flags = _MAP_PRIVATE_ANONYMOUS | _MAP_FIXED_NOREPLACE
        placed = libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if placed != start:  # another thread took the room meanwhile
            continue
        ctypes.memmove(start, content, size)
        protection = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
        libc.mprotect(start, size, sum(bit for letter, bit in protection.items() if letter in how))


def forget(path: Path, namespaces: Iterable[str]) -> None:
    """Lets ``torch.ops`` look again for what it remembers by name."""
    torch.ops.loaded_libraries.discard(str(path))
    for namespace in namespaces:
        torch.ops.__dict__.pop(namespace, None)
