"""The command ``identity-conv``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from . import __version__, settings
from .bench import SUITES

#: The exit status of a command that failed with a reason.
FAILED = 1

_SETTINGS = "\n".join(f"  {each.name}  \n      {each.meaning} (default: {each.default})" for each in settings.ALL)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"\b\nEnvironment:\n{_SETTINGS}\n\n\b\n"
    "Exit status: 0 done, 1 failed with a reason on stderr, 2 wrong usage.",
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
      identity-conv demo --out /tmp/model.pt2
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
      identity-conv new my_filter --backward && cd my_filter && python -m pytest && python road.py
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
      identity-conv build --prefix /opt/identity_conv my_kernels:ext
      IDENTITY_CONV_PREFIX=/opt/identity_conv python -c "import my_kernels"
    """
    from . import ahead

    for path in ahead.build(prefix, extensions):
        click.echo(path)


@command.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect(package: Path, as_json: bool) -> None:
    """Says what PACKAGE holds and whether it can be loaded here; exits with 1 where something is fatal.

    \b
    Maps nothing of it, and needs no compiler where the runtime is built.

    \b
    Example:
      identity-conv inspect model.pt2 --json
    """
    import json

    from rich.console import Console

    from .inspection import tables
    from .package import inspect_package

    found = inspect_package(package)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        console = Console(width=180 if not sys.stdout.isatty() else None)
        for table in tables(found):
            console.print(table)
    if found["verdict"] == "fatal":
        sys.exit(FAILED)


@command.command()
@click.argument("package", type=click.Path(path_type=Path))
def verify(package: Path) -> None:
    """Runs the example that PACKAGE carries and compares with the outputs that it recorded.

    \b
    Example:
      identity-conv verify model.pt2
    """
    from .package import load_package

    click.echo(load_package(package).verify())


@command.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("inputs", type=click.Path(path_type=Path))
@click.argument("outputs", type=click.Path(file_okay=False, path_type=Path))
@click.option("--device", help="Where to run, such as cuda:1; by default the package's, and each torchrun rank's GPU.")
def run(package: Path, inputs: Path, outputs: Path, device: str | None) -> None:
    """Runs PACKAGE on every .pt file of the folder INPUTS, or on that file; the outputs go to the folder OUTPUTS.

    \b
    An input is a tensor, a list or tuple of the model's positional arguments, or a dict of those that the
    export had by keyword, as torch.save writes it. Started again it does what isn't done yet, or has
    changed since; several at once, on one host or many, share the work. OUTPUTS is for one package. An
    input that fails is named, and the others are done.

    \b
    Example:
      identity-conv run model.pt2 inputs outputs
      torchrun --nproc-per-node 8 --no-python identity-conv run model.pt2 inputs outputs
    """
    import os

    from . import batch, progress

    outcome = batch.run(package, inputs, outputs, device=device)
    rank = os.environ.get("RANK")
    progress.say(str(outcome) if rank is None else f"rank {rank}: {outcome}")


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quick", is_flag=True, help="Only look; compile and run nothing.")
def doctor(as_json: bool, quick: bool) -> None:
    """Says what works on this machine, what doesn't, and what to do; exits with 1 where something is fatal.

    \b
    Works where nothing builds, and without torch. It compiles and loads a small library and a small
    package, each in a process of its own, where a crash is a finding.
    """
    from rich.console import Console

    from . import diagnosis

    report = diagnosis.doctor(probes=not quick)
    if as_json:
        click.echo(report.json())
    else:
        Console(soft_wrap=not sys.stdout.isatty()).print(report.table())
    if not report.healthy:
        sys.exit(FAILED)


@command.group()
def cache() -> None:
    """Lists, explains and removes finished builds."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_builds(as_json: bool) -> None:
    """Lists the builds in the cache, the latest first."""
    import datetime
    import json

    from rich.console import Console
    from rich.table import Table

    from .cache import entries

    found = entries()
    if as_json:
        rows = [{**vars(entry), "folder": str(entry.folder)} for entry in found]
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table("build", "key", "MiB", "made", "finished", box=None)
    for entry in found:
        made = datetime.datetime.fromtimestamp(entry.made).strftime("%Y-%m-%d %H:%M")
        table.add_row(entry.name, entry.key, f"{entry.bytes / 2**20:.1f}", made, "yes" if entry.finished else "no")
    Console().print(table)


@cache.command("explain")
@click.argument("extension", required=False, metavar="[MODULE:EXTENSION]")
def explain_build(extension: str | None) -> None:
    """Says whether an extension is built, and else which parts changed; without one, identity_conv's own.

    \b
    Example:
      identity-conv cache explain my_kernels:ext
    """
    from . import ahead, targets
    from .extension import Extension

    explained = ahead.find_extension(extension) if extension else Extension._of(targets.operators())
    click.echo(explained.explain())


@cache.command("clean")
@click.argument("name", required=False)
@click.option("--yes", is_flag=True, help="Don't ask.")
def clean_builds(name: str | None, yes: bool) -> None:
    """Removes the builds of NAME (see `cache list`), or all; a loaded library stays mapped where it is."""
    from .cache import clean

    if not yes and sys.stdin is None:
        raise click.UsageError("nobody can be asked, since standard input is closed: give --yes")
    if not yes and not click.confirm(f"Remove {'every build' if name is None else f'the builds of {name}'}?"):
        return
    removed = clean(name)
    click.echo(f"removed {len(removed)} builds, {sum(entry.bytes for entry in removed) / 2**20:.1f} MiB")


@command.command()
@click.argument("suites", nargs=-1, type=click.Choice(SUITES))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def bench(suites: tuple[str, ...], as_json: bool) -> None:
    """Times what this package does beside what one would use otherwise.

    \b
    A ratio is ours / baseline, from pairs taken by turns: below 1 is faster. "noise" means that the
    95 % interval of the ratio encloses 1.

    \b
    Example:
      identity-conv bench operator
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from . import bench as benchmarks

    found = []
    table = Table("what", "beside", "µs", "baseline µs", "TB/s", "ratio", "95 %", "verdict", box=None)
    for suite in suites or SUITES:
        for each in benchmarks.run(suite):
            found.append(each)
            # A suite may take minutes: each line as it comes, beside the table at the end.
            click.echo(f"{suite}: {each.name}: {each.ratio:.3f} of {each.baseline}", err=True)
            bandwidth = f"{each.terabytes_per_second:.3f}" if each.terabytes_per_second else ""
            table.add_row(
                each.name,
                each.baseline,
                f"{each.ours_us:.2f}",
                f"{each.baseline_us:.2f}",
                bandwidth,
                f"{each.ratio:.3f}",
                f"{each.low:.3f} to {each.high:.3f}",
                each.verdict,
            )
    if as_json:
        click.echo(json.dumps(benchmarks.record(found), indent=1))
    else:
        console = Console(width=180 if not sys.stdout.isatty() else None)
        console.print(", ".join(f"{name} {fact}" for name, fact in benchmarks.machine().items()))
        console.print(table)


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
