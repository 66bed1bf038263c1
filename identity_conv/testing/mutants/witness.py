"""Witnesses: a few lines for each mutant that prove it wrong, with nothing of the checker but its fences."""

from __future__ import annotations

import copy
import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import isolation, memory
from .kernels import Kernel

Make = Callable[[], torch.Tensor]
Witness = Callable[[Any], bool]

_LIMIT_S = 20.0
_PENDING_CYCLES = 100_000_000  # of a GPU's clock: about 50 ms


def witnessed(kernels: Sequence[Kernel], of: Callable[[Kernel], Any] = Kernel.get) -> Iterator[tuple[Kernel, bool]]:
    """Each kernel with whether its witness proves it wrong: says so, ends its process or hangs.

    Args:
        kernels: mutants of one device.
        of: what the witness is shown; a right kernel must not be proved wrong.
    """
    for kernel in kernels:
        kernel.get()  # built here, once
    how = isolation.how_for(kernels[0].device)
    for kernel, wrong in isolation.run(kernels, _Testimony(of), how=how, limit=_LIMIT_S):
        yield kernel, bool(wrong)  # a Death is true


class _Testimony:
    def __init__(self, of: Callable[[Kernel], Any]):
        self._of = of

    def __call__(self, kernel: Kernel, board: isolation.Blackboard, tell: Callable[[Any], None]) -> None:
        assert kernel.witness is not None
        board.note(limit=3.0 if "hang" in kernel.name else 120.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tell(kernel.witness(self._of(kernel)))


def same(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal in sizes, strides, dtype and bits."""
    if (y.shape, y.stride(), y.dtype) != (expected.shape, expected.stride(), expected.dtype):
        return False
    return torch.equal(_bytes(y), _bytes(expected))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def differs(make: Make, times: int = 1) -> Witness:
    """The copy of an input isn't the input; in one of so many calls."""

    def witness(op: Any) -> bool:
        x = make()
        return any(not same(op(x), x.clone()) for _ in range(times))

    return witness


def differs_with(reference: Callable[..., torch.Tensor], make: Make, *numbers: Any) -> Witness:
    """With these numbers the result isn't the reference's."""

    def witness(op: Any) -> bool:
        x = make()
        return not torch.allclose(op(x, *numbers), reference(x, *numbers), rtol=0, atol=0, equal_nan=True)

    return witness


def ends(make: Make) -> Witness:
    """The call never comes back, or comes back only by luck."""

    def witness(op: Any) -> bool:
        op(make())
        return False

    return witness


def fails(make: Make, text: str | None = None) -> Witness:
    """The call raises, with this text."""

    def witness(op: Any) -> bool:
        try:
            op(make())
        except Exception as error:
            return text is None or str(error) == text
        return False

    return witness


def shares(make: Make) -> Witness:
    """The output lies in the input's memory."""

    def witness(op: Any) -> bool:
        x = make()
        return op(x).data_ptr() == x.data_ptr()

    return witness


def changes(make: Make) -> Witness:
    """What lies in the input's storage is changed."""

    def witness(op: Any) -> bool:
        x = make()
        storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        before = storage.clone()
        op(x)
        return not same(storage, before)

    return witness


def steps_beside(before: bool) -> Witness:
    """It ends the process if nothing beside the input can be read."""
    return ends(lambda: memory.fenced(torch.ones(4), before=before))


def marks(offset: int, size: int) -> Witness:
    """The bytes at `offset` of the output's memory, which are none of it, hold the mutant's mark."""

    def witness(op: Any) -> bool:
        y = op(torch.ones(1))
        return ctypes.string_at(y.data_ptr() + offset, size) == b"\x9d" * size

    return witness


def leaves_memory_as_it_was(value: float, size: int = 1000, device: str = "cpu") -> Witness:
    """The output shows what its memory held before, where `value` should stand."""

    def witness(op: Any) -> bool:
        for _ in range(50):
            x = torch.full((size,), value, device=device)
            other = torch.full((size,), 7.5, device=device)
            del other
            if not same(op(x), x):
                return True
        return False

    return witness


def remembers(op: Any, device: str = "cpu") -> bool:
    """The second call, with other values at the same address, gives the first one's."""
    x = torch.ones(3, device=device)
    op(x)
    x.zero_()
    return not same(op(x), x)


def earlier_changes(op: Any) -> bool:
    """The second call changes what the first one gave."""
    first = op(torch.ones(3))
    op(torch.zeros(3))
    return not same(first, torch.ones(3))


def with_threads(size: int, count: int) -> Witness:
    """The threads of one call do it wrong."""

    def witness(op: Any) -> bool:
        torch.set_num_threads(count)
        x = torch.arange(1.0, size + 1)
        return any(not same(op(x), x) for _ in range(200))

    return witness


def from_threads(count: int, size: int, times: int) -> Witness:
    """Calls from several threads at once are wrong."""

    def witness(op: Any) -> bool:
        op(torch.zeros(1))
        wrong: list[int] = []

        def call(value: float) -> None:
            x = torch.full((size,), value)
            wrong.extend(1 for _ in range(times) if not same(op(x), x))

        threads = [threading.Thread(target=call, args=(number + 1.0,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return bool(wrong)

    return witness


def keeps_memory(op: Any) -> bool:
    """Twenty calls leave the process larger by half of their outputs."""
    x = torch.ones(1 << 20)
    op(x)
    before = _resident()
    for _ in range(20):
        op(x)
    return _resident() - before > 10 * x.nbytes


def _resident() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


def in_inference_mode(op: Any) -> bool:
    """The copy isn't the input in inference mode."""
    with torch.inference_mode():
        return differs(lambda: torch.ones(3))(op)


def foretold_wrong(make: Make) -> Witness:
    """The fake says another output than the real one, or nothing."""

    def witness(op: Any) -> bool:
        x = make()
        foretold, y = op(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")), op(x)
        return (foretold.shape, foretold.stride(), foretold.dtype) != (y.shape, y.stride(), y.dtype)

    return witness


def foretold_wrong_with(make: Make, *numbers: Any) -> Witness:
    """The same with these numbers."""
    return lambda op: foretold_wrong(make)(lambda x: op(x, *numbers))


def foretold_alias(op: Any) -> bool:
    """The fake's output is a view of its input."""
    x = torch.empty(3, device="meta")
    return torch._C._is_alias_of(op(x), x)  # type: ignore[attr-defined]


def fixes_sizes(op: Any) -> bool:
    """It can't be exported with a size left free."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x)

    try:
        torch.export.export(Model(), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    except Exception:
        return True
    return False


def wrong_gradient(incoming: Make) -> Witness:
    """The gradient of a copy isn't what comes in."""

    def witness(op: Any) -> bool:
        grad = incoming()
        x = torch.zeros(grad.shape, dtype=grad.dtype, requires_grad=True)
        found = torch.autograd.grad(op(x), x, grad)[0]
        return not torch.equal(found, grad)

    return witness


def wrong_factor(factor: float) -> Witness:
    """The gradient of a tensor that is scaled by it is another factor."""

    def witness(op: Any) -> bool:
        x = torch.ones(3, requires_grad=True)
        return not torch.equal(torch.autograd.grad(op(x, factor).sum(), x)[0], torch.full((3,), factor))

    return witness


def no_gradient(op: Any) -> bool:
    """There is no gradient."""
    x = torch.ones(3, requires_grad=True)
    try:
        op(x).sum().backward()
    except RuntimeError:
        return True
    return x.grad is None or not torch.equal(x.grad, torch.ones(3))


def undefined_gradient(op: Any) -> bool:
    """A backward that has nothing to give back fails."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    x = torch.ones(3, requires_grad=True)
    try:
        (Nothing.apply(op(x)) + x).sum().backward()
    except RuntimeError:
        return True
    return False


def no_second_gradient(op: Any) -> bool:
    """The gradient doesn't depend on the one that comes in."""
    x, grad = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    return not torch.autograd.grad(op(x), x, grad, create_graph=True)[0].requires_grad


def other_gradient_again(op: Any) -> bool:
    """A second backward of the same graph gives another gradient."""
    x = torch.ones(3, requires_grad=True)
    y = op(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    return not torch.equal(first, second)


def changes_gradient(op: Any) -> bool:
    """Backward changes the gradient that comes in."""
    x, grad = torch.ones(3, requires_grad=True), torch.ones(3)
    op(x).backward(grad)
    return not torch.equal(grad, torch.ones(3))


def wrong_tangent(op: Any) -> bool:
    """The tangent of a copy isn't the input's."""
    with forward_ad.dual_level():
        y = op(forward_ad.make_dual(torch.zeros(3), torch.ones(3)))
        tangent = forward_ad.unpack_dual(y).tangent
        return tangent is None or not torch.equal(tangent, torch.ones(3))


def _fields(made: Any) -> list[Any]:
    return [value for _, value in made.__obj_flatten__()]


def _as_made(made: Any, weight: torch.Tensor) -> bool:
    count, kept = _fields(made)
    return count == 3 and kept.dtype == weight.dtype and torch.equal(kept, weight)


def state_lost(class_: Any) -> bool:
    """A copy, or the object after it was copied or looked at, isn't what was made."""
    weight = torch.tensor([0.1], dtype=torch.float64)
    made = class_(3, weight)
    copied = copy.deepcopy(made)
    return not (_as_made(copied, weight) and _as_made(made, weight) and _as_made(made, weight))


def state_shared(class_: Any) -> bool:
    """A second object changes the first."""
    weight = torch.ones(1, dtype=torch.float64)
    first = class_(3, weight)
    class_(3, torch.zeros(1, dtype=torch.float64))
    return not _as_made(first, weight)


def by_method(witness: Witness) -> Witness:
    """The same of an object's method `forward`."""
    return lambda class_: witness(class_(3, torch.ones(1)).forward)


# --- on a GPU ---


def breaks(make: Make) -> Witness:
    """The GPU reports an error, after which this process can't use it."""

    def witness(op: Any) -> bool:
        x = make()
        torch.cuda.synchronize()
        try:
            op(x)
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)
        return False

    return witness


def fenced_on_gpu() -> torch.Tensor:
    """A tensor with nothing readable behind it."""
    return memory.fenced(torch.ones(128, device="cuda"), before=False)


def marks_on_gpu(offset: int) -> Witness:
    """The byte at `offset` of the output's memory, which is none of it, holds the mutant's mark."""

    def witness(op: Any) -> bool:
        y = op(torch.ones(1, device="cuda"))
        return int(memory.device_bytes(y.data_ptr() + offset, 1, "cuda")[0]) == 0x9D

    return witness


def disturbs_the_next(op: Any) -> bool:
    """What comes after the call is told of an error that isn't its."""
    x = torch.ones(5000, device="cuda")
    op(x)
    try:
        x + 1
    except RuntimeError:
        return True
    return False


def behind_a_wait(op: Any) -> bool:
    """On a side stream, the copy is of what was there before the stream's earlier work."""
    x, new = torch.zeros(1000, device="cuda"), torch.full((1000,), 3.3, device="cuda")
    op(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_PENDING_CYCLES)
        x.copy_(new)
        y = op(x)
    torch.cuda.synchronize()
    return not same(y, new)


def returns_late(op: Any) -> bool:
    """The call returns when the GPU is done with what came before."""
    x = torch.ones(1000, device="cuda")
    op(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(_PENDING_CYCLES)
    done = torch.cuda.Event()
    done.record()
    op(x)
    return done.query()


def two_streams_differ(op: Any) -> bool:
    """Calls on two streams at once disturb each other."""
    inputs = [torch.full((1 << 20,), value, device="cuda") for value in (1.0, 2.0)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for stream in streams:  # so that both have work at once
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_PENDING_CYCLES // 10)
    for _ in range(100):
        for x, stream, got in zip(inputs, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(op(x))
    torch.cuda.synchronize()
    return any(not same(y, x) for x, got in zip(inputs, outputs, strict=True) for y in got)


def on_other_gpu(op: Any) -> bool:
    """A tensor of another GPU than the current one is refused, or copied wrong."""
    try:
        return differs(lambda: torch.ones(1000, device="cuda:1"))(op)
    except RuntimeError:
        return True


def device_left(op: Any) -> bool:
    """The current device is another one after the call."""
    before = torch.cuda.current_device()
    op(torch.ones(3, device="cuda:1"))
    return torch.cuda.current_device() != before


def keeps_gpu_memory(op: Any) -> bool:
    """Twenty calls leave less of the GPU's memory free, by half of their outputs."""
    x = torch.ones(1 << 24, device="cuda")

    def held() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def work() -> None:
        for _ in range(20):
            op(x)

    op(x)
    return memory.kept(held, work, looks=3) > 10 * x.nbytes
