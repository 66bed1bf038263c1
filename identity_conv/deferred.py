"""Operators and classes of a library that isn't loaded yet: the first one asked for loads it.

This stands in ``torch.ops`` and ``torch.classes`` under the namespace's name, where torch keeps the
namespaces that it has met; seen in torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


class _Namespace(types.ModuleType):
    def __init__(self, owner: types.ModuleType, name: str, load: Callable[[], None]) -> None:
        super().__init__(name)
        self._owner = owner
        self._load = load

    def __getattr__(self, entry: str) -> Any:
        if entry.startswith("__"):
            raise AttributeError(entry)
        self._owner.__dict__.pop(self.__name__, None)
        try:
            self._load()
        except BaseException:
            self._owner.__dict__[self.__name__] = self
            raise
        return getattr(getattr(self._owner, self.__name__), entry)


def load_at_first_use(namespace: str, load: Callable[[], None]) -> None:
    """Lets ``torch.ops.<namespace>`` and ``torch.classes.<namespace>`` call `load` once something in them is used."""
    for owner in (torch.ops, torch.classes):
        owner.__dict__.setdefault(namespace, _Namespace(owner, namespace, load))
