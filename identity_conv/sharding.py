"""How operators run on the shards of a DTensor: one line an operator.

A rule says which placements an operator takes and gives, for one dimension of the device mesh; no
communication is asked for where the inputs' placements satisfy it. Rules are kept until
``torch.distributed.tensor`` is imported, which costs half a second that is not ours to spend, and are
registered at that moment.

This is the one module that touches DTensor's sharding strategies, which are experimental; seen in torch
2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import fakes

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_DTENSOR = "torch.distributed.tensor"

#: What ``Partial`` may stand for: the same copy of each part keeps every one of them.
EVERY_PARTIAL = ("sum", "avg", "product", "max", "min")

#: Outputs' placements and tensor inputs' placements, for one dimension of the mesh.
Row = tuple[Sequence["Placement"], Sequence["Placement"]]


def pointwise(
    op: torch._ops.OpOverload | str, *, over: Collection[int] | None = None, keeps_partial: Collection[str] = ()
) -> None:
    """Lets an operator run on each shard as it is, where it treats elements alike along a dimension.

    Inputs broadcast as in torch: dimensions are counted from the last. Every output has the shape that
    the inputs broadcast to.

    Args:
        op: an operator, or its name such as ``"my_ops::scale"`` with an overload's name where it has one.
        over: the dimensions of the output that may be sharded, negative ones from the last; None for all.
        keeps_partial: the kinds of ``Partial`` that the operator keeps, such as ``("sum", "avg")`` for a linear one
            of one tensor.

    Raises:
        ValueError: there is no such operator, it has no tensor argument, or another kind of partial is named.

    Example::

        sharding.pointwise("my_kernels::scale", keeps_partial=("sum", "avg"))
        sharding.pointwise("my_kernels::softmax_last", over=range(-8, -1))
    """
    unknown = sorted(set(keeps_partial) - set(EVERY_PARTIAL))
    if unknown:
        raise ValueError(f"sharding: keeps_partial may name {', '.join(EVERY_PARTIAL)}, got {', '.join(unknown)}")

    overload = _overload(op)

    def rows(sizes: Sequence[Sequence[int]], present: Sequence[Placement]) -> list[Row]:
        shape = torch.broadcast_shapes(*sizes)
        rank, outputs = len(shape), len(overload._schema.returns)
        allowed = set(range(rank)) if over is None else {dim % rank for dim in over if -rank <= dim < rank}
        found: list[Row] = []
        for own, placement in zip(sizes, present, strict=True):
            if placement.is_partial():
                if len(sizes) == 1 and placement.reduce_op in keeps_partial:  # type: ignore[attr-defined]
                    found.append(([placement] * outputs, [placement]))
            elif not placement.is_replicate():
                along = placement.dim + rank - len(own)  # type: ignore[attr-defined]
                if along in allowed and own[placement.dim] == shape[along]:  # type: ignore[attr-defined]
                    found.append(_along(placement, along, shape, own, sizes, outputs))
        return found

    _register(overload, rows)


def _along(
    placement: Placement,
    along: int,
    shape: Sequence[int],
    own: Sequence[int],
    sizes: Sequence[Sequence[int]],
    outputs: int,
) -> Row:
    """Outputs and inputs sharded along one dimension of the output; an input that is broadcast there is whole."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    def of(rank: int) -> Placement:
        return placement if rank == len(own) else Shard(along - (len(shape) - rank))

    inputs: list[Placement] = []
    for other in sizes:
        dim = along - (len(shape) - len(other))
        inputs.append(of(len(other)) if dim >= 0 and other[dim] == shape[along] else Replicate())
    return [of(len(shape))] * outputs, inputs


def reduces(op: torch._ops.OpOverload | str, dim: int, *, keepdim: bool = False, partial: str | None = None) -> None:
    """Lets an operator that reduces one dimension of its first tensor run on shards of the others.

    Other tensor inputs are whole on every rank.

    Args:
        op: an operator, or its name.
        dim: the dimension that is reduced, negative from the last.
        keepdim: the output has it still, of size 1.
        partial: "sum", "max", "min", "avg" or "product" where the reduction of shards of `dim` itself can be finished
            by that; None where `dim` must be whole.

    Raises:
        ValueError: there is no such operator, it has no tensor argument, or another kind of partial is named.

    Example::

        sharding.reduces("my_kernels::row_sum", -1, partial="sum")
    """
    if partial is not None and partial not in EVERY_PARTIAL:
        raise ValueError(f"sharding: partial must be one of {', '.join(EVERY_PARTIAL)} or None, got {partial!r}")

    overload = _overload(op)

    def rows(sizes: Sequence[Sequence[int]], present: Sequence[Placement]) -> list[Row]:
        from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

        rank, placement = len(sizes[0]), present[0]
        if placement.is_partial() or placement.is_replicate() or not -rank <= dim < rank:
            return []
        along: int = placement.dim  # type: ignore[attr-defined]
        if along != dim % rank:
            after: Placement = Shard(along - (along > dim % rank and not keepdim))
        elif partial:
            after = Partial(partial)
        else:
            return []
        outputs = len(overload._schema.returns)
        return [([after] * outputs, [placement] + [Replicate()] * (len(sizes) - 1))]

    _register(overload, rows)


def _overload(op: torch._ops.OpOverload | str) -> torch._ops.OpOverload:
    if isinstance(op, torch._ops.OpOverload):
        return op
    try:
        return fakes.operator(op)
    except (AttributeError, RuntimeError):
        raise ValueError(
            f"sharding: op must be a registered operator, such as 'my_ops::identity_conv_op', got {op!r}"
        ) from None


Rows = Callable[[Sequence[Sequence[int]], Sequence["Placement"]], list[Row]]

_waiting: dict[torch._ops.OpOverload, Rows] = {}


def _register(overload: torch._ops.OpOverload, rows: Rows) -> None:
    schema = overload._schema
    taken, given = ({str(each.type) for each in side} for side in (schema.arguments, schema.returns))
    if "List[Tensor]" in taken | given:
        raise ValueError(f"sharding: op must take and return tensors, not lists of them, got {schema}")
    if not {"Tensor", "Optional[Tensor]"} & taken:
        raise ValueError(f"sharding: op must take a tensor, got {schema}")
    _waiting[overload] = rows
    if not _is_imported():
        _AfterImport.install()
    else:
        _register_waiting()


def _is_imported() -> bool:
    module = sys.modules.get(_DTENSOR)
    return module is not None and hasattr(module, "DTensor")


def _register_waiting() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    while _waiting:
        overload, rows = _waiting.popitem()
        # Whatever isn't a tensor is part of what a decision is remembered by.
        propagator.register_op_strategy(overload, _strategy(rows), RuntimeSchemaInfo(0, needs_pytree=True))


def _strategy(rows: Rows) -> Callable[[Any], Any]:
    """The strategy of DTensor's for a rule: all that it allows, over all dimensions of the mesh."""

    def strategy(op_schema: Any) -> Any:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
        from torch.distributed.tensor._ops.utils import generate_redistribute_costs
        from torch.distributed.tensor.placement_types import Replicate

        inputs = [*op_schema.args_strategy, *op_schema.kwargs_strategy]
        specs = [each.strategies[0].output_spec for each in inputs]
        sizes = [tuple(spec.tensor_meta.shape) for spec in specs]
        outputs = len(op_schema.op._schema.returns)
        whole: Row = ([Replicate()] * outputs, [Replicate()] * len(inputs))
        mesh = op_schema.get_mesh_from_args()
        by_mesh_dim = []
        for dim in range(mesh.ndim):
            by_mesh_dim.append([*rows(sizes, [spec.placements[dim] for spec in specs]), whole])
        found = []
        for row in itertools.product(*by_mesh_dim):
            gives = [DTensorSpec(mesh, tuple(of_dim[0][i] for of_dim in row)) for i in range(outputs)]
            takes = [
                DTensorSpec(mesh, tuple(of_dim[1][i] for of_dim in row), tensor_meta=spec.tensor_meta)
                for i, spec in enumerate(specs)
            ]
            costs = [generate_redistribute_costs(each, spec) for each, spec in zip(inputs, takes, strict=True)]
            found.append(OpSpec(gives[0] if outputs == 1 else tuple(gives), takes, costs))
        return OpStrategy(found)

    return strategy


class _AfterImport:
    """Registers the waiting rules when ``torch.distributed.tensor`` has been imported."""

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _DTENSOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            _register_waiting()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
