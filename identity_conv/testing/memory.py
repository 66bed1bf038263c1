"""Memory in which a kernel that reads or writes beside what is its own is found out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator

import torch

from .. import settings
from ..building import Target
from ..toolchain import BuildError

#: Bytes that fill new memory, in turn: a cell that is never written shows one of them.
POISONS = (0xA5, 0x3C)

_PERTURB = -6  # glibc's M_PERTURB: the byte that fills what malloc gives


def allocator() -> Target:
    """The library of the guarded CPU allocator."""
    source = settings.source_dir() / "testing" / "guarded_allocator.cpp"
    return Target("library", "identity_conv_guarded_allocator", [source], bundled=True)


@functools.cache
def guarded_allocator(build: bool) -> tuple[ctypes.CDLL | None, str]:
    """The guarded allocator's library, or None and the reason.

    Args:
        build: compile it where it isn't built yet, some seconds once.
    """
    target = allocator()
    try:
        path = target.build() if build else target.find(target.parts())
        if path is None:
            return None, "the guarded allocator is built by the first check at tier full"
        library = ctypes.CDLL(str(path))
    except (BuildError, OSError) as error:
        return None, f"no guarded allocator: {str(error).splitlines()[0]}"
    library.guard_look.restype = ctypes.c_int64
    return library, ""


class Allocations:
    """What is allocated on CPU while this is active is guarded, and filled with a byte.

    Without the allocator's library memory is filled by malloc where it does that, and not guarded.
    """

    def __init__(self, library: ctypes.CDLL | None):
        self._library = library
        self._malloc = getattr(ctypes.CDLL(None), "mallopt", None)

    @contextlib.contextmanager
    def active(self, poison: int) -> Iterator[None]:
        if self._library:
            self._library.guard_start(poison)
        elif self._malloc:
            self._malloc(_PERTURB, poison ^ 0xFF)  # it fills with the complement
        try:
            yield
        finally:
            if self._library:
                self._library.guard_stop()
            elif self._malloc:
                self._malloc(_PERTURB, 0)

    def look(self) -> str | None:
        """Where memory beside a block was written since the last look: ``4 bytes behind a block of 64 bytes``."""
        if not self._library:
            return None
        where = ctypes.create_string_buffer(128)
        return where.value.decode() if self._library.guard_look(where, ctypes.c_size_t(128)) else None


class Fence:
    """Memory that ends, or begins, where none may be read or written: a step beyond ends the process.

    Args:
        size: bytes.
        before: the forbidden page lies before the memory, else behind it.
    """

    def __init__(self, size: int, *, before: bool):
        page = mmap.PAGESIZE
        room = -(-max(size, 1) // page) * page
        self._map = mmap.mmap(-1, room + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for forbidden in (start, start + page + room):
            if protect(ctypes.c_void_p(forbidden), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        first = page if before else page + room - size
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=first) if size else None


def fenced(x: torch.Tensor, *, before: bool) -> torch.Tensor:
    """`x` anew, with nothing readable behind its last (or before its first) cell, same sizes, strides and bits."""
    if x.numel() == 0:
        return x
    plain = x
    if x.is_neg():
        plain = torch._neg_view(plain)
    if x.is_conj():
        plain = plain.conj()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    first = x.storage_offset() * x.element_size()
    memory = Fence(reach * x.element_size(), before=before).memory
    assert memory is not None
    memory.copy_(storage[first : first + reach * x.element_size()])
    moved = torch.empty(0, dtype=x.dtype).set_(memory.untyped_storage(), _offset(memory, x), x.shape, x.stride())
    if x.is_conj():
        moved = moved.conj()
    if x.is_neg():
        moved = torch._neg_view(moved)
    return moved


def _offset(memory: torch.Tensor, x: torch.Tensor) -> int:
    assert memory.storage_offset() % x.element_size() == 0
    return memory.storage_offset() // x.element_size()
