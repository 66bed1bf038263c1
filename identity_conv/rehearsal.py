"""Loading a library in a process of its own first, beside the same others, in the same order.

torch ends the process where a namespace, an operator or a class is registered a second time, where a registration
is wrong, or where two libraries disagree. Here it is another process that ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import registry, unloading
from .registry import Registrations
from .toolchain import BuildError

TIMEOUT_S = 120

# The mark keeps the package from building its own library there.
_START = (
    "import sys, types, json; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.modules['_identity_conv_entry'] = types.ModuleType('_identity_conv_entry'); "
    "from identity_conv import rehearsal; rehearsal._main(*sys.argv[2:])"
)


@dataclass(frozen=True)
class Neighbour:
    """A library that this process has loaded."""

    path: Path
    digest: str
    registrations: Registrations
    stays: str  # why it can't be unloaded, or nothing


@dataclass(frozen=True)
class Outcome:
    """What loading the library registers, and which of its namesakes must make room for that."""

    registrations: Registrations
    rivals: list[Path]
    error: str  # why it ends the process; empty where it doesn't
    mistake: str  # what of it can't be right, though torch takes it; empty where nothing


def rehearse(path: Path, digest: str, neighbours: Sequence[Neighbour]) -> Outcome:
    """What loading the library at `path` does beside `neighbours`, remembered in its folder.

    A neighbour of the same file name is a rival where the two register one thing.

    Raises:
        BuildError: it doesn't load even alone.
    """
    request = {
        "path": str(path),
        "neighbours": [
            {"path": str(each.path), "registrations": each.registrations.to_json(), "stays": each.stays}
            for each in neighbours
        ],
        "schemas": _schemas_of_python(),
    }
    context = json.dumps([digest, [each.digest for each in neighbours], request["schemas"]])
    record = path.with_name(f"{path.name}.{hashlib.sha256(context.encode()).hexdigest()[:16]}.json")
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _outcome(path, json.loads(record.read_text()))
    answer = _ask(request)
    outcome = _outcome(path, answer)
    if not outcome.error:
        with suppress(OSError):  # a folder that can't be written, such as a prefix: asked again next time
            record.write_text(json.dumps(answer))
    return outcome


def _outcome(path: Path, answer: dict[str, Any]) -> Outcome:
    if "registrations" not in answer:
        raise BuildError(f"{path} doesn't load: {answer['error']}")
    rivals = [Path(rival) for rival in answer["rivals"]]
    registrations = Registrations.from_json(answer["registrations"])
    return Outcome(registrations, rivals, str(answer["error"]), str(answer["mistake"]))


def _schemas_of_python() -> dict[str, str]:
    """Operators that Python has defined, which a library may have kernels for."""
    found = {}
    for key in sorted(torch.library._defs):
        name = "::".join(key.split("/")[:2])
        if schema := registry.schema_of(name):
            found[name] = schema
    return found


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="identity_conv-") as folder:
        asked, answered, said = (Path(folder) / name for name in ("request", "answer", "stderr"))
        asked.write_text(json.dumps(request))
        # Not the working folder, whose modules may have the names of others; but torch and this, wherever they are.
        here = [str(Path(torch.__file__).parent.parent), str(Path(__file__).parent.parent)]
        places = json.dumps([place for place in sys.path if place] + here)
        command = [sys.executable, "-P", "-c", _START, places, str(asked), str(answered)]
        # Files, not pipes: a constructor may start a process that never closes them.
        with said.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                process.wait(timeout=TIMEOUT_S)
                ended = "it ends the process"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it has forked too
                process.wait()
                ended = f"loading it takes more than {TIMEOUT_S} s"
        try:
            answer = json.loads(answered.read_text())
        except (OSError, ValueError):
            answer = {}
        if "error" not in answer:
            answer["error"] = _reason(said.read_text(errors="replace")) or ended
        return {"rivals": [], "mistake": "", **answer}


def _reason(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.partition("what():")[2].strip() for line in lines if "what():" in line]
    found = said or lines
    return found[-1] if found else None


# --- in the other process -------------------------------------------------------------------------


def _main(asked: str, answered: str) -> None:
    request = json.loads(Path(asked).read_text())
    path, unfinished = request["path"], Path(f"{answered}.new")

    def answer(**parts: Any) -> None:
        unfinished.write_text(json.dumps(parts))
        unfinished.replace(answered)

    mentioned = frozenset(
        space for each in request["neighbours"] for space in Registrations.from_json(each["registrations"]).owned
    )
    found = _forked(lambda: registry.of_loading(lambda: ctypes.CDLL(path), mentioned).to_json())
    if found:
        answer(registrations=found, rivals=[])
    for name, schema in request["schemas"].items():
        with suppress(RuntimeError):  # of a library below, or of torch's own Python
            torch.library.define(name, schema[schema.index("(") :])
    namesakes = [each for each in request["neighbours"] if Path(each["path"]).name == Path(path).name]

    def beside_others() -> Any:
        for each in request["neighbours"]:
            if each not in namesakes:
                ctypes.CDLL(each["path"])
        return registry.of_loading(lambda: ctypes.CDLL(path)).to_json()

    found = found or _forked(beside_others)
    names = Registrations.from_json(found).names if found else frozenset()
    rivals = [each for each in namesakes if names & Registrations.from_json(each["registrations"]).names]
    paths = [each["path"] for each in rivals]
    if found:
        answer(registrations=found, rivals=paths)
    mistake = ""
    if not any(each["stays"] for each in rivals):
        handles = {each["path"]: ctypes.CDLL(each["path"])._handle for each in request["neighbours"]}
        for each in rivals:
            operators = Registrations.from_json(each["registrations"]).operators
            unloading.unload(Path(each["path"]), handles[each["path"]], operators, found["operators"] if found else {})
        before = registry.methods()
        beside = registry.of_loading(lambda: ctypes.CDLL(path)).classes
        if found and (lost := sorted(set(found["classes"]) - beside)):
            gained = sorted(name for name, count in (registry.methods() - before).items() if name not in beside)
            shown = ["::".join(each.split(".", 1)) for each in (lost[0], *gained)]
            answer(
                registrations=found,
                rivals=paths,
                error=f"its class {shown[0]} has the C++ name of the loaded {' or '.join(shown[1:]) or 'one'}, and "
                "torch knows classes by that: put it in an unnamed namespace",
            )
            os._exit(0)
        mistake = registry.mistake(Registrations.from_json(found)) if found else ""
    if found:
        answer(registrations=found, rivals=paths, error="", mistake=mistake)
    os._exit(0)


def _forked(call: Callable[[], Any]) -> Any:
    """What `call` returns in a process that may end, or None."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            try:
                answer.write(json.dumps(call()).encode())
                answer.flush()
            except OSError as error:
                print(f"what(): {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0)
        try:
            return json.loads(answer.read() or b"null")
        except ValueError:
            return None
