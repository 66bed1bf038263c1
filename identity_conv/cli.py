"""The command ``identity-conv``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__, settings
from .bench import SUITES
from .wording import counted

if TYPE_CHECKING:
    from rich.console import Console

#: The exit status of a command that failed with a reason.
FAILED = 1

_SETTINGS = "\n".join(f"  {each.name}  \n      {each.meaning} (default: {each.default})" for each in settings.ALL)

#: No row of ours is longer, and a table is no wider than its rows.
_WIDTH_IN_A_PIPE = 1000

_COLOURS = {"ok": "green", "warning": "yellow", "fatal": "red"}

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"\b\nEnvironment:\n{_SETTINGS}\n\n\b\n"
    "Exit status: 0 done; 1 failed, refused or interrupted, with the reason on stderr; 2 wrong usage.\n\n\b\n"
    "Answers go to stdout, all else to stderr. Completion in bash (zsh and fish alike):\n"
    '  eval "$(_IDENTITY_CONV_COMPLETE=bash_source identity-conv)"',
)
@click.version_option(__version__, prog_name="identity-conv")
def command() -> None:
    """A C++/CUDA kernel's whole road through PyTorch: operator, class, export, package, inference without Python."""


@command.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("model.pt2"),
    show_default=True,
    help="Where the package goes; the name ends in .pt2.",
)
@click.pass_context
def demo(context: click.Context, out: Path) -> None:
    """Takes the worked example the whole road and compares at every step.

    \b
    Builds the library, runs the model, exports it and prints the graph, compiles a package, loads it
    in Python, builds and runs the program without Python on the same input.

    \b
    Example:
      identity-conv demo --out demo.pt2
    """
    from . import demo as road

    if out.suffix != ".pt2" or not out.absolute().parent.is_dir():
        context.fail(f"--out must name a file that ends in .pt2, in a folder that is there, got {str(out)!r}")
    if not road.run(out):
        sys.exit(FAILED)


@command.command()
@click.argument("name")
@click.option("--class", "class_", is_flag=True, help="With a class that holds state.")
@click.option("--cuda", is_flag=True, help="With a CUDA kernel.")
@click.option("--backward", is_flag=True, help="With gradients.")
def new(name: str, class_: bool, cuda: bool, backward: bool) -> None:
    """Lays down a small project in the folder NAME: a kernel, its test, and a script that takes it the whole road.

    \b
    NAME/NAME.cpp is the file to make yours; the test and the script pass as they are.

    \b
    Example:
      identity-conv new my_filter --backward
      pip install pytest
      cd my_filter && python -m pytest && python road.py
    """
    from . import scaffold

    asked = {"class": class_, "cuda": cuda, "backward": backward}
    for path in scaffold.new(name, [part for part, wanted in asked.items() if wanted]):
        click.echo(path.relative_to(Path.cwd()))


@command.command()
@click.option(
    "--prefix",
    type=click.Path(file_okay=False, path_type=Path),
    help="Lay the files down in this folder (bin, lib, include) for IDENTITY_CONV_PREFIX.",
)
@click.argument("extensions", nargs=-1, metavar="[MODULE:EXTENSION]...")
def build(prefix: Path | None, extensions: tuple[str, ...]) -> None:
    """Builds ahead of time: operator library, Python binding, program, and extensions of yours.

    A MODULE:EXTENSION is an Extension at the top level of a module that can be imported.

    \b
    Example:
      identity-conv build --prefix prefix my_kernels:ext
      IDENTITY_CONV_PREFIX=$PWD/prefix python -c "import my_kernels"
    """
    from . import ahead

    for path in ahead.build(prefix, extensions):
        click.echo(path)


@command.command()
@click.argument("package", type=click.Path(path_type=Path))
@_json
def inspect(package: Path, as_json: bool) -> None:
    """Says what PACKAGE holds and whether it can be loaded here; exits with 1 where something is fatal.

    \b
    Maps nothing of it, and needs no compiler where the runtime is built.

    \b
    Example:
      identity-conv inspect model.pt2
      identity-conv inspect model.pt2 --json > model.json
    """
    from .inspection import tables
    from .package import inspect_package

    found = inspect_package(package)
    if as_json:
        _print_json(found)
    else:
        for table in tables(found):
            _console().print(table)
    if found["verdict"] == "fatal":
        sys.exit(FAILED)


@command.command()
@click.argument("package", type=click.Path(path_type=Path))
@_json
def verify(package: Path, as_json: bool) -> None:
    """Runs the example that PACKAGE carries and compares with the outputs that it recorded.

    \b
    Exits with 1 where PACKAGE is refused, carries no example, or gives another result; as JSON, `kind`
    says which.

    \b
    Example:
      identity-conv verify model.pt2
    """
    from .errors import PackageError
    from .package import load_package

    try:
        answer = {"verified": True, "kind": "", "text": load_package(package).verify()}
    except PackageError as error:
        if not as_json:
            raise
        answer = {"verified": False, "kind": error.kind, "text": str(error)}
    if as_json:
        _print_json({"package": str(package), **answer})
    else:
        click.echo(answer["text"])
    if not answer["verified"]:
        sys.exit(FAILED)


@command.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("inputs", type=click.Path(path_type=Path))
@click.argument("outputs", type=click.Path(file_okay=False, path_type=Path))
@click.option("--device", help="Where to run, such as cuda:1; by default the package's, and each torchrun rank's GPU.")
@_json
def run(package: Path, inputs: Path, outputs: Path, device: str | None, as_json: bool) -> None:
    """Runs PACKAGE on every .pt file of the folder INPUTS, or on that file; the outputs go to the folder OUTPUTS.

    \b
    An input is a tensor, a list or tuple of the model's positional arguments, or a dict of those that the
    export had by keyword, as torch.save writes it. Started again it does what isn't done yet, or has
    changed since; several at once, on one host or many, share the work. OUTPUTS is for one package. An
    input that fails is named, with its reason in the JSON document too, the others are done, and the
    status is 1.

    \b
    Example:
      identity-conv run model.pt2 inputs outputs
      torchrun --standalone --nproc-per-node 2 --no-python identity-conv run model.pt2 inputs outputs
    """
    from . import batch, progress

    failure = None
    try:
        outcome = batch.run(package, inputs, outputs, device=device)
    except batch.FailedInputsError as error:
        outcome, failure = error.outcome, error
    rank = os.environ.get("RANK")
    if as_json:
        _print_json(vars(outcome) | ({} if rank is None else {"rank": int(rank)}))
    if failure:
        raise failure
    if not as_json:
        progress.say(str(outcome) if rank is None else f"rank {rank}: {outcome}")


@command.command()
@_json
@click.option("--quick", is_flag=True, help="Only look; compile and run nothing.")
def doctor(as_json: bool, quick: bool) -> None:
    """Says what works on this machine, what doesn't, and what to do; exits with 1 where something is fatal.

    \b
    Works where nothing builds, and without torch. It compiles and loads a small library and a small
    package, each in a process of its own, where a crash is a finding. Each line is printed as soon as it
    is known.

    \b
    Example:
      identity-conv doctor --quick
    """
    from . import diagnosis

    found = []
    for finding in diagnosis.findings(probes=not quick):
        found.append(finding)
        if not as_json:
            verdict = click.style(finding.verdict, fg=_COLOURS[finding.verdict])
            click.echo(verdict + str(finding).removeprefix(finding.verdict))  # click flushes
    report = diagnosis.Report(found)
    if as_json:
        click.echo(report.json())
    if not report.healthy:
        sys.exit(FAILED)


@command.group()
def cache() -> None:
    """Lists, explains and removes finished builds."""


@cache.command("list")
@_json
def list_builds(as_json: bool) -> None:
    """Lists the builds in the cache, the latest first.

    \b
    Example:
      identity-conv cache list
    """
    import datetime

    from rich.table import Table

    from .cache import entries

    found = entries()
    if as_json:
        _print_json([vars(entry) for entry in found])
        return
    table = Table("build", "key", "MiB", "made", "finished", box=None)
    for entry in found:
        made = datetime.datetime.fromtimestamp(entry.made).strftime("%Y-%m-%d %H:%M")
        table.add_row(entry.name, entry.key, f"{entry.bytes / 2**20:.1f}", made, "yes" if entry.finished else "no")
    _console().print(table)


@cache.command("explain")
@click.argument("extension", required=False, metavar="[MODULE:EXTENSION]")
@_json
def explain_build(extension: str | None, as_json: bool) -> None:
    """Says whether an extension is built, and else which parts changed; without one, identity_conv's own.

    \b
    Builds nothing, also where the module loads its extension as it is imported.

    \b
    Example:
      identity-conv cache explain my_kernels:ext
    """
    from . import ahead, targets
    from .extension import Extension

    explained = ahead.look_at_extension(extension) if extension else Extension._of(targets.operators())
    if as_json:
        built, changes = explained._state()
        _print_json({"name": explained.name, "key": explained.key, "built": built, "changes": changes})
    else:
        click.echo(explained.explain())


def _complete_build(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from .cache import names

    return [name for name in names() if name.startswith(incomplete)]


@cache.command("clean")
@click.argument("name", required=False, shell_complete=_complete_build)
@click.option("--yes", is_flag=True, help="Don't ask.")
@_json
def clean_builds(name: str | None, yes: bool, as_json: bool) -> None:
    """Removes the builds of NAME (see `cache list`), or all; a loaded library stays mapped where it is.

    \b
    Example:
      identity-conv cache clean my_kernels --yes
    """
    from .cache import clean, names

    if name is not None and name not in (known := names()):
        raise ValueError(
            f"cache clean: NAME must be {' or '.join(known) or 'that of a build, and there is none'}, got {name!r}"
        )
    if not yes and sys.stdin is None:
        raise click.UsageError("nobody can be asked, since standard input is closed: give --yes")
    wanted = "every build" if name is None else f"the builds of {name}"
    if not yes and not click.confirm(f"Remove {wanted}?", err=True):
        return
    removed = clean(name)
    if as_json:
        _print_json([vars(entry) for entry in removed])
    else:
        click.echo(f"removed {counted(len(removed), 'build')}, {sum(entry.bytes for entry in removed) / 2**20:.1f} MiB")


@command.command()
@click.argument("suites", nargs=-1, type=click.Choice(SUITES))
@_json
@click.option(
    "--plot", "plots_folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Draw into DIR too."
)
def bench(suites: tuple[str, ...], as_json: bool, plots_folder: Path | None) -> None:
    """Times what this package does beside what one would use otherwise.

    \b
    A ratio is ours / baseline, from pairs taken by turns: below 1 is faster. "noise" means that the
    95 % interval of the ratio encloses 1. --plot needs matplotlib, and writes pictures of the bandwidth over
    the size of a tensor beside that of a bare copy (bandwidth_cpu.svg, bandwidth_cuda.svg) and of the times
    of everything else (times.svg), of what was measured; each file is named on stderr.

    \b
    Example:
      identity-conv bench operator
    """
    from . import bench as benchmarks
    from . import plots, progress

    if plots_folder:
        plots.check(plots_folder)

    found = []
    try:
        for suite in suites or SUITES:
            for each in benchmarks.run(suite):
                found.append(each)
                progress.step(f"{suite}: {each.name}: {each.ratio:.3f} of {each.baseline}")
    finally:  # interrupted, too: what was measured took minutes
        if found:
            _tell(benchmarks.record(found), as_json, plots_folder)


def _tell(record: dict[str, Any], as_json: bool, plots_folder: Path | None) -> None:
    """Prints a record of bench, and draws it where a folder is given."""
    from rich.table import Table

    from . import bench as benchmarks
    from . import plots, progress

    if plots_folder:
        for picture in plots.save(record, plots_folder):
            progress.say(f"wrote {picture}")
    if as_json:
        _print_json(record)
        return
    rows = [benchmarks.cells(each) for each in record["comparisons"]]
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*row.values())
    _console().print(benchmarks.heading(record))
    _console().print(table)


def _print_json(document: Any) -> None:
    """Prints one document; a path in it is written as text."""
    import json

    click.echo(json.dumps(document, indent=1, default=os.fspath))


def _console() -> Console:
    """Where tables go: as wide as the terminal, and in a pipe wide enough that a row stays a line."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE, soft_wrap=True)


@contextmanager
def reporting(name: str) -> Iterator[None]:
    """Prints an error that has a reason as one sentence of the command `name`, and ends the process."""
    try:
        yield
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(FAILED)


def main() -> None:
    """Runs the command."""
    with reporting("identity-conv"):
        command(prog_name="identity-conv")
