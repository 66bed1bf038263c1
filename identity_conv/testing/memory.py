"""Memory in which a kernel that reads or writes beside what is its own is found out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import settings
from ..building import Target
from ..toolchain import BuildError
from ..wording import counted

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
    def active(self, poison: int, sizes: Sequence[int]) -> Iterator[None]:
        """Guards what is allocated; `sizes` say how many bytes each output will have."""
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

    def look(self, outputs: Sequence[torch.Tensor]) -> str | None:
        """Where memory beside a block was written since the last look: ``4 bytes behind a block of 64 bytes``."""
        if not self._library:
            return None
        where = ctypes.create_string_buffer(128)
        return where.value.decode() if self._library.guard_look(where, ctypes.c_size_t(128)) else None


_BLOCK = 512  # bytes, to which torch's CUDA allocator rounds
_TRIES = 30  # of three blocks each, until they are neighbours: as many as there may be gaps between used blocks


class DeviceAllocations:
    """What is allocated on CUDA while this is active finds memory filled with a byte, and guarded where that can be.

    The caching allocator gives a block back that was freed just before. So three neighbouring blocks are made and
    filled, and the middle one is freed for the output.
    """

    def __init__(self, device: str):
        self._device = device
        self._holes: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._poison = 0
        self._alone = False

    @contextlib.contextmanager
    def active(self, poison: int, sizes: Sequence[int]) -> Iterator[None]:
        """Prepares memory for outputs of these sizes in bytes."""
        self._holes, self._poison = [], poison
        held: list[torch.Tensor] = []  # blocks that lie elsewhere, which would be given before the hole
        for size in sizes:
            if 0 < size <= 1 << 19:  # beyond, blocks come from another pool
                self._make_hole(size, held)
        made = self._made()
        yield
        # With memory for other things in between, the hole may have held one of them.
        self._alone = self._made() - made == len(sizes)

    def _make_hole(self, size: int, held: list[torch.Tensor]) -> None:
        """Frees a block between two others, once the allocator gives three in a row."""
        rounded = -(-size // _BLOCK) * _BLOCK
        for _ in range(_TRIES):
            before, hole, behind = blocks = [
                torch.empty(count, dtype=torch.uint8, device=self._device) for count in (_BLOCK, rounded, _BLOCK)
            ]
            if before.data_ptr() + _BLOCK == hole.data_ptr() == behind.data_ptr() - rounded:
                for each in blocks:
                    each.fill_(self._poison)
                self._holes.append((hole.data_ptr(), size, before, behind))
                return
            held += blocks

    def _made(self) -> int:
        return torch.cuda.memory_stats(self._device).get("allocation.all.allocated", 0)

    def look(self, outputs: Sequence[torch.Tensor]) -> str | None:
        """Where memory beside an output was written: ``4 bytes behind a block of 64 bytes``."""
        # Outputs of one size, rounded, may lie in each other's holes.
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in outputs}
        for start, expected, before, behind in self._holes:
            size = sizes.get(start, expected)
            slack = -size % _BLOCK
            if slack and self._alone and start in sizes:
                text = self._first(device_bytes(start + size, slack, self._device), size, 0)
                if text:
                    return text
            if text := self._first(behind, size, behind.data_ptr() - start - size):
                return text
            if bool((before != self._poison).any()):
                return f"up to {counted(_BLOCK, 'byte')} before a block of {counted(size, 'byte')}"
        return None

    def _first(self, memory: torch.Tensor, size: int, further: int) -> str | None:
        changed = memory != self._poison
        if not bool(changed.any()):
            return None
        distance = int(changed.to(torch.uint8).argmax()) + further
        return f"{counted(distance, 'byte')} behind a block of {counted(size, 'byte')}"


def device_bytes(address: int, size: int, device: str) -> torch.Tensor:
    """A tensor of bytes over memory of a GPU that is there already."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _device_fence(device: int, least: int, number: int) -> tuple[int, int]:
    """Address and bytes of memory of a GPU with addresses on both sides where nothing is mapped.

    It is kept for the next tensor of its size and of its `number` among the tensors of a call.

    Args:
        least: bytes that it must have.

    Raises:
        OSError: the driver refuses.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(driver, name)(*arguments):
            raise OSError(f"{name} returned {code}")

    location = _Location(1, device)  # CU_MEM_LOCATION_TYPE_DEVICE
    properties = _Properties(1, 0, location)  # CU_MEM_ALLOCATION_TYPE_PINNED
    granule, address, handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(properties), 0)
    size = -(-least // granule.value) * granule.value
    zero = ctypes.c_size_t(0)
    call(
        "cuMemAddressReserve",
        ctypes.byref(address),
        ctypes.c_size_t(size + 2 * granule.value),
        zero,
        ctypes.c_uint64(0),
        ctypes.c_uint64(0),
    )
    call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_uint64(0))
    middle = ctypes.c_uint64(address.value + granule.value)
    call("cuMemMap", middle, ctypes.c_size_t(size), zero, handle, ctypes.c_uint64(0))
    access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call("cuMemSetAccess", middle, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
    return middle.value, size


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


def fenced(x: torch.Tensor, *, before: bool, number: int = 0) -> torch.Tensor:
    """`x` anew, with nothing readable behind its last (or before its first) cell, same sizes, strides and bits.

    Args:
        number: which of a call's tensors it is. On a GPU another one of this number and size takes its memory.
    """
    if x.numel() == 0:
        return x
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    storage = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    first = x.storage_offset() * x.element_size()
    memory = _fenced_bytes(reach * x.element_size(), x.device, before, number)
    memory.copy_(storage[first : first + reach * x.element_size()])
    moved = torch.empty(0, dtype=x.dtype, device=x.device).set_(
        memory.untyped_storage(), _offset(memory, x), x.shape, x.stride()
    )
    if x.is_conj():
        moved = moved.conj()
    if x.is_neg():
        moved = torch._neg_view(moved)
    return moved


def _fenced_bytes(size: int, device: torch.device, before: bool, number: int) -> torch.Tensor:
    if device.type == "cpu":
        memory = Fence(size, before=before).memory
        assert memory is not None
        return memory
    # Of a few sizes, so that few are kept.
    start, room = _device_fence(device.index or 0, 1 << (size - 1).bit_length(), number)
    return device_bytes(start if before else start + room - size, size, str(device))


def _offset(memory: torch.Tensor, x: torch.Tensor) -> int:
    assert memory.storage_offset() % x.element_size() == 0
    return int(memory.storage_offset()) // x.element_size()


def kept(held: Callable[[], int], work: Callable[[], None], looks: int) -> int:
    """How many bytes more are `held` after `work`: the median of so many looks, since others may come and go."""
    found = []
    for _ in range(looks):
        before = held()
        work()
        found.append(held() - before)
    return sorted(found)[looks // 2]
