"""The console script's first step, installed outside the package.

Its presence in ``sys.modules`` tells ``identity_conv`` that a command has started the process, so
that ``--help`` needs neither torch nor a build.
"""


def main() -> None:
    from identity_conv.cli import main as command

    command()
