"""The score of a checker: which mutants it catches, for the right reason or another, and its false alarms."""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from ...wording import counted
from .. import isolation
from ..checking import check_op
from ..classes import check_class
from ..registry import POINTWISE
from ..report import CheckFailure, Report
from .kernels import Kernel
from .table import MUTANTS, RIGHT

_LIMIT_S = 120.0  # for another checker with one kernel


@dataclass(frozen=True)
class Verdict:
    """What a checker says of a kernel.

    Attributes:
        checks: what it complains of, in the names of ``check_op``'s checks; none where it is content.
        calls: how many calls of the kernel it looked at, where it knows.
        died: how it ended its process, or an empty text: a complaint, with no reason given.
    """

    checks: tuple[str, ...] = ()
    calls: int = 0
    died: str = ""

    @property
    def complains(self) -> bool:
        return bool(self.checks or self.died)


#: Looks at a kernel, drawing whatever it draws from a seed.
Checker = Callable[[Kernel, int], Verdict]


@dataclass(frozen=True)
class Outcome:
    """A verdict on one kernel."""

    kernel: Kernel
    verdict: Verdict
    seconds: float

    @property
    def has_right_reason(self) -> bool:
        """Whether the complaint has one of the checks that the bug is of."""
        return bool({*self.verdict.checks} & {*self.kernel.checks})


@dataclass(frozen=True)
class Score:
    """How a checker did.

    Attributes:
        checker: its name.
        outcomes: one for each mutant, and one for each look at a right kernel.
    """

    checker: str
    outcomes: tuple[Outcome, ...]

    def _of(self, right: bool) -> list[Outcome]:
        return [each for each in self.outcomes if each.kernel.is_right is right]

    @property
    def mutants(self) -> int:
        return len(self._of(right=False))

    @property
    def caught(self) -> int:
        return self.mutants - len(self.missed)

    @property
    def missed(self) -> list[str]:
        """Mutants of which it says nothing."""
        return [each.kernel.name for each in self._of(right=False) if not each.verdict.complains]

    @property
    def for_another_reason(self) -> list[str]:
        """Mutants that are caught, with a complaint that names no fitting check."""
        caught = [each for each in self._of(right=False) if each.verdict.complains]
        return [each.kernel.name for each in caught if not each.has_right_reason]

    @property
    def right_reason(self) -> int:
        return self.caught - len(self.for_another_reason)

    @property
    def false_alarms(self) -> list[str]:
        """Right kernels of which it complains."""
        return list(dict.fromkeys(each.kernel.name for each in self._of(right=True) if each.verdict.complains))

    @property
    def right(self) -> int:
        """How many right kernels it was shown."""
        return len({each.kernel.name for each in self._of(right=True)})

    @property
    def calls(self) -> int:
        """How many calls of right kernels it looked at, where it knows."""
        return sum(each.verdict.calls for each in self._of(right=True))

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.outcomes)

    def __add__(self, other: Score) -> Score:
        """The score over both parts of the kernels."""
        return Score(self.checker, self.outcomes + other.outcomes)

    def __str__(self) -> str:
        lines = [
            f"{self.checker}: caught {self.caught} of {self.mutants}, for the right reason {self.right_reason}, "
            f"false alarms {len(self.false_alarms)} of {self.right} in {counted(self.calls, 'call')}, "
            f"{self.seconds:.0f} s"
        ]
        for title, names in (
            ("missed", self.missed),
            ("for another reason", self.for_another_reason),
            ("false alarms", self.false_alarms),
        ):
            if names:
                lines.append(f"  {title}: {', '.join(names)}")
        return "\n".join(lines)

    def record(self, device: str = "cpu") -> dict[str, Any]:
        """What is kept of it, as JSON takes it."""
        machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
        return {
            "checker": self.checker,
            "device": device,
            "machine": machine,
            "torch": torch.__version__.split("+")[0],
            "mutants": self.mutants,
            "caught": self.caught,
            "right_reason": self.right_reason,
            "missed": self.missed,
            "for_another_reason": self.for_another_reason,
            "right": self.right,
            "false_alarms": self.false_alarms,
            "calls": self.calls,
            "seconds": round(self.seconds),
        }


def kill_score(
    checker: Checker,
    kernels: Iterable[Kernel] | None = None,
    *,
    device: str = "cpu",
    seeds: int = 1,
    processes: int = 0,
    progress: Callable[[Outcome], None] | None = None,
) -> Score:
    """Runs a checker over mutants and right kernels, and prints what it caught.

    Args:
        checker: such as `checked`, `opcheck`, `make_tensor_and_gradcheck`, or one of your own.
        kernels: by default all of `device`, but for those that need what this machine hasn't got.
        device: "cpu" or "cuda".
        seeds: how often each right kernel is looked at, each time with another seed.
        processes: how many work at once, fresh ones to which `checker` is pickled; 0 for this one alone.
        progress: called with each outcome as it comes.

    Example::

        def sums(kernel, seed):
            op = kernel.get()
            return Verdict(("values",) if op(torch.ones(9)).sum() != 9 else ())

        kill_score(sums)
    """
    if kernels is None:
        kernels = [each for each in (*MUTANTS, *RIGHT) if each.device == device and has(each.needs)]
    looks = [(checker, kernel, seed) for kernel in kernels for seed in range(seeds if kernel.is_right else 1)]
    for _, kernel, _ in looks:
        kernel.get()  # built before the clock runs
    outcomes: dict[int, Outcome] = {}
    with contextlib.ExitStack() as stack:
        work: Iterator[tuple[int, Outcome]] = ((index, _look(*look)) for index, look in enumerate(looks))
        if processes:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context))
            # The longest first.
            order = sorted(range(len(looks)), key=lambda index: looks[index][1].tier == "quick")
            begun = {pool.submit(_look, *looks[index]): index for index in order}
            work = ((begun[done], done.result()) for done in as_completed(begun))
        for index, outcome in work:
            outcomes[index] = outcome
            if progress:
                progress(outcome)
    score = Score(
        getattr(checker, "title", getattr(checker, "__name__", repr(checker))),
        tuple(outcomes[index] for index in sorted(outcomes)),
    )
    print(score)
    return score


def _look(checker: Checker, kernel: Kernel, seed: int) -> Outcome:
    kernel.get()  # loaded before the clock runs
    began = time.perf_counter()
    return Outcome(kernel, checker(kernel, seed), time.perf_counter() - began)


def has(needs: str) -> bool:
    """Whether this machine has what a mutant needs."""
    number, _, what = needs.partition(" ")
    if what == "GPUs":
        return torch.cuda.device_count() >= int(number)
    if what == "GPU-GiB":
        return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >> 30 >= int(number)
    if what == "GiB":
        with open("/proc/meminfo") as meminfo:
            free = next(int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable"))
        return free >> 20 >= int(number)
    return True


def checked(kernel: Kernel, seed: int) -> Verdict:
    """``check_op`` or ``check_class``, at the tier at which the bug can show; a right kernel at tier quick."""
    options: dict[str, Any] = {
        "compare": kernel.compare, "tier": kernel.tier, "seed": seed, "skip": kernel.skip, "devices": [kernel.device],
    }  # fmt: skip
    try:
        report: Report
        if kernel.is_class:
            report = check_class(kernel.get(), "forward", kernel.reference, **options)
        else:
            report = check_op(kernel.get(), kernel.reference, **options)
    except CheckFailure as failure:
        report = failure.report
    return Verdict(tuple(dict.fromkeys(each.check for each in report.violations)), _calls(report))


def _calls(report: Report) -> int:
    """Calls, each counted once though several checks look at it."""
    together = [run.cases for run in report.runs if run.check in POINTWISE]
    return max(together, default=0) + sum(run.cases for run in report.runs if run.check not in POINTWISE)


checked.title = "check_op, check_class"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class InChild:
    """A checker that may end its process: it works in one of its own.

    Attributes:
        title: its name.
        function: gives the names of the checks that it complains of.
    """

    title: str
    function: Callable[[Kernel, int], Sequence[str]]

    def __call__(self, kernel: Kernel, seed: int) -> Verdict:
        how = isolation.how_for(kernel.device)
        for _, told in isolation.run([(kernel, seed)], _Perform(self.function), how=how, limit=_LIMIT_S):
            if isinstance(told, isolation.Death):
                return Verdict(died=told.how)
            return Verdict(tuple(dict.fromkeys(told)))
        return Verdict()


@dataclass(frozen=True)
class _Perform:
    function: Callable[[Kernel, int], Sequence[str]]

    def __call__(self, task: tuple[Kernel, int], board: isolation.Blackboard, tell: Callable[[Any], None]) -> None:
        board.note(limit=_LIMIT_S)
        tell(self.function(*task))


#: What each of opcheck's tests is about.
_ABOUT = {
    "test_schema": ("inputs_untouched", "alias"),
    "test_autograd_registration": ("grad",),
    "test_faketensor": ("fake", "strides", "dtype"),
    "test_aot_dispatch_dynamic": ("symbolic", "compile", "grad"),
}


def _opcheck(kernel: Kernel, seed: int) -> list[str]:
    """``torch.library.opcheck`` on samples such as its documentation has; it takes no classes."""
    op = _overload(kernel)
    if op is None:
        return []
    torch.manual_seed(seed)
    found: list[str] = []
    device = kernel.device
    for x in (
        torch.randn(3, device=device),
        torch.randn(20, requires_grad=True, device=device),
        torch.randn(4, 5, device=device).t(),
        torch.randn(2, 3, 4, requires_grad=True, device=device),
        torch.arange(6, device=device),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results = torch.library.opcheck(op, _arguments(op, x), raise_exception=False)
            except Exception:
                found.append("accepts")
                continue
        found += [name for test, result in results.items() if result != "SUCCESS" for name in _ABOUT[test]]
    return found


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def _make_tensor_and_gradcheck(kernel: Kernel, seed: int) -> list[str]:
    """Samples of ``torch.testing.make_tensor`` in every dtype, dense or not, and torch's numerical derivatives."""
    op = _overload(kernel)
    if op is None:
        return []
    torch.manual_seed(seed)
    found: list[str] = []
    for dtype in _DTYPES:
        for shape in ((), (0,), (1,), (5,), (3, 4), (2, 3, 4), (64, 65)):
            for noncontiguous in (False, True):
                x = torch.testing.make_tensor(shape, dtype=dtype, device=kernel.device, noncontiguous=noncontiguous)
                found += _difference(op, kernel.reference, _arguments(op, x), dense=x.is_contiguous())
    x = torch.testing.make_tensor((2, 3), dtype=torch.float64, device=kernel.device, requires_grad=True)
    args = _arguments(op, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, holds in (
            ("grad", lambda: torch.autograd.gradcheck(op, args)),
            ("forward_ad", lambda: torch.autograd.gradcheck(op, args, check_forward_ad=True, check_backward_ad=False)),
            ("second_order", lambda: torch.autograd.gradgradcheck(op, args)),
        ):
            if name not in found and not _passes(holds):
                found.append(name)
    return found


def _hypothesis_torch(kernel: Kernel, seed: int) -> list[str]:
    """A hundred tensors that hypothesis-torch draws."""
    import hypothesis
    from hypothesis import strategies
    from hypothesis_torch import tensor_strategy

    op = _overload(kernel)
    if op is None:
        return []
    found: list[str] = []
    tensors = tensor_strategy(
        dtype=strategies.sampled_from(_DTYPES),
        shape=strategies.lists(strategies.integers(0, 20), max_size=4).map(tuple),
        device=torch.device(kernel.device),
        requires_grad=False,
        layout=torch.strided,
    )

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=100,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(tensors)
    def look(x: torch.Tensor) -> None:
        found.extend(_difference(op, kernel.reference, _arguments(op, x), dense=x.is_contiguous()))

    look()
    return found


opcheck = InChild("torch.library.opcheck, usual samples", _opcheck)
make_tensor_and_gradcheck = InChild("make_tensor with assert_close, gradcheck", _make_tensor_and_gradcheck)
#: Where it is installed.
hypothesis_torch = InChild("hypothesis-torch with assert_close", _hypothesis_torch)


def _difference(op: Any, reference: Callable[..., Any], args: tuple[Any, ...], *, dense: bool) -> list[str]:
    try:
        expected = reference(*args)
    except Exception:  # it has no such dtype
        return []
    try:
        actual = op(*args)
    except Exception:
        return ["accepts", "sizes"]
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except AssertionError as error:
        if "dtype" in str(error):
            return ["dtype"]
        return ["values", "sizes", "written"] if dense else ["layout"]
    return []


def _passes(holds: Callable[[], bool]) -> bool:
    with contextlib.suppress(Exception):
        return holds()
    return False


def _overload(kernel: Kernel) -> Any:
    """The operator's only overload, or its default one; None of a class."""
    return None if kernel.is_class else kernel.get().default


def _arguments(op: Any, x: torch.Tensor) -> tuple[Any, ...]:
    """`x` for the first tensor that must be given, others like it for the next ones, and usual numbers."""
    needed = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    first = next(argument for argument in needed if isinstance(argument.type, torch.TensorType))
    return tuple(
        x if argument is first else _like(x) if str(argument.type) == "Tensor" else _USUAL[str(argument.type)]
        for argument in needed
    )


_USUAL: dict[str, Any] = {"float": 2.0, "int": 2, "bool": True, "List[int]": [0]}


def _like(x: torch.Tensor) -> torch.Tensor:
    other = torch.testing.make_tensor(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_like(x).copy_(other).requires_grad_(x.requires_grad)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Records as a table in Markdown."""
    head = (
        "device", "checker", "caught", "for the right reason", "missed", "false alarms", "calls of right kernels", "s",
    )  # fmt: skip
    rows = [
        (
            record["device"],
            record["checker"],
            f"{record['caught']} of {record['mutants']}",
            str(record["right_reason"]),
            str(len(record["missed"])),
            f"{len(record['false_alarms'])} of {record['right']}",
            f"{record['calls']:,}".replace(",", " ") if record["calls"] else "",
            str(record["seconds"]),
        )
        for record in records
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))
