"""What the tests of builds share: a process of their own, and sources that compile in a moment."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import identity_conv

ROOT = Path(identity_conv.__file__).parent.parent
MARK_AS_COMMAND = "import _identity_conv_entry\n"

# Arguments of Python that start the command.
CONSOLE_SCRIPT = ("-c", "from _identity_conv_entry import main; main()")
MODULE = ("-m", "identity_conv")

NO_COMPILER = {"PATH": "", "CXX": None, "CC": None}

#: No torch header: it compiles in a moment.
TINY = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


def environment(changes: dict[str, str | os.PathLike[str] | None]) -> dict[str, str]:
    """This process's environment with this clone importable, and `changes`; None takes a variable out."""
    values = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'identity_conv' / 'entry'}",
        "IDENTITY_CONV_PREFIX": None,
        **changes,
    }
    return {name: os.fspath(value) for name, value in values.items() if value is not None}


def run_python(*arguments: str | os.PathLike[str], **changes: str | os.PathLike[str] | None):
    """Runs Python in a process of its own; `changes` are of its environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd="/",  # Python looks for modules where it starts: not in this clone
        env=environment(changes),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def stderr_of(*arguments: str | os.PathLike[str], terminal: bool) -> bytes:
    """What Python prints on stderr, which is a terminal or a pipe."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, *arguments]
    with os.fdopen(ours, "rb", buffering=0) as reader:
        started = subprocess.Popen(
            command, cwd="/", env=environment({"TERM": "xterm"}), stdout=subprocess.DEVNULL, stderr=theirs
        )
        os.close(theirs)
        shown = b""
        try:
            while chunk := reader.read(4096):
                shown += chunk
        except OSError:  # how a terminal says that its other side is closed
            pass
    assert started.wait() == 0, shown
    return shown


def write_program(path: Path, script: str) -> Path:
    """A shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def commands(folder: Path) -> Path:
    """A folder for PATH that has this package's commands, as pip installs them; this clone may be used without."""
    for name, function in (("identity-conv", "main"), ("identity-conv-run", "run_program")):
        code = f"from _identity_conv_entry import {function}; {function}()"
        write_program(folder / name, f'exec {sys.executable} -c "{code}" "$@"')
    write_program(folder / "python", f'exec {sys.executable} "$@"')
    write_program(folder / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    return folder


def run_bash(script: str, folder: Path, **changes: str | os.PathLike[str] | None):
    """Runs a bash script in `folder` with :func:`commands` on PATH; it stops at the first command that fails."""
    path = os.pathsep.join([str(commands(folder / ".commands")), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment({"PATH": path, **changes}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def run_project(project: Path, *options: str) -> str:
    """Runs the tests and the script of a project that `identity-conv new` laid down, each in a process of its own.

    Args:
        options: of pytest.

    Returns:
        What the script printed; it has found everything equal.
    """
    for command in (["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options], ["python", "road.py"]):
        done = run_bash(shlex.join(command), project)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERENT" not in done.stdout
    return done.stdout


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file under `folder` but bytecode, with its size and time of change."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
