"""How messages say things."""

from __future__ import annotations


def counted(count: int, one: str, several: str | None = None) -> str:
    """``1 input``, ``2 inputs``; `several` is the plural where it isn't made by an s."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"
