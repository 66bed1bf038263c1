"""Libraries of operators in this process: each content once, and never two of one registration.

torch ends the process where a namespace, an operator or a class is registered a second time, or where a
registration is wrong. So a library is first loaded in a process of its own, which says what it registers;
that is remembered beside it. This module touches what is private in torch for that: seen in torch 2.11,
2.13 and 2.14.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from . import cache, fakes, gradients
from .toolchain import BuildError

PROBE_TIMEOUT_S = 120

_PROBE = """
import ctypes, json, sys, torch
def names():
    classes = {s.arguments[0].type.str() for s in torch._C._jit_get_custom_class_schemas() if s.arguments}
    return set(torch._C._dispatch_get_all_op_names()), {c for c in classes if c.startswith("__torch__.torch.classes.")}
def defined(operator):
    name, _, overload = operator.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True
for other in sys.argv[2:]:
    ctypes.CDLL(other)
operators, classes = names()
ctypes.CDLL(sys.argv[1])
found = names()
operators, classes = found[0] - operators, found[1] - classes
namespaces = {o.split("::")[0] for o in operators} | {c.split(".")[3] for c in classes}
def owned(namespace):
    try:
        torch.library.Library(namespace, "DEF")
    except RuntimeError:
        return True
    return False
print(json.dumps({
    "operators": sorted(filter(defined, operators)),
    "classes": sorted(c.removeprefix("__torch__.torch.classes.") for c in classes),
    "owned": sorted(filter(owned, namespaces)),
    "namespaces": sorted(namespaces),
}))
"""


@dataclass(frozen=True)
class Registrations:
    """What loading a library adds to a process."""

    operators: frozenset[str]  # namespace::name.overload, with a schema
    classes: frozenset[str]  # namespace.Name
    owned: frozenset[str]  # namespaces of TORCH_LIBRARY: one library in a process may have each
    namespaces: frozenset[str]

    @classmethod
    def of(cls, path: Path, digest: str, beside: Sequence[_Loaded] = ()) -> Registrations:
        """What the library at `path` registers, beside others, remembered in its folder.

        Raises:
            BuildError: it doesn't load, or ends the process that loads it.
        """
        context = hashlib.sha256(" ".join([digest, *(other.digest for other in beside)]).encode()).hexdigest()[:16]
        record = path.with_name(f"{path.name}.{context}.json")
        try:
            found = json.loads(record.read_text())
        except (OSError, ValueError):
            found = _probe(path, [other.path for other in beside])
            with suppress(OSError):  # a folder that can't be written, such as a prefix: asked again next time
                record.write_text(json.dumps(found))
        return cls(*(frozenset(found[part]) for part in ("operators", "classes", "owned", "namespaces")))


def _probe(path: Path, beside: Sequence[Path]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", _PROBE, str(path), *map(str, beside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    what = next((line.partition("what():")[2].strip() for line in lines if "what():" in line), None)
    raise BuildError(f"{path} doesn't load: {what or (lines or ['it ends the process'])[-1]}")


@dataclass
class _Loaded:
    path: Path
    digest: str
    registrations: Registrations
    has_autograd_nodes: bool
    handle: int | None


_lock = threading.RLock()
_loaded: list[_Loaded] = []


def load(path: Path, *, trusted: bool = False) -> Path:
    """Loads the operator library at `path`, or finds its content loaded, and returns the loaded file.

    Another build of the same name makes room first. No operator of that may be running in another
    thread meanwhile: its code is unmapped.

    Args:
        trusted: the library is this package's own, and is loaded without a look at what it registers where
            nothing of it is registered yet.

    Raises:
        BuildError: it doesn't load, registers again what this process has registered, or can't take the
            place of an earlier build of it.
    """
    with _lock:
        digest = cache.file_digest(path)
        known = next((each for each in _loaded if each.digest == digest), None)
        if known and known.handle is not None:
            return known.path
        if elsewhere := _loaded_elsewhere(digest):
            return elsewhere
        rivals = [each for each in _loaded if each.path.name == path.name]
        before = _operators(), fakes.class_names()
        probed = None if trusted and not rivals else Registrations.of(path, digest)
        for rival in rivals:
            _unload(rival, path)
        if probed:
            _refuse_registered(path, probed)
            # What two libraries say of one operator may disagree: seen before it ends this process.
            neighbours = [each for each in _loaded if each.registrations.namespaces & probed.namespaces]
            if neighbours:
                Registrations.of(path, digest, neighbours)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} doesn't load: {error}") from error
        torch.ops.loaded_libraries.add(str(path))
        operators, classes = _operators() - before[0], fakes.class_names() - before[1]
        spaces = {name.split("::")[0] for name in operators} | {name.split(".")[0] for name in classes}
        registered = probed or Registrations(frozenset(operators), frozenset(classes), frozenset(), frozenset(spaces))
        nodes = b"_ZTIN5torch8autograd4NodeE" in path.read_bytes()
        _loaded.append(_Loaded(path, digest, registered, nodes, library._handle))
        for name in sorted(classes):
            fakes.derive(name)
        for name in sorted(operators):
            fakes.watch_operator(name)
        gradients.keep_those_of_methods()
        return path


def namespaces(path: Path) -> frozenset[str]:
    """The namespaces that the loaded library at `path` has operators or classes in."""
    return next((each.registrations.namespaces for each in _loaded if each.path == path), frozenset())


def _operators() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


def _is_defined(operator: str) -> bool:
    """Whether the operator has a schema: a fake in Python may outlive the library that defined it."""
    name, _, overload = operator.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def _loaded_elsewhere(digest: str) -> Path | None:
    """A file of that content which torch.ops.load_library has loaded."""
    for name in torch.ops.loaded_libraries:
        path = Path(name)
        if path.is_file() and cache.file_digest(path) == digest:
            return path
    return None


def _unload(rival: _Loaded, path: Path) -> None:
    """Takes a library and its operators out of the process, to make room for the one at `path`."""
    registered = rival.registrations
    keeps = "a custom class" if registered.classes else "C++ autograd nodes" if rival.has_autograd_nodes else None
    if keeps:
        raise BuildError(
            f"{path.name} has changed and can't take the place of the loaded one, which has {keeps}: "
            "restart Python (in a notebook, the kernel)"
        )
    if rival.handle is not None:
        # An operator that somebody holds stays an entry of the dispatcher, with or without a schema: a
        # registration that does nothing, on a key that nothing uses, keeps it.
        for operator in sorted(registered.operators - _keepers.keys()):
            _keepers[operator] = torch.library.Library(operator.split("::")[0], "IMPL")
            _keepers[operator].impl(operator, torch.library.fallthrough_kernel, "FPGA")
        _ctypes.dlclose(rival.handle)
        rival.handle = None
    if any(map(_is_defined, registered.operators)) or _is_mapped(rival.path):
        raise BuildError(f"{rival.path} can't be unloaded to load {path}: restart Python (in a notebook, the kernel)")
    _loaded.remove(rival)
    torch.ops.loaded_libraries.discard(str(rival.path))
    # torch.ops remembers operators by name: the next look finds the new ones.
    for namespace in registered.namespaces:
        torch.ops.__dict__.pop(namespace, None)


_keepers: dict[str, torch.library.Library] = {}


def _refuse_registered(path: Path, registrations: Registrations) -> None:
    def refuse(what: str, verb: str = "registers") -> None:
        owner = next((f" from {each.path}" for each in _loaded if what.split()[-1] in _names(each)), " from elsewhere")
        raise BuildError(
            f"{path} {verb} the {what}, which this process has{owner}: "
            "give it another name or namespace, or restart Python without the other"
        )

    for operator in sorted(registrations.operators):
        if _is_defined(operator):
            refuse(f"operator {operator}")
    for name in sorted(registrations.classes & fakes.class_names()):
        refuse(f"class {name.replace('.', '::', 1)}")
    for namespace in sorted(registrations.owned):
        if _is_owned(namespace):
            refuse(f"namespace {namespace}", "registers (by TORCH_LIBRARY)")


def _names(loaded: _Loaded) -> set[str]:
    registered = loaded.registrations
    classes = {name.replace(".", "::", 1) for name in registered.classes}
    return {*registered.operators, *classes, *registered.owned}


def _is_owned(namespace: str) -> bool:
    """Whether a library has registered the namespace by TORCH_LIBRARY, or Python by "DEF"."""
    try:
        trial = torch.library.Library(namespace, "DEF")
    except RuntimeError:
        return True
    trial._destroy()
    return False


def _is_mapped(path: Path) -> bool:
    with open("/proc/self/maps") as maps:
        return any(str(path) in line for line in maps)
