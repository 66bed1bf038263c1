"""One call looked at from every side: values, strides, memory, what it leaves of its inputs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..wording import counted
from . import draws, memory
from .call import Call, tensors_in
from .compare import Comparison, dense, raw, same_bytes
from .isolation import Blackboard
from .plan import Guarded, SharedStorage, TensorPlan
from .report import Violation
from .shrink import shrink
from .subject import Subject

_GUARD = 256  # bytes around inputs
_KEPT = 8  # outputs of earlier calls that are held, to see whether a later one shares their memory
_KEPT_BYTES = 1 << 20
_LOOKING_S = 60.0  # for what is our own work, and the reference's, at one call
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
    # Of integers by name, those beyond 32 bits to look at.
    large: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
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

    def numbered(self, calls: Iterable[Call], start: int) -> Iterator[Call]:
        """The calls from number `start` on: after one that ends the process it goes on behind it."""
        for index, call in enumerate(calls):
            if index >= start:
                self.index = index
                yield call

    def each(self, calls: Iterable[Call], start: int, limit: float | None = None) -> Iterator[Call]:
        """The calls from number `start` on, each noted as what comes next; `limit` in seconds."""
        for call in self.numbered(calls, start):
            self.about_to(call, limit)
            yield call

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

    def look_at(self, calls: Iterable[Call], *, start: int = 0) -> None:
        """Examines each call; what is found is shrunk and told, the first of each check."""
        for call in self.numbered(calls, start):
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

        small = shrink(call, fails, fit=self.subject.fit, seconds=seconds)
        found = next((each for each in self._quietly(small) if each.check == finding.check), finding)
        return self._name(found.check, small), small, found.sentence + self._of_dtypes(found.check, small)

    def _of_dtypes(self, check: str, call: Call) -> str:
        """What to do where the operator refuses a dtype altogether, which may be meant."""

        def takes(dtype: torch.dtype) -> bool:
            try:
                self.subject.run(*self.subject.call(TensorPlan((2, 3), dtype)).build(self.device))
            except Exception:
                return False
            return True

        if check != "accepts" or not call.plans or takes(dtype := call.plans[0].dtype):
            return ""
        taken = [each for each in self.settings.dtypes if takes(each)]
        if not taken:
            return ""
        return f"; it takes no {dtype}: if that is meant, say dtypes=[{', '.join(map(str, taken))}]"

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
            if not any(each.check == "values" for each in self._quietly(self.subject.fit(call.replace(usual)))):
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
        if self.subject.writes and self._is_lost(call):
            return
        self.about_to(call, _LOOKING_S)
        self._poison ^= 1
        poison = memory.POISONS[self._poison]
        args, kwargs, built = self._built(call, poison)
        inference = any(plan.grad == "inference" for plan in call.plans)
        with torch.inference_mode(inference):
            try:
                expected, theirs = self._expected(call, args, kwargs, poison)
            except Refused:
                return
            before = [_copied(each.base) for each in built]
            versions = [None if each.tensor.is_inference() else each.tensor._version for each in built]
            self._board.allow(self._board.limit)
            try:
                with self._allocations.active(
                    poison, [each.untyped_storage().nbytes() for each in tensors_in(expected)]
                ):
                    actual = self.subject.run(args, kwargs)
            except Exception as error:
                self.end_if_broken(error)
                yield Finding("accepts", f"raised {describe(error)}, which the reference takes")
                return
            self._board.allow(_LOOKING_S)  # it has returned: the rest is our own work
            with torch.no_grad():
                differences = list(self._compare(actual, expected, poison))
                if any(each.check == "strides" for each in differences) and self._resolved_has_strides(
                    call, args, kwargs, actual
                ):
                    differences = [each for each in differences if each.check != "strides"]
                yield from differences
                written = self.subject.written(call) if theirs else [False] * len(built)
                if not any(each.check == "values" for each in differences):
                    yield from self._written(built, theirs, written)
                yield from self._untouched(built, before, versions, written)
                if where := self._allocations.look(tensors_in(actual)):
                    yield Finding("bounds", f"wrote {where} that it allocated")
                yield from self._alias(args, kwargs, actual)

    def _resolved_has_strides(self, call: Call, args: Any, kwargs: Any, actual: Any) -> bool:
        """Whether a call has conj or neg bits, and the reference chooses the operator's strides without them.

        An ordinary kernel gets such an input already resolved, in strides that are not those of the input.
        """
        if self.subject.writes or not any(plan.conj or plan.neg for plan in call.plans):
            return False
        resolved = pytree.tree_map_only(torch.Tensor, lambda x: x.resolve_conj().resolve_neg(), (args, kwargs))
        pairs = zip(tensors_in(actual), tensors_in(self.subject.expect(*resolved)), strict=True)
        return not any(mine.shape == theirs.shape and strides_differ(mine, theirs) for mine, theirs in pairs)

    def _is_lost(self, call: Call) -> bool:
        """Whether torch itself can't write: through a conj or neg bit, unless what is written is what is returned."""
        returns = self.subject.binding.schema.returns
        if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
            return False
        written = zip(call.plans, self.subject.written(call), strict=True)
        return any(may and (plan.conj or plan.neg) for plan, may in written)

    def _built(self, call: Call, poison: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Guarded]]:
        """The arguments of a call, and the memory around their tensors."""
        if call.shared:
            tensors, row = SharedStorage(call.plans).build_guarded(self.device, guard=_GUARD, poison=poison ^ 0xFF)
            return *call.fill(tensors, self.device), [row]
        built = [plan.build_guarded(self.device, guard=_GUARD, poison=poison ^ 0xFF) for plan in call.plans]
        return *call.fill((each.tensor for each in built), self.device), built

    def _expected(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], poison: int
    ) -> tuple[Any, list[Guarded]]:
        """The reference's result, and the inputs that it wrote into, which are copies."""
        if not self.subject.writes:
            return self.expected(args, kwargs), []
        args, kwargs, built = self._built(call, poison)
        try:
            return self.subject.expect(args, kwargs), built
        except Exception as error:
            raise Refused(str(error)) from error

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operator's result; of one that writes into inputs also what it wrote, into copies of them."""
        return self._outcome(self.subject.run, args, kwargs)

    def _outcome(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.subject.writes:
            return function(args, kwargs)
        with torch.no_grad():
            copies = {id(each): _moved(each) for each in self.subject.written_tensors(args, kwargs)}
        args, kwargs = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
        return function(args, kwargs), list(copies.values())

    def expected(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What `run` should give, by the reference, in memory of its own.

        Raises:
            Refused: it raises.
        """
        try:
            expected = self._outcome(self.subject.expect, args, kwargs)
        except Exception as error:
            raise Refused(str(error)) from error
        shared = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        return pytree.tree_map(
            lambda leaf: (
                _moved(leaf) if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in shared else leaf
            ),
            expected,
        )

    def _compare(self, actual: Any, expected: Any, poison: int) -> Iterator[Finding]:
        got, want = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
        if len(got) != len(want):
            yield Finding("values", f"gave {counted(len(got), 'output')}, the reference {len(want)}")
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

    def _written(
        self, built: Sequence[Guarded], theirs: Sequence[Guarded], written: Sequence[bool]
    ) -> Iterator[Finding]:
        """What is wrong with the inputs that are written into."""
        for index, (mine, right, may) in enumerate(zip(built, theirs, written, strict=False)):
            if not may:
                continue
            if different := next(metadata(mine.tensor, right.tensor), None):
                yield Finding(different[0], f"input {index} after the call: {different[1]}")
            elif text := self.compare(mine.tensor, right.tensor):
                yield Finding("values", f"input {index} after the call: {text}")

    def _untouched(
        self,
        built: Sequence[Guarded],
        before: Sequence[torch.Tensor],
        versions: Sequence[int | None],
        written: Sequence[bool],
    ) -> Iterator[Finding]:
        for each, old, version, may in zip(built, before, versions, written, strict=False):
            if not same_bytes(each.base, old):
                changed = each.base != old
                if may:
                    changed &= ~_cells(each)
                    if not bool(changed.any()):
                        continue
                at = int(changed.to(torch.uint8).argmax())
                if at < each.start:
                    yield Finding("bounds", f"wrote {counted(each.start - at, 'byte')} before its input")
                elif at >= each.stop:
                    yield Finding("bounds", f"wrote {counted(at - each.stop, 'byte')} behind its input")
                elif bool(_cells(each)[at]):
                    yield Finding("inputs_untouched", f"changed its input, at byte {at - each.start} of the storage")
                else:
                    yield Finding(
                        "bounds", f"wrote between its input's cells, at byte {at - each.start} of the storage"
                    )
            elif not may and version is not None and each.tensor._version != version:
                yield Finding("inputs_untouched", "raised its input's version: autograd takes it for changed")

    def _alias(self, args: Any, kwargs: Any, actual: Any) -> Iterator[Finding]:
        """Which output shares memory with what it mustn't, or has memory of its own where it is an input."""
        for output, given in self.subject.given_back(args, kwargs, actual):
            if [each.data_ptr() for each in tensors_in(output)] != [each.data_ptr() for each in tensors_in(given)]:
                yield Finding("alias", "an output isn't the input that the schema says it is")
        outputs = [each for each in self.subject.fresh(actual) if each.numel()]
        taken = [(*extent(each), "another output", True) for each in outputs]
        taken += [(*extent(each), "an input", False) for each in tensors_in((args, kwargs)) if each.numel()]
        taken += [(start, stop, "the output of an earlier call", False) for start, stop, _ in self._kept]
        if text := _sharing(taken):
            yield Finding("alias", text)
        kept = ((*extent(each), each) for each in outputs)
        self._kept = (self._kept + [each for each in kept if each[1] - each[0] <= _KEPT_BYTES])[-_KEPT:]


def _sharing(spans: list[tuple[int, int, str, bool]]) -> str | None:
    """What an output (the last of each tuple says whether it is one) shares memory with."""
    furthest: dict[bool, tuple[int, str]] = {}  # where what was passed ends, of outputs and of the rest
    for start, stop, whose, is_output in sorted(spans):
        for other in (True, False):
            end, name = furthest.get(other, (0, ""))
            if start < end and (is_output or other):
                return f"an output shares memory with {whose if other and not is_output else name}"
        furthest[is_output] = max(furthest.get(is_output, (0, "")), (stop, whose))
    return None


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


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor's storage spans."""
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def describe(error: BaseException, lines: int = 1) -> str:
    """An error's type and its first lines, or that it has no text."""
    text = "\n".join(line[:300] for line in str(error).strip().splitlines()[:lines])
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


def _cells(guarded: Guarded) -> torch.Tensor:
    """Of each byte of the base, whether it belongs to a cell of the tensor."""
    tensor = guarded.tensor
    mark = torch.zeros_like(guarded.base, dtype=torch.bool)
    mark.as_strided(
        (*tensor.shape, tensor.element_size()),
        (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
        guarded.start + tensor.storage_offset() * tensor.element_size(),
    ).fill_(True)
    return mark


def _moved(x: torch.Tensor) -> torch.Tensor:
    """`x` in a copy of its storage, without a graph."""
    x = x.detach()
    if x.layout is not torch.strided:
        return x.clone()
    storage = x.untyped_storage().clone()
    moved = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())
    moved = moved.conj() if x.is_conj() else moved
    return torch._neg_view(moved) if x.is_neg() else moved


def _copied(flat: torch.Tensor) -> torch.Tensor:
    """A copy of a flat tensor of bytes."""
    return torch.from_numpy(flat.numpy().copy()) if flat.device.type == "cpu" else flat.clone()
