"""One call looked at from every side: values, strides, memory, what it leaves of its inputs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from . import draws, memory
from .call import Call
from .compare import Comparison, dense, raw
from .isolation import Blackboard
from .plan import TensorPlan
from .report import Violation
from .shrink import shrink
from .subject import Subject

_GUARD = 256  # bytes around inputs
_KEPT = 8  # outputs of earlier calls that are held, to see whether a later one shares their memory
_KEPT_BYTES = 1 << 20
_EXPLAINED = 12  # findings of one kind in a stage that are shrunk, in search of what else is wrong


@dataclasses.dataclass(frozen=True)
class Finding:
    """A property that one call violates."""

    check: str
    sentence: str


class Refused(Exception):
    """The reference refuses the call, so that nothing is expected of the operator."""


@dataclasses.dataclass
class Settings:
    """How an operator is checked; the same for every check and device."""

    subject: Subject
    compare: Comparison
    tier: str
    seed: int
    skip: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    left_out: tuple[torch.dtype, ...] = ()  # dtypes that the author excludes and the reference takes
    given_calls: tuple[Call, ...] | None = None
    with_hypothesis: bool = False
    limit: float = 5.0  # seconds that a small call may take

    @property
    def full(self) -> bool:
        return self.tier != "quick"

    def allows(self, smaller: Call, *, instead_of: Call) -> bool:
        """Whether one call may be shrunk to another: calls that were given say nothing of other sizes."""
        return self.given_calls is None or [p.shape for p in smaller.plans] == [p.shape for p in instead_of.plans]


class Bench:
    """Where one stage's calls are made, on one device, in a child process.

    Args:
        emit: takes each thing to tell: a Violation, a note, a Tally.
    """

    class Tally(NamedTuple):
        """How many calls a stage made, in how many seconds, and how often it reached each (dtype, layout)."""

        cases: int
        seconds: float
        cells: dict[tuple[str, str], int]

    def __init__(self, settings: Settings, check: str, device: str, board: Blackboard, emit: Callable[[Any], None]):
        self.settings, self.check, self.device = settings, check, device
        self.subject, self.compare, self.full = settings.subject, settings.compare, settings.full
        self._board, self._emit = board, emit
        self._seen: set[tuple[str, str]] = set()
        self._kept: list[tuple[int, int, torch.Tensor]] = []
        self._explained: collections.Counter[str] = collections.Counter()
        self._poison = 0
        self.cases = 0
        self.latest: Call | None = None
        self.index: int | None = 0  # of the call; where to go on from after a death, None for nowhere
        self.cells: dict[tuple[str, str], int] = {}
        self._allocations: memory.Allocations | memory.DeviceAllocations
        if device == "cpu":
            self._allocations = memory.Allocations(memory.guarded_allocator(build=False)[0])
        else:
            self._allocations = memory.DeviceAllocations(device)

    # What is told.

    def violate(self, check: str, sentence: str, call: Call | None = None) -> None:
        """Tells a violation, once for each check and kind of sentence."""
        if check in self.settings.skip:
            return
        self._emit(Violation(check, sentence, self.device, call))

    def tell(self, note: str) -> None:
        """Tells what is no violation and yet worth knowing."""
        self._emit(note)

    def about_to(self, call: Call | str | None, limit: float | None = None) -> None:
        """Says what comes next, in case this process doesn't outlive it, and counts it."""
        self.cases += 1
        self.latest = call if isinstance(call, Call) else None
        self._board.note((self.index, call), limit)
        if isinstance(call, Call):
            for plan in call.plans:
                for kind in plan.kinds:
                    if kind in ("dense", *draws.LAYOUTS):
                        cell = (str(plan.dtype).removeprefix("torch."), kind)
                        self.cells[cell] = self.cells.get(cell, 0) + 1

    def end_if_broken(self, error: BaseException) -> None:
        """Ends this process if `error` has left CUDA unusable, as an illegal access does; its parent goes on."""
        if self.device == "cpu" or "CUDA" not in str(error) or not self._board.isolated:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as broken:
            self.end(describe(broken))

    def end(self, why: str) -> None:
        """Ends this process, where it is one of its own: what comes next gets a new one."""
        if self._board.isolated:
            print(why, file=sys.stderr, flush=True)
            os._exit(1)

    # Calls.

    @property
    def _passed_over(self) -> frozenset[str]:
        """Checks that are skipped; wrong values may turn out to be of any of three."""
        of_values = {"values", "layout", "sizes"}
        return self.settings.skip if of_values <= self.settings.skip else self.settings.skip - {"values"}

    def new_findings(self, call: Call) -> list[Finding]:
        """What a call violates of the checks that have no violation yet."""
        told = {check for check, _ in self._seen}
        if told & {"values", "layout", "sizes"}:
            told |= {"values"}
        return [each for each in self._quietly(call) if each.check not in told | self._passed_over]

    def look_at(self, calls: Sequence[Call] | Iterator[Call], *, start: int = 0) -> None:
        """Examines each call; what is found is shrunk and told, the first of each check."""
        for index, call in enumerate(calls):
            if index < start:
                continue
            self.index = index
            for finding in self.examine(call):
                if finding.check in self._passed_over or self._explained[finding.check] == _EXPLAINED:
                    continue
                self._explained[finding.check] += 1
                self._tell_shrunk(finding, call)

    def _tell_shrunk(self, finding: Finding, call: Call) -> None:
        check, call, sentence = self.explain(finding, call)
        if any(found == check for found, _ in self._seen):
            return
        self._seen.add((check, sentence))
        self.violate(check, sentence, call)

    def explain(self, finding: Finding, call: Call) -> tuple[str, Call, str]:
        """The check that a finding speaks of, the shrunk call and its sentence."""
        if any(found == finding.check for found, _ in self._seen) and finding.check not in (
            "values",
            "layout",
            "sizes",
        ):
            return finding.check, call, finding.sentence
        again = [each for each in self._quietly(call) if each.check == finding.check]
        if not again:
            return "deterministic", call, f"{finding.sentence}; the same call again was right"
        if finding.check == "values" and any(found in ("values", "layout", "sizes") for found, _ in self._seen):
            seconds = 0.3
        else:
            seconds = 1.5 if self.full else 0.3

        def fails(candidate: Call) -> bool:
            if not self.settings.allows(candidate, instead_of=call):
                return False
            return any(each.check == finding.check for each in self._quietly(candidate))

        small = shrink(call, fails, seconds=seconds)
        found = next((each for each in self._quietly(small) if each.check == finding.check), finding)
        return self._name(found.check, small), small, found.sentence

    def _name(self, check: str, call: Call) -> str:
        """Wrong values by what they need: a layout, a size, or nothing."""
        if check != "values":
            return check
        plans = [dataclasses.replace(plan, grad="none") for plan in call.plans]
        if any(plan.kinds[0] != "dense" for plan in plans):
            regular = [TensorPlan(plan.shape, plan.dtype, seed=plan.seed, grad=plan.grad) for plan in call.plans]
            if not any(each.check == "values" for each in self._quietly(call.replace(regular))):
                return "layout"
        if any(plan.cells for plan in plans):
            bare = [dataclasses.replace(plan, cells=()) for plan in plans]
            if not any(each.check == "values" for each in self._quietly(call.replace(bare))):
                return "values"
        if any(plan.numel == 0 or not plan.shape or len(plan.shape) > 4 or plan.numel > 64 for plan in plans):
            usual = [
                dataclasses.replace(TensorPlan((3,), plan.dtype, seed=plan.seed), grad=plan.grad) for plan in call.plans
            ]
            if not any(each.check == "values" for each in self._quietly(call.replace(usual))):
                return "sizes"
        return "values"

    def _quietly(self, call: Call) -> list[Finding]:
        try:
            return list(self.examine(call))
        except Exception as error:  # a candidate of the shrinker's that can't be called
            self.end_if_broken(error)
            return []

    def examine(self, call: Call) -> Iterator[Finding]:
        """What is wrong with one call, by the name of its check."""
        self.about_to(call)
        self._poison ^= 1
        poison = memory.POISONS[self._poison]
        if call.shared:
            built = []
            args, kwargs = call.build(self.device)
            inputs = tensors_in((args, kwargs))
        else:
            built = [plan.build_guarded(self.device, guard=_GUARD, poison=poison ^ 0xFF) for plan in call.plans]
            inputs = [each.tensor for each in built]
            args, kwargs = call.fill(inputs)
        inference = any(plan.grad == "inference" for plan in call.plans)
        with torch.inference_mode(inference):
            try:
                expected = self.expected(args, kwargs) if not self.subject.writes else self._written(call)
            except Refused:
                return
            with torch.no_grad():
                before = [each.base.clone() for each in built]
            versions = [None if each.tensor.is_inference() else each.tensor._version for each in built]
            try:
                with self._allocations.active(
                    poison, [each.untyped_storage().nbytes() for each in tensors_in(expected)]
                ):
                    actual = self.subject.run(args, kwargs)
            except Exception as error:
                self.end_if_broken(error)
                yield Finding("accepts", f"raised {describe(error)}, which the reference takes")
                return
            with torch.no_grad():
                yield from self._compare(actual, expected, poison)
                yield from self._untouched(built, before, versions)
                if where := self._allocations.look(tensors_in(actual)):
                    yield Finding("bounds", f"wrote {where} that it allocated")
                yield from self._alias(actual, inputs)

    def _written(self, call: Call) -> Any:
        """What the reference gives on inputs of its own, which it may write into."""
        args, kwargs = call.build(self.device)
        try:
            return self.subject.expect(args, kwargs)
        except Exception as error:
            raise Refused(str(error)) from error

    def expected(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The reference's result, in memory of its own.

        Raises:
            Refused: it raises.
        """
        try:
            expected = self.subject.expect(args, kwargs)
        except Exception as error:
            raise Refused(str(error)) from error
        shared = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        return pytree.tree_map(
            lambda leaf: (
                leaf.detach().clone()
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in shared
                else leaf
            ),
            expected,
        )

    def _compare(self, actual: Any, expected: Any, poison: int) -> Iterator[Finding]:
        got, want = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
        if len(got) != len(want):
            yield Finding("values", f"gave {len(got)} outputs, the reference {len(want)}")
            return
        for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            which = f"output {index}: " if len(got) > 1 else ""
            if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
                if type(mine) is not type(theirs) or (mine != theirs and mine == mine):
                    yield Finding("values", f"{which}expected {theirs!r}, got {mine!r}")
                continue
            differences = list(metadata(mine, theirs))
            for check, text in differences:
                yield Finding(check, which + text)
            if any(check in ("dtype", "values") for check, _ in differences):
                continue
            if wrong := self.compare(mine, theirs):
                check = "written" if _shows(mine, theirs, poison) else "values"
                if check == "written":
                    wrong += "; the cells that differ hold what memory held before"
                yield Finding(check, which + wrong)

    def _untouched(
        self, built: Sequence[Any], before: Sequence[torch.Tensor], versions: Sequence[int | None]
    ) -> Iterator[Finding]:
        if self.subject.aliases:
            return
        for each, old, version in zip(built, before, versions, strict=True):
            if not torch.equal(each.base, old):
                at = int((each.base != old).to(torch.uint8).argmax())
                if at < each.start:
                    yield Finding("bounds", f"wrote {each.start - at} bytes before its input")
                elif at >= each.stop:
                    yield Finding("bounds", f"wrote {at - each.stop} bytes behind its input")
                elif _in_cells(each, at):
                    yield Finding("inputs_untouched", f"changed its input, at byte {at - each.start} of the storage")
                else:
                    yield Finding(
                        "bounds", f"wrote between its input's cells, at byte {at - each.start} of the storage"
                    )
            elif version is not None and each.tensor._version != version:
                yield Finding("inputs_untouched", "raised its input's version: autograd takes it for changed")

    def _alias(self, actual: Any, inputs: Sequence[torch.Tensor]) -> Iterator[Finding]:
        if self.subject.aliases:
            return
        taken = [(*extent(tensor), "an input") for tensor in inputs if tensor.numel()]
        for start, stop, _ in self._kept:
            taken.append((start, stop, "the output of an earlier call"))
        fresh = []
        for output in tensors_in(actual):
            if not output.numel():
                continue
            start, stop = extent(output)
            for low, high, whose in taken:
                if start < high and low < stop:
                    yield Finding("alias", f"an output shares memory with {whose}")
                    break
            taken.append((start, stop, "another output"))
            if stop - start <= _KEPT_BYTES:
                fresh.append((start, stop, output))
        self._kept = (self._kept + fresh)[-_KEPT:]


def name_by_need(call: Call) -> str:
    """The check that a shrunk call which fails altogether speaks of: by what it still has."""
    if any(plan.numel == 0 or not plan.shape or len(plan.shape) > 4 or plan.numel > 64 for plan in call.plans):
        return "sizes"
    return "layout" if any(plan.kinds[0] != "dense" for plan in call.plans) else "values"


def metadata(mine: torch.Tensor, theirs: torch.Tensor) -> Iterator[tuple[str, str]]:
    """Differences of dtype, device, shape and strides, each with its check's name."""
    if mine.dtype != theirs.dtype:
        yield "dtype", f"expected {theirs.dtype}, got {mine.dtype}"
    if mine.device != theirs.device:
        yield "dtype", f"expected device {theirs.device}, got {mine.device}"
    if mine.layout != theirs.layout:
        yield "values", f"expected layout {theirs.layout}, got {mine.layout}"
    elif mine.shape != theirs.shape:
        yield "values", f"expected shape {tuple(theirs.shape)}, got {tuple(mine.shape)}"
    elif strides_differ(mine, theirs):
        yield "strides", f"expected strides {tuple(theirs.stride())}, got {tuple(mine.stride())}"


def strides_differ(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether strides differ where they mean something."""
    if theirs.numel() == 0:
        return False
    return any(
        size > 1 and got != want for size, got, want in zip(theirs.shape, mine.stride(), theirs.stride(), strict=True)
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor's storage spans."""
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def describe(error: BaseException) -> str:
    """An error's type and first line, or that it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0][:300] if lines else ""
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} without a text"


@contextlib.contextmanager
def timed(into: Callable[[float], None]) -> Iterator[None]:
    """Tells how long the block took."""
    start = time.perf_counter()
    yield
    into(time.perf_counter() - start)


def _shows(mine: torch.Tensor, theirs: torch.Tensor, poison: int) -> bool:
    """Whether every byte that differs is what new memory was filled with."""
    if mine.device.type == "meta" or not mine.numel():
        return False
    got, want = raw(dense(mine)), raw(dense(theirs))
    differ = got != want
    return bool(differ.any()) and bool((got[differ] == poison).all())


def _in_cells(guarded: Any, at: int) -> bool:
    """Whether byte `at` of the base belongs to a cell of the tensor."""
    tensor = guarded.tensor
    mark = torch.zeros(guarded.stop - guarded.start, dtype=torch.uint8, device=tensor.device)
    bytes_of = mark.as_strided(
        (*tensor.shape, tensor.element_size()),
        (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
        tensor.storage_offset() * tensor.element_size(),
    )
    bytes_of.fill_(1)
    return bool(mark[at - guarded.start])
