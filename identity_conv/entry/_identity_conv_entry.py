"""The console script's first step, installed outside the package.

Its presence in ``sys.modules`` tells ``identity_conv`` that a command has started the process, so
that ``--help`` needs neither torch nor a build.
"""


def main() -> None:
    from identity_conv.cli import main as command

    command()


def run_program() -> None:
    """``identity-conv-run``: becomes the program without Python, which is built if need be."""
    import os
    import sys

    from identity_conv.cli import reporting

    with reporting("identity-conv-run"):
        from identity_conv import targets

        program = targets.program().build()
    os.execv(program, [str(program), *sys.argv[1:]])
