"""What CI runs, each as a session: `python -m nox` for all, `python -m nox -s lint` for one."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types", "cpp", "notebooks"]
nox.options.reuse_existing_virtualenvs = True

#: The torch versions tested on CPU: a CPU build, and the CUDA build that plain `pip install` gives.
#: torch 2.11 is tested on a machine with a GPU: `python -m pytest -m "gpu or not gpu"`.
TORCH = ["2.13.0", "2.14.1"]
#: A worker for each core; the tests of a file share what they have compiled.
PARALLEL = ["-n", "logical", "--dist", "loadfile"]
CPP = sorted(
    str(path)
    for root in ("src", "identity_conv", "tests")
    for path in Path(root).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu"}
)


@nox.session
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    """The suite on the interpreter that runs nox; further arguments go to pytest."""
    session.install(f"torch=={torch}")
    session.install("-e", ".[test]")
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style of Python (ruff) and of C++ and CUDA (clang-format)."""
    session.install("ruff==0.17.6", "clang-format==23.1.5")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("clang-format", "--dry-run", "-Werror", *CPP)


@nox.session
def types(session: nox.Session) -> None:
    """Types of the package (mypy)."""
    session.install(f"torch=={TORCH[0]}")
    session.install("mypy==2.4.1", "-e", ".")
    session.run("mypy")


@nox.session
def cpp(session: nox.Session) -> None:
    """The build without Python, and the C++ tests."""
    session.install(f"torch=={TORCH[0]}", "numpy", "cmake>=3.21", "ninja")
    printed = session.run("python", "-c", "import torch; print(torch.utils.cmake_prefix_path)", silent=True)
    build = Path(session.create_tmp()) / "cpp"
    shutil.rmtree(build, ignore_errors=True)
    # The last line: torch may have warned before.
    cmake = ["cmake", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={str(printed).split()[-1]}"]
    session.run(*cmake, "-S", "tests/cpp", "-B", str(build))
    session.run("cmake", "--build", str(build))
    session.run("ctest", "--test-dir", str(build), "--output-on-failure")
    session.run("cmake", "--install", str(build / "src"), "--prefix", str(build / "installed"))
    session.run(str(build / "installed" / "bin" / "identity-conv-run"), "--help", external=True)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Executes copies of the notebooks, and compares what they show; `-- --keep` keeps what they show."""
    session.install(f"torch=={TORCH[0]}")
    session.install("-e", ".[test,notebooks]")
    executed = Path(session.create_tmp()) / "notebooks"
    shutil.rmtree(executed, ignore_errors=True)
    shutil.copytree("notebooks", executed)
    session.run("pytest", *PARALLEL, "--nbmake", "--overwrite", *sorted(map(str, executed.glob("*.ipynb"))))
    session.run("python", "tests/support_notebooks.py", "notebooks", str(executed), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The reference of the Python interface, from its docstrings, into build/reference."""
    session.install(f"torch=={TORCH[0]}")
    session.install("pdoc==16.0.0", "-e", ".[testing]")
    # hypothesis makes strategies of functions, whose annotations pdoc can't read: it shows them as text, and warns.
    quiet = {"PYTHONWARNINGS": "ignore::UserWarning"}
    modules = ["identity_conv", "identity_conv.sharding", "identity_conv.testing.mutants"]
    session.run("pdoc", "--docformat", "google", "--output-directory", "build/reference", *modules, env=quiet)


@nox.session
@nox.parametrize("torch", TORCH)
def night(session: nox.Session, torch: str) -> None:
    """What is too long for CI: the tests marked `night`, and more examples of the properties."""
    session.install(f"torch=={torch}")
    session.install("-e", ".[test]")
    session.run("pytest", *PARALLEL, "-m", "night or not night", *session.posargs, env={"HYPOTHESIS_PROFILE": "night"})
