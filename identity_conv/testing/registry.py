"""The checks: each has a name that a report and `skip` speak of, and a function that looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .examine import Bench

#: Every check by name, with what it asks for.
CHECKS: dict[str, str] = {
    "values": "the reference's values, compared as `compare` says, in every autograd mode and context",
    "layout": "the same values from every layout of the same numbers",
    "sizes": "empty, 0-d and rank-8 tensors, edges of tiles, more than 65 536 and more than 2^31 elements",
    "strides": "the reference's strides, where a size is more than 1",
    "dtype": "the reference's dtype and device",
    "accepts": "whatever the reference takes is taken",
    "refuses": "what is left out by `dtypes`, or not dense, is taken rightly or refused with a text",
    "inputs_untouched": "inputs are as they were",
    "alias": "no output shares memory with an input, an earlier output or another output",
    "bounds": "nothing beside inputs and outputs is read or written",
    "written": "every cell of the output is written",
    "deterministic": "the same call gives the same bits",
    "no_memory": "earlier calls leave no trace",
    "threads": "calls from several threads, and several threads in a call, give what one gives",
    "leak": "memory is given back",
    "fake": "the fake says the real output's sizes, strides, dtype and device, and shares no memory",
    "symbolic": "the fake leaves symbolic sizes symbolic",
    "opcheck": "torch.library.opcheck holds",
    "grad": "the reference's gradient, for every layout of the gradient that comes in",
    "second_order": "the reference's second derivative",
    "forward_ad": "the reference's forward-mode derivative",
    "func": "the reference's results under the transforms of torch.func",
    "vmap": "the reference's results under torch.vmap",
    "compile": "values and gradients under torch.compile as in eager",
    "export": "an exported program, and the same one saved and loaded, gives the eager values",
    "aoti": "a package compiled by AOTInductor gives the eager values, in Python and without",
    "dtensor": "sharded and replicated inputs give the eager values",
    "stream": "work on a side stream waits for what was queued there before",
    "two_streams": "calls on two streams at once don't disturb each other",
    "device_guard": "a tensor of another device than the current one is computed there",
    "capture": "the operator can be captured in a CUDA graph and replayed",
    "launch_errors": "a call leaves no CUDA error behind",
    "no_sync": "a call doesn't wait for the GPU",
    "state": "pickle, deepcopy, flattening and an archive keep the state",
    "traced": "tracing changes nothing of an object",
}  # fmt: skip

TIERS = ("quick", "full", "aoti", "dtensor", "huge")

#: What every call is looked at for.
POINTWISE = (
    "values", "layout", "sizes", "strides", "dtype", "accepts", "inputs_untouched", "alias", "bounds", "written",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A function that looks, and the checks that it looks for.

    Attributes:
        look: takes a Bench, and how many calls to pass over after one ended the process.
        checks: the first is what a death is told under.
        tiers: those at which it runs.
        devices: device types.
        of: "op", "class" or both.
        death: what a death means here, in front of how it came.
    """

    look: Callable[[Bench, int], None]
    checks: tuple[str, ...]
    tiers: tuple[str, ...]
    devices: tuple[str, ...]
    of: tuple[str, ...] = ("op",)
    death: str = ""

    @property
    def name(self) -> str:
        return self.look.__name__


STAGES: dict[str, Stage] = {}

#: For operators and for classes.
BOTH = ("op", "class")
_EVERY_TIER = TIERS
_FROM_FULL = TIERS[1:]


def stage(
    *checks: str,
    quick: bool = True,
    tiers: tuple[str, ...] | None = None,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    of: tuple[str, ...] = ("op",),
    death: str = "",
) -> Callable[[Callable[[Bench, int], None]], Callable[[Bench, int], None]]:
    """Registers a function that looks for `checks`.

    Args:
        quick: whether it runs at tier quick too.
        tiers: the tiers, where they are others than quick (if so) and all above.
        of: whether for operators, classes, or both.
        death: what a death means here, in front of how it came.
    """

    def register(look: Callable[[Bench, int], None]) -> Callable[[Bench, int], None]:
        unknown = [check for check in checks if check not in CHECKS]
        assert not unknown, unknown
        chosen = tiers or (_EVERY_TIER if quick else _FROM_FULL)
        STAGES[look.__name__] = Stage(look, checks, chosen, devices, of, death)
        return look

    return register
