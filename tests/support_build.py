"""What the tests of builds share: a process of their own, and sources that compile in a moment."""

from __future__ import annotations

import os
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


def write_program(path: Path, script: str) -> Path:
    """A shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def run_project(project: Path, *options: str) -> str:
    """Runs the tests and the script of a project that `identity-conv new` laid down, each in a process of its own.

    Args:
        options: of pytest.

    Returns:
        What the script printed; it has found everything equal.
    """
    # As pip installs it; this clone may be used without.
    entry = "from _identity_conv_entry import run_program; run_program()"
    program = write_program(project.parent / "bin" / "identity-conv-run", f'exec {sys.executable} -c "{entry}" "$@"')
    for arguments in (["-m", "pytest", "-q", "-p", "no:cacheprovider", *options], ["road.py"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=project,
            env=environment({"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
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
