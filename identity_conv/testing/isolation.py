"""Processes in which a kernel may crash or hang without taking the tests along.

A fork is cheap and sees every operator of this process; it can't use CUDA, nor the thread pools of this process,
so the work runs in a fresh thread, which makes its own. A fresh process imports and loads everything anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

_BLACKBOARD_BYTES = 1 << 20
_START_LIMIT_S = 120.0  # a fresh process imports torch and loads libraries
_HEADER = struct.Struct("qdq")  # beats, seconds allowed for this beat, bytes of the note


class Blackboard:
    """Memory that outlives the child: what it is about to do, and for how long that may take."""

    def __init__(self, file: IO[bytes], limit: float):
        self._memory = mmap.mmap(file.fileno(), _BLACKBOARD_BYTES)
        self._beats = 0
        self.limit = limit
        self.isolated = False  # whether the one who writes may end its process

    def note(self, what: Any = None, limit: float | None = None) -> None:
        """Says what comes next, before it is done; `limit` in seconds."""
        self._beats += 1
        text = b"" if what is None else pickle.dumps(what)
        if len(text) > _BLACKBOARD_BYTES - _HEADER.size:
            text = b""
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text
        self._memory[: _HEADER.size] = _HEADER.pack(self._beats, limit or self.limit, len(text))

    def allow(self, limit: float) -> None:
        """Gives what was noted last `limit` seconds from now on."""
        self._beats += 1
        self._memory[: _HEADER.size] = _HEADER.pack(self._beats, limit, _HEADER.unpack(self._memory[: _HEADER.size])[2])

    def beat(self) -> tuple[int, float]:
        """The count of notes so far, and the limit of the latest."""
        beats, limit, _ = _HEADER.unpack(self._memory[: _HEADER.size])
        return beats, limit or self.limit

    def last(self) -> Any:
        """What the latest note says. Only once its writer has ended: a note is not written at once."""
        size = _HEADER.unpack(self._memory[: _HEADER.size])[2]
        try:
            return pickle.loads(self._memory[_HEADER.size : _HEADER.size + size]) if size else None
        except Exception:  # it died while writing
            return None


@dataclass(frozen=True)
class Death:
    """A task that ended its process, or was ended after too long.

    Attributes:
        how: half a sentence: ``ended the process (SIGSEGV)``, ``did not return within 5 s``.
        at: what the child had noted last.
    """

    how: str
    at: Any
    hung: bool = False


class _Done:
    """A task is over."""


Perform = Callable[[Any, Blackboard, Callable[[Any], None]], None]


def run(tasks: Sequence[Any], perform: Perform, *, how: str, limit: float) -> Generator[tuple[Any, Any], Any, None]:
    """Performs the tasks in order in child processes; gives each task with each thing that it told, or its Death.

    A death costs its task alone: the next ones go on in a new child. A task sent in (``generator.send``) for a
    Death comes next.

    Args:
        perform: called in the child with a task, the blackboard, and a function that tells things; they are pickled.
        how: "fork", "spawn" (a new Python process, to which `perform` and the tasks are pickled), or "here".
        limit: seconds without a note after which a child counts as hanging.
    """
    left = list(tasks)
    if how == "here":
        yield from _here(left, perform, limit)
        return
    while left:
        with _Child(left, perform, how == "spawn", limit) as child:
            while left:
                told = child.next()
                if isinstance(told, _Done):
                    left.pop(0)
                    continue
                again = yield left[0], told
                if isinstance(told, Death):
                    left.pop(0)
                    if again is not None:
                        left.insert(0, again)
                        yield again, None
                    break


def _here(tasks: list[Any], perform: Perform, limit: float) -> Generator[tuple[Any, Any], Any, None]:
    """The same without a child: what ends the process ends this one."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_BLACKBOARD_BYTES)
        board = Blackboard(file, limit)
        for task in tasks:
            told: list[Any] = []
            perform(task, board, told.append)
            yield from ((task, each) for each in told)


class _Child:
    def __init__(self, tasks: list[Any], perform: Perform, fresh: bool, limit: float):
        self._stack = contextlib.ExitStack()
        file = self._stack.enter_context(tempfile.NamedTemporaryFile(prefix="identity_conv_check_"))  # noqa: SIM115
        file.truncate(_BLACKBOARD_BYTES)
        self._board = Blackboard(file, limit)
        self._output = self._stack.enter_context(tempfile.NamedTemporaryFile(prefix="identity_conv_check_"))  # noqa: SIM115
        self._results, sender = multiprocessing.Pipe(duplex=False)
        self._stack.callback(self._results.close)
        arguments = (tasks, perform, file.name, self._output.name, limit)
        self._process = _fresh(sender, arguments) if fresh else None
        self._pid = self._process.pid if self._process else _forked(self._results, sender, arguments)
        sender.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stack.close()

    def next(self) -> Any:
        """What the child tells next, or its Death."""
        seen, watch = -1, _Watch(self._pid)
        while not self._results.poll(0.05):
            beats, limit = self._board.beat()
            if not beats:
                limit = _START_LIMIT_S
            if beats != seen:
                seen, watch = beats, _Watch(self._pid)
            elif watch.is_over(limit):
                self._end()
                return Death(f"did not return within {limit:.0f} s", self._board.last(), hung=True)
        try:
            return self._results.recv()
        except (EOFError, OSError):
            return Death(self._cause(self._end()), self._board.last())

    def _cause(self, code: int) -> str:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        return f"ended the process ({how}{': ' + lines[-1][:200] if lines else ''})"

    def _end(self) -> int:
        """Ends the child where it still runs; gives its exit code, or minus the signal."""
        code = getattr(self, "_code", None)
        if code is not None:
            return code
        if self._process:
            try:
                code = self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
        else:
            deadline = time.monotonic() + 0.2
            pid = 0
            while not pid and time.monotonic() < deadline:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if not pid:
                    time.sleep(0.005)
            if not pid:
                os.kill(self._pid, signal.SIGKILL)
                _, status = os.waitpid(self._pid, 0)
            code = os.waitstatus_to_exitcode(status)
        self._code = code
        return code


def how_for(device: torch.device | str) -> str:
    """The `how` of :func:`run` for calls on a device: "fork", or "spawn" where no fork serves, which one tries."""
    return "fork" if torch.device(device).type == "cpu" and fork_serves() else "spawn"


def fork_serves() -> bool:
    """Whether autograd works in a fork: in a torch with CUDA it doesn't once this process has begun its threads."""
    if torch.version.cuda is None:
        return True
    return list(run([None], _differentiate, how="fork", limit=5.0)) == [(None, True)]


def _differentiate(task: None, board: Blackboard, tell: Callable[[Any], None]) -> None:
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        tell(False)
    else:
        tell(True)


class _Watch:
    """How long a child takes for one step, where a machine that is busy otherwise is no fault of its."""

    def __init__(self, pid: int):
        self._pid = pid
        self._began, self._cpu = time.monotonic(), self._used()
        self._looks = self._runnable = 0

    def is_over(self, limit: float) -> bool:
        """Whether it has worked for half of `limit` seconds, or slept for all of them, or waits for ever."""
        self._looks += 1
        self._runnable += self._is_runnable()
        waited = time.monotonic() - self._began
        if waited < limit:
            return False
        asleep = self._runnable < self._looks / 3
        return asleep or self._used() - self._cpu > limit / 2 or waited > 10 * limit

    def _is_runnable(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            for task in os.listdir(f"/proc/{self._pid}/task"):
                with open(f"/proc/{self._pid}/task/{task}/stat") as stat:
                    if stat.read().rpartition(")")[2].split()[0] in "RD":
                        return True
        return False

    def _used(self) -> float:
        """Seconds of CPU that it has used."""
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self._pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0


def _forked(receiver: Connection, sender: Connection, arguments: tuple[Any, ...]) -> int:
    """Starts a fork that serves; its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            receiver.close()
            worker = threading.Thread(target=_serve, args=(sender, *arguments))
            worker.start()
            worker.join()
        finally:
            os._exit(0)
    return pid


_BOOTSTRAP = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    from identity_conv.testing import isolation
    isolation._serve_fresh(int(sys.argv[2]), file)
"""


def _fresh(sender: Connection, arguments: tuple[Any, ...]) -> subprocess.Popen[bytes]:
    """Starts a fresh Python that serves."""
    with tempfile.NamedTemporaryFile(prefix="identity_conv_check_", delete=False) as file:
        pickle.dump(sys.path, file)
        file.write(dumps(arguments))
    command = [sys.executable, "-c", _BOOTSTRAP, file.name, str(sender.fileno())]
    return subprocess.Popen(command, pass_fds=(sender.fileno(),))


def _serve_fresh(sender: int, payload: IO[bytes]) -> None:
    """The other side of :func:`_fresh`."""
    os.unlink(payload.name)
    try:
        arguments = pickle.load(payload)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    _serve(Connection(sender, readable=False), *arguments)
    os._exit(0)


def dumps(what: Any) -> bytes:
    """`what` pickled for a fresh process.

    Raises:
        ValueError: it can't be, as what is a lambda or lives in a script.
    """
    try:
        pickled = pickle.dumps(what)
    except Exception as error:
        raise ValueError(str(error)) from error
    if b"__main__" in pickled:
        raise ValueError("it is defined in __main__, which a fresh process can't import")
    return pickled


def _serve(
    results: Connection,
    tasks: Sequence[Any],
    perform: Perform,
    board: str,
    output: str,
    limit: float,
) -> None:
    """The child's side: performs the tasks, and sends each result."""
    faulthandler.disable()  # the parent says what happened
    with open(output, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with open(board, "r+b") as file:
        blackboard = Blackboard(file, limit)
        blackboard.isolated = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(max(2, torch.get_num_threads()))
        for task in tasks:
            blackboard.note(limit=max(limit, 30.0))
            perform(task, blackboard, results.send)
            results.send(_Done())
    results.close()
