"""Libraries of operators in this process: each content once, and never two of one registration."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import cache, fakes, gradients, progress, registry, rehearsal, unloading
from .registry import Registrations
from .toolchain import BuildError


@dataclass
class _Loaded:
    path: Path
    digest: str
    registrations: Registrations
    stays: str
    handle: int | None  # None for one that the runtime has loaded out of a package, for good

    @property
    def neighbour(self) -> rehearsal.Neighbour:
        return rehearsal.Neighbour(self.path, self.digest, self.registrations, self.stays)


_lock = threading.RLock()
_loaded: list[_Loaded] = []


def _unlock_in_child() -> None:
    """A forked child has the lock as it was held, and none of the threads that would let it go."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_in_child)


def load(path: Path, *, trusted: bool = False) -> Path:
    """Loads the operator library at `path`, or finds its content loaded, and returns the loaded file.

    Another build of the same name that registers the same makes room first. No operator of that may be running
    in another thread meanwhile: its registrations are taken away.

    Args:
        trusted: the library is this package's own, and is loaded without a rehearsal where it is the first of
            its name.

    Raises:
        BuildError: it doesn't load, registers again what this process has registered, or can't take the
            place of an earlier build of it.
    """
    with _lock:
        digest = cache.file_digest(path)
        if known := next((each for each in _loaded if each.digest == digest), None):
            if known.handle is None:  # here is a file of it
                known.path = path
            return known.path
        if elsewhere := _loaded_elsewhere(digest):
            return elsewhere
        rehearsed = None
        if not trusted or any(each.path.name == path.name for each in _loaded):
            rehearsed = _make_room(path, digest)
        content = path.read_bytes()
        handles: list[int] = []

        def open_library() -> None:
            handles.append(ctypes.CDLL(str(path))._handle)

        try:
            if rehearsed:
                open_library()
            found = rehearsed or registry.of_loading(open_library)
        except OSError as error:
            raise BuildError(f"{path} doesn't load: {error}") from error
        torch.ops.loaded_libraries.add(str(path))
        _loaded.append(_Loaded(path, digest, found, _why_it_stays(found, content), handles[0]))
        _let_it_be_traced(found.operators, found.classes)
        return path


def _let_it_be_traced(operators: Iterable[str], classes: Iterable[str]) -> None:
    for name in sorted(classes):
        fakes.derive(name)
    for name in sorted(operators):
        fakes.watch_operator(name)
    gradients.keep_those_of_methods()


def loaded() -> list[_Loaded]:
    """The libraries in this process that have a file, in the order in which they were loaded."""
    return [each for each in _loaded if each.path.is_file()]


def adopt(name: str, digest: str, registrations: Registrations) -> None:
    """Takes note of a library that the runtime has loaded out of a package; does nothing the second time."""
    with _lock:
        if any(each.digest == digest for each in _loaded):
            return
        _loaded.append(_Loaded(Path(name), digest, registrations, "come out of a package", None))
        # A package may bring what Python can't reach.
        operators, classes = (
            itertools.filterfalse(registry.hidden, names) for names in (registrations.operators, registrations.classes)
        )
        _let_it_be_traced(operators, classes)


def namespaces(path: Path) -> frozenset[str]:
    """The namespaces that the loaded library at `path` has operators or classes in."""
    known = registrations(path)
    if known is None:  # torch.ops.load_library has loaded it
        known = rehearsal.rehearse(path, cache.file_digest(path), ()).registrations
    return known.namespaces


def registrations(path: Path) -> Registrations | None:
    """What the library at `path` has registered; None where it wasn't loaded here, or another took its place."""
    return next((each.registrations for each in _loaded if each.path == path), None)


def _make_room(path: Path, digest: str) -> Registrations:
    """Sees that the library at `path` can be loaded, unloads what it replaces, and says what it registers.

    Raises:
        BuildError: it can't.
    """
    ours = {each.path for each in _loaded}
    others = [Path(name) for name in sorted(torch.ops.loaded_libraries) if Path(name) not in ours]
    nothing = Registrations({}, frozenset(), frozenset(), frozenset())
    neighbours = [each.neighbour for each in loaded()]
    neighbours += [rehearsal.Neighbour(each, cache.file_digest(each), nothing, "") for each in others if each.is_file()]
    outcome = rehearsal.rehearse(path, digest, neighbours)
    rivals = [each for each in _loaded if each.path in outcome.rivals]
    for rival in rivals:
        if rival.stays:
            raise BuildError(
                f"{path.name} has changed and can't take the place of the loaded one, which has {rival.stays}: "
                "restart Python (in a notebook, the kernel)"
            )
    _refuse_without_schema(path, outcome.registrations, rivals)
    _refuse_registered(path, outcome.registrations, rivals)
    if outcome.error and rivals:
        raise BuildError(
            f"{path} can't take the place of the loaded {path.name} ({outcome.error}): "
            "restart Python (in a notebook, the kernel)"
        )
    if outcome.error:
        raise BuildError(f"{path} doesn't load: {outcome.error}")
    if outcome.mistake:
        raise BuildError(f"{path} {outcome.mistake}")
    for rival in rivals:
        _loaded.remove(rival)
        before, after = rival.registrations, outcome.registrations
        assert rival.handle is not None
        if not unloading.unload(rival.path, rival.handle, before.operators, after.operators):
            raise BuildError(
                f"{rival.path} can't be unloaded to load {path}: restart Python (in a notebook, the kernel)"
            )
        unloading.forget(rival.path, before.namespaces)
    return outcome.registrations


def _why_it_stays(registrations: Registrations, content: bytes) -> str:
    """What in a library can't be taken out of a process; nothing where all can."""
    if registrations.classes or b"N5torch17CustomClassHolderE" in content:
        return "a custom class"
    return "C++ autograd nodes" if b"_ZTIN5torch8autograd4NodeE" in content else ""


def _loaded_elsewhere(digest: str) -> Path | None:
    """A file of that content which torch.ops.load_library has loaded, and which is still the one that was."""
    ours = {each.path for each in _loaded}
    for name in torch.ops.loaded_libraries:
        path = Path(name)
        if path not in ours and path.is_file() and cache.file_digest(path) == digest and _is_mapped(path):
            return path
    return None


def _is_mapped(path: Path) -> bool:
    inode = f" {path.stat().st_ino} "
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    return any(inode in line and line.endswith(path.name) for line in maps.splitlines())


def _refuse_without_schema(path: Path, registrations: Registrations, rivals: list[_Loaded]) -> None:
    """Refuses kernels that no call can reach; notes those that another library, or Python, may give a schema later.

    TORCH_LIBRARY_IMPL takes any name. A namespace that the library has by TORCH_LIBRARY is its own to define.
    """
    leaves = frozenset().union(*(each.registrations.names for each in rivals))
    for name in sorted(registrations.without_schema):
        if name not in leaves and registry.schema_of(name) is not None:
            continue
        space, _, operator = name.partition("::")
        if space not in registrations.owned:
            progress.say(f"{path.name} has a kernel for {name}, which can't be called before its schema is defined")
            continue
        own = [each.partition("::")[2] for each in registrations.operators if each.startswith(f"{space}::")]
        meant = registry.meant(operator, own, f"{space}::")
        raise BuildError(f"{path} has a kernel for {name}, which has no schema: define it (m.def){meant}")


def _refuse_registered(path: Path, registrations: Registrations, rivals: list[_Loaded]) -> None:
    leaves = frozenset().union(*(each.registrations.names for each in rivals))

    def refuse(what: str, name: str) -> None:
        owner = next((f"from {each.path}" for each in _loaded if name in each.registrations.names), "from elsewhere")
        raise BuildError(
            f"{path} registers the {what} {name}, which this process has {owner}: "
            "give it another name or namespace, or restart Python without the other"
        )

    for operator in sorted(registrations.operators.keys() - leaves):
        if registry.schema_of(operator) is not None:
            refuse("operator", operator)
    classes = {name.replace(".", "::", 1) for name in registrations.classes & registry.class_names()}
    for name in sorted(classes - leaves):
        refuse("class", name)
    for namespace in sorted(registrations.owned - leaves):
        if registry.is_owned(namespace):
            refuse("namespace", namespace)
