"""The example that a package carries: recorded at packaging, run again by verify (``src/runtime/sample.h``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from . import libraries

INPUTS = "data/identity_conv/sample/inputs"
OUTPUTS = "data/identity_conv/sample/outputs"


@dataclass(frozen=True)
class Example:
    """One run of the exported program: what it was given, what it returned, and the operators it reached."""

    inputs: list[torch.Tensor]
    outputs: list[Any]
    names: libraries.Names
    repeatable: bool


def run(program: ExportedProgram) -> Example | None:
    """Runs the program on the inputs that it was exported with, twice; None where it has none any more."""
    if program.example_inputs is None:
        return None
    args, kwargs = program.example_inputs
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    before = [_copy(tensor) for tensor in given]
    module = program.module()
    watch = libraries.Watch()
    results = []
    with torch.no_grad():
        for _ in range(2):
            # A model may write to its inputs, and then the second run has others.
            fresh = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs))
            with watch:
                results.append([_detach(leaf) for leaf in pytree.tree_leaves(module(*fresh[0], **fresh[1]), _is_none)])
    repeatable = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*results, strict=True)
    )
    return Example(before, results[0], watch.names, repeatable)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _detach(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the tensor's strides, overlapping or not."""
    storage = torch.as_strided(tensor.detach(), (_span(tensor),), (1,)).clone()
    return torch.as_strided(storage, tensor.shape, tensor.stride())


def _span(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last, both counted."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def describe(example: Example) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The sample's entry in the manifest, and its records."""
    inputs = [_describe(tensor) for tensor in example.inputs]
    outputs: list[Any] = []
    values: list[torch.Tensor] = []
    for output in example.outputs:
        if not isinstance(output, torch.Tensor):
            outputs.append(None)
            continue
        values.append(_copy(output))
        outputs.append(_describe(output) | _tolerance(output))
    records = {INPUTS: b"".join(map(_bytes, example.inputs)), OUTPUTS: b"".join(map(_bytes, values))}
    return {"inputs": inputs, "outputs": outputs}, records


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sizes": list(tensor.shape),
        "strides": list(tensor.stride()),
        "bytes": _span(tensor) * tensor.element_size(),
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    span = torch.as_strided(tensor, (_span(tensor),), (1,)).cpu().resolve_conj().resolve_neg()
    return span.contiguous().view(torch.uint8).numpy().tobytes()


def _tolerance(output: torch.Tensor) -> dict[str, float]:
    """How far from the recorded output a host may be: other processors add in another order.

    Relative to the largest element, since sums lose against their largest part. On CUDA, float32
    convolutions and products may be in TF32, which has 10 bits of mantissa.
    """
    if not (output.is_floating_point() or output.is_complex()) or output.numel() == 0:
        return {}
    part = output.dtype.to_real()
    rtol = {torch.float64: 1e-7, torch.float32: 2e-5}.get(part, 10 * torch.finfo(part).eps)
    if (
        output.is_cuda
        and part is torch.float32
        and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    ):
        rtol = 5e-3
    wide = output.to(torch.complex128 if output.is_complex() else torch.float64)
    finite = wide[wide.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return {"rtol": rtol, "atol": rtol * largest}
