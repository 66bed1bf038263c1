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


def main() -> None:
    """Runs the command; an error that has a reason is printed as one sentence."""
    try:
        command(prog_name="identity-conv")
    except (ImportError, OSError, ValueError, TypeError, RuntimeError) as error:
        click.echo(f"identity-conv: {error}", err=True)
        sys.exit(FAILED)
