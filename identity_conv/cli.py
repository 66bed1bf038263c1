"""The command ``identity-conv``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import __version__, settings

#: Exit statuses, as ``--help`` tells them.
FAILED = 1

_SETTINGS = "\n".join(f"  {each.name}  {each.meaning} (default: {each.default})" for each in settings.ALL)


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
def demo(out: Path) -> None:
    """Takes the worked example the whole road and compares at every step.

    \b
    Builds the library, runs the model, exports it and prints the graph, compiles a package, loads it
    in Python, builds and runs the program without Python on the same input.

    \b
    Example:
      identity-conv demo --out /tmp/model.pt2
    """
    from . import demo as road

    if not road.run(out):
        sys.exit(FAILED)


@command.command()
@click.option(
    "--prefix",
    type=click.Path(file_okay=False, path_type=Path),
    help="Lay the files down in this folder (bin, lib, include) for IDENTITY_CONV_PREFIX.",
)
def build(prefix: Path | None) -> None:
    """Builds everything ahead of time: operator library, Python binding, program.

    \b
    Example:
      identity-conv build --prefix /opt/identity_conv
      IDENTITY_CONV_PREFIX=/opt/identity_conv python -c "import identity_conv"
    """
    from . import ahead

    for path in ahead.build(prefix):
        click.echo(path)


@command.command()
@click.argument("suites", nargs=-1, type=click.Choice(["operator", "layouts", "startup"]))
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
    for suite in suites or benchmarks.SUITES:
        for each in benchmarks.run(suite):
            found.append(each)
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


def main() -> None:
    """Runs the command; an error that has a reason is printed as one sentence."""
    try:
        command(prog_name="identity-conv")
    except (ImportError, OSError, ValueError, TypeError, RuntimeError) as error:
        click.echo(f"identity-conv: {error}", err=True)
        sys.exit(FAILED)
