"""Scores the checkers on this machine and keeps the record: ``python -m identity_conv.testing.mutants --help``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click

from .. import memory
from . import Checker, Outcome, checked, hypothesis_torch, kill_score, make_tensor_and_gradcheck, opcheck, table

_CHECKERS: dict[str, Checker] = {"checked": checked, "opcheck": opcheck, "make_tensor": make_tensor_and_gradcheck}
if importlib.util.find_spec("hypothesis_torch") is not None:
    _CHECKERS["hypothesis_torch"] = hypothesis_torch


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--checker", "names", type=click.Choice(list(_CHECKERS)), multiple=True, help="By default all.")
@click.option("--seeds", default=1, help="How often check_op looks at each right kernel.")
@click.option("--processes", default=0, help="How many work at once; 0 for this one alone.")
@click.option("--record", type=click.Path(path_type=Path), help="Where the scores are kept, in place of those there.")
def main(device: str, names: tuple[str, ...], seeds: int, processes: int, record: Path | None) -> None:
    """Prints how many mutants each checker catches, and for what reason."""
    memory.guarded_allocator(build=True)
    records = json.loads(record.read_text()) if record and record.exists() else []
    for name in names or _CHECKERS:
        checker = _CHECKERS[name]
        score = kill_score(
            checker, device=device, seeds=seeds if name == "checked" else 1, processes=processes, progress=_say
        )
        new = score.record(device)
        same = [each for each in records if (each["device"], each["checker"]) == (device, new["checker"])]
        records = [new if each in same else each for each in records] + ([] if same else [new])
        if record:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(records, indent=1) + "\n")
    print(table(records))


def _say(outcome: Outcome) -> None:
    kernel, verdict = outcome.kernel, outcome.verdict
    said = ", ".join(verdict.checks) or verdict.died or "nothing"
    print(f"{kernel.name} ({kernel.device}): {said}; {outcome.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
