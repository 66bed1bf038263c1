"""The strategies and the corpus: what they reach, and the dull input that they shrink to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from identity_conv import Extension, testing
from identity_conv.testing import Call, Context, SharedStorage, State, TensorPlan, corpus, draws, schema, values

IDENTITY = "my_ops::identity_conv_op"


def shrunk(strategy: st.SearchStrategy[Any], condition: Callable[[Any], Any]) -> Any:
    """The dullest value that meets a condition."""
    quietly = settings(
        max_examples=3000, database=None, deadline=None, phases=(Phase.generate, Phase.shrink), derandomize=True
    )
    return find(strategy, condition, settings=quietly)


def sample(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """The first values that a test would get."""
    found = []

    @settings(max_examples=count, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def has(kind: str) -> Callable[[TensorPlan], bool]:
    return lambda plan: kind in plan.kinds


SHRUNK = {
    "nothing": (lambda plan: True, TensorPlan()),
    "permuted": (has("permuted"), TensorPlan((1, 0), permutation=(1, 0))),
    "offset": (has("offset"), TensorPlan(offset=1)),
    "stepped": (has("stepped"), TensorPlan((2,), step=(2,))),
    "padded": (has("padded"), TensorPlan((0,), padding=(1,))),
    "expanded": (has("expanded"), TensorPlan((2,), expand=(0,))),
    "misaligned": (has("misaligned"), TensorPlan(misalignment=4)),
    "overlapping": (has("overlapping"), TensorPlan((2, 2), windows=1)),
    "channels last": (has("channels_last"), TensorPlan((1, 1, 1, 0), memory_format=torch.channels_last)),
    "unit stride": (has("unit_stride"), TensorPlan((1,), unit_stride=0)),
    "conj": (has("conj"), TensorPlan(dtype=torch.complex64, conj=True)),
    "neg": (has("neg"), TensorPlan(neg=True)),
    "empty": (has("empty"), TensorPlan((0,))),
    "NaN": (lambda plan: "nan" in dict(plan.cells).values(), TensorPlan(cells=((0, "nan"),))),
    "a dtype": (lambda plan: plan.dtype is torch.bfloat16, TensorPlan(dtype=torch.bfloat16)),
    "rank": (lambda plan: len(plan.shape) >= 3, TensorPlan((1, 1, 0))),
    "a threshold of elements": (lambda plan: plan.numel >= 1000, TensorPlan((1000,))),
    "a threshold of the rows": (lambda plan: plan.shape and plan.shape[-1] >= 100, TensorPlan((100,))),
    "an odd tail, stepped": (
        lambda plan: plan.numel > 16 and plan.numel % 2 and "stepped" in plan.kinds,
        TensorPlan((17,), step=(2,)),
    ),
}


class TestShrinking:
    @pytest.mark.parametrize("condition", SHRUNK)
    def test_a_plan_shrinks_to_what_matters(self, condition: str) -> None:
        failing, dullest = SHRUNK[condition]
        assert shrunk(testing.plans(), failing) == dullest

    @pytest.mark.parametrize("tile", [(), 256, (1024, 96)], ids=str)
    def test_a_threshold_is_found_with_tiles_too(self, tile: Any) -> None:
        large = testing.shapes(max_numel=1 << 18, tile=tile)
        assert shrunk(testing.plans(shape=large), lambda plan: plan.numel > 65_536) == TensorPlan((65_537,))

    def test_a_tensor_shrinks_as_its_plan(self) -> None:
        found = shrunk(testing.tensors(), lambda x: x.numel() > 1 and x.data_ptr() % 16)
        assert (tuple(found.shape), found.dtype) == ((2,), torch.float32)

    def test_groups_shrink_to_equal_ones(self) -> None:
        assert shrunk(testing.shared_storage(), lambda group: True) == SharedStorage((TensorPlan(), TensorPlan()))
        apart = shrunk(testing.shared_storage(), lambda group: group.plans[0] != group.plans[1])
        assert apart == SharedStorage((TensorPlan(), TensorPlan(offset=1)))
        assert shrunk(testing.broadcastable(3), lambda shapes: len(shapes) == 3) == ((), (), ())

    def test_calls_shrink_argument_by_argument(self) -> None:
        sums = testing.calls("aten::sum.dim_IntList")
        assert shrunk(sums, lambda call: call.args[2]) == Call((TensorPlan(), None, True))
        adds = testing.calls("aten::add.Tensor", torch.add)
        assert shrunk(adds, lambda call: call.shared) == Call((TensorPlan(), TensorPlan()), shared=True)

    def test_states_and_contexts_shrink_to_the_least(self) -> None:
        objects = testing.states("my_ops.IdentityConvClass")
        assert shrunk(objects, lambda state: True) == State("my_ops.IdentityConvClass", {"channels": 1})
        assert shrunk(objects, lambda state: state.fields["channels"] > 4).fields == {"channels": 5}
        assert shrunk(testing.contexts(), lambda context: context.grad != "enabled") == Context(grad="disabled")


class TestReach:
    def test_every_kind_is_met_within_a_thousand_plans(self) -> None:
        found = sample(testing.plans(grad=st.sampled_from(["none", "leaf", "nonleaf", "inference"])), 1000)
        kinds = Counter(itertools.chain.from_iterable(plan.kinds for plan in found))
        assert set(kinds) >= {*draws.LAYOUTS, "empty", "scalar", "special", "dense", "leaf", "nonleaf", "inference"}
        assert len({plan.dtype for plan in found}) > 15
        assert {len(plan.shape) for plan in found} >= {0, 1, 2, 3, 4, 5, 8}
        assert len({name for plan in found for _, name in plan.cells}) > 10
        assert len(set(found)) > 500

    def test_mixtures_of_kinds_are_met(self) -> None:
        found = sample(testing.plans(), 300)
        pairs = {pair for plan in found for pair in itertools.combinations(plan.kinds, 2)}
        assert {("permuted", "offset"), ("padded", "offset"), ("offset", "misaligned"), ("offset", "special")} <= pairs

    def test_sizes_stand_at_the_edges_of_a_tile(self) -> None:
        found = [max(shape) for shape in sample(testing.shapes(tile=64, min_rank=1, max_numel=10_000), 300)]
        edges = Counter(size % 64 for size in found if size > 65)
        assert min(edges[at] for at in (63, 0, 1)) > 0
        assert sum(edges[at] for at in (63, 0, 1)) > 0.8 * sum(edges.values())

    def test_the_corpus_reaches_them_too(self) -> None:
        found = list(corpus.plans())
        for beginning in (30, len(found)):
            kinds = set(itertools.chain.from_iterable(plan.kinds for plan in found[:beginning]))
            assert kinds >= {*draws.LAYOUTS, "empty", "scalar", "special", "dense"}
        for kind in set(draws.LAYOUTS) - {"conj", "neg"}:
            assert {plan.dtype for plan in found if kind in plan.kinds} == set(values.DTYPES)
        special = {(plan.dtype, name) for plan in found for _, name in plan.cells}
        assert special >= {(dtype, name) for dtype in values.DTYPES for name in values.specials(dtype)}

    def test_the_corpus_is_always_the_same(self) -> None:
        assert list(corpus.plans()) == list(corpus.plans())
        calls = [list(corpus.calls("aten::add.Tensor", torch.add, count=20)) for _ in range(2)]
        assert calls[0] == calls[1]


class TestArguments:
    def test_every_argument_may_be_a_strategy(self) -> None:
        some = st.sampled_from
        plan = testing.plans(
            shape=some([(2, 3), (1, 2, 3, 4)]),
            dtype=some([torch.int8]),
            kinds=some([("offset",)]),
            special=st.booleans(),
            grad=some(["none", "inference"]),
        )
        for found in sample(plan, 50):
            assert found.shape in ((2, 3), (1, 2, 3, 4))
            assert found.dtype is torch.int8
            assert set(found.kinds) <= {"offset", "dense", "special", "inference"}
        placed = testing.plans(shape=(4, 6), dtype=torch.complex64, layout=testing.layouts((4, 6), torch.complex64))
        assert any("conj" in found.kinds for found in sample(placed, 100))
        shape = testing.shapes(
            min_rank=some([1, 2]), max_rank=some([2]), max_numel=some([10]), tile=some([4]), empty=some([False])
        )
        assert all(1 <= len(found) <= 2 and 0 < torch.Size(found).numel() <= 10 for found in sample(shape, 50))
        assert {x.device.type for x in sample(testing.tensors(some(["cpu", "meta"])), 30)} == {"cpu", "meta"}
        assert {len(found) for found in sample(testing.broadcastable(some([2, 3])), 30)} == {2, 3}
        group = testing.shared_storage(some([3]), dtype=some([torch.int8]), max_numel=some([8]), kinds=some([()]))
        assert all(len(found.plans) == 3 for found in sample(group, 10))
        context = testing.contexts(
            some(["cpu"]), grad=some(["disabled"]), autocast=some([None]), side_stream=some([False])
        )
        assert set(sample(context, 5)) == {Context(grad="disabled")}
        assert set(sample(testing.dtypes(some([(torch.int8,), (torch.bool,)])), 20)) == {torch.int8, torch.bool}

    @pytest.mark.parametrize(
        ("strategy", "sentence"),
        [
            (testing.dtypes([torch.qint8]), "dtypes must be some that torch.clone copies, got .*qint8"),
            (testing.dtypes([]), "dtypes must be some"),
            (testing.shapes(min_rank=3, max_rank=2), "min_rank must be from 0 to max_rank, got 3 and 2"),
            (testing.shapes(max_numel=0), "max_numel must be 1 or more, got 0"),
            (testing.shapes(tile=0), "tile must be 1 or more"),
            (testing.plans(kinds=["diagonal"]), "kinds must be of permuted, .* got diagonal"),
            (testing.states("my_ops.NoClass"), "cls must be a registered custom class .*, got my_ops.NoClass"),
            (testing.states(int), "cls must be a class of torch.classes, or its name .*, got <class 'int'>"),
            (testing.states("my_ops.IdentityConvClass", width=3), "my_ops.IdentityConvClass has no argument width"),
            (testing.calls("aten::add.Tensor", given={"beta": 1}), "aten::add has no argument beta"),
        ],
        ids=str,
    )  # fmt: skip
    def test_wrong_ones_are_said_in_a_sentence(self, strategy: st.SearchStrategy[Any], sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            sample(strategy, 1)

    @given(shapes=testing.broadcastable(3))
    def test_broadcastable_shapes_broadcast_to_the_first(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        assert torch.broadcast_shapes(*shapes) == shapes[0]

    @given(group=testing.shared_storage())
    def test_a_group_lies_in_one_storage(self, group: SharedStorage) -> None:
        tensors = group.build()
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == 1
        assert [x.stride() for x in tensors] == [plan.strides for plan in group.plans]

    @given(state=testing.states(torch.classes.my_ops.IdentityConvClass))
    def test_states_are_those_that_the_constructor_takes(self, state: State) -> None:
        assert state.build().__obj_flatten__() == (("channels", state.fields["channels"]),)

    def test_a_field_may_be_a_tensor(self) -> None:
        extension = Extension("test_affine", [Path(__file__).parent / "extensions" / "affine.cpp"]).load()
        found = sample(testing.states(extension.classes.Affine), 30)
        assert {type(state.fields["weight"]) for state in found} == {TensorPlan}
        for state in found:
            fields = dict(state.build().__obj_flatten__())
            assert fields["weight"].stride() == state.fields["weight"].strides
            assert fields["shift"] == state.fields["shift"]
        assert min(state.fields["shift"] for state in found) < 0

    def test_a_field_may_be_given(self) -> None:
        given_one = testing.states("my_ops.IdentityConvClass", channels=st.sampled_from([7, 9]))
        assert {state.fields["channels"] for state in sample(given_one, 20)} == {7, 9}


@torch.library.custom_op("identity_conv_strategies::everything", mutates_args={"out"})
def everything(
    x: torch.Tensor,
    others: list[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    dims: list[int],
    dtype: torch.dtype,
    number: int,
    scale: float,
    flag: bool,
    name: str = "plain",
    *,
    limits: list[float] | None = None,
) -> torch.Tensor:
    return x.clone()


EVERYTHING = ["x", "others", "bias", "out", "dims", "dtype", "number", "scale", "flag"]  # `name` has a type not drawn


def names(binding: schema.Binding) -> tuple[list[str], list[str]]:
    return [argument.name for argument in binding.positional], [argument.name for argument in binding.keyword]


class TestCalls:
    def test_each_type_of_a_schema_is_drawn(self) -> None:
        found = sample(testing.calls(everything), 200)
        x, others, bias, out, dims, dtype, number, scale, flag = zip(*(call.args[:9] for call in found), strict=True)
        assert all(isinstance(each, TensorPlan) for each in (*x, *out, *itertools.chain(*others)))
        assert {type(each) for each in bias} == {type(None), TensorPlan}
        assert {len(each) for each in others} == {0, 1, 2, 3}
        assert {len(each) for each in dims} == {0, 1, 2, 3}
        assert {type(each) for each in dtype} == {torch.dtype}
        assert min(number) < 0 < max(number)
        assert {type(each) for each in scale} == {float}
        assert set(flag) == {False, True}
        assert {call.kwargs["limits"] is None for call in found} == {False, True}
        # What is written to has cells of its own, as torch demands.
        assert not any({"expanded", "overlapping"} & set(each.kinds) for each in out)
        # The others broadcast to the first.
        for call in found:
            shapes = [plan.shape for plan in (call.args[0], *call.args[1], call.args[2]) if plan is not None]
            assert torch.broadcast_shapes(*shapes) == call.args[0].shape

    def test_what_is_drawn_can_be_called(self) -> None:
        for call in sample(testing.calls("aten::add.Tensor", torch.add, dtypes=[torch.float64, torch.int32]), 100):
            args, kwargs = call.build()
            torch.add(*args, **kwargs)
            assert eval(repr(call)) == call

    @pytest.mark.parametrize(
        ("op", "reference", "expected"),
        [
            (IDENTITY, torch.clone, (["x"], [])),
            (torch.ops.my_ops.identity_conv_op, lambda anything: anything, (["x"], [])),
            ("aten::add.Tensor", torch.add, (["self", "other"], [])),
            ("aten::add.Tensor", torch.ops.aten.add.Tensor, (["self", "other"], ["alpha"])),
            ("aten::add.Tensor", lambda a, b, alpha=1: a, (["self", "other"], ["alpha"])),
            ("aten::add.Tensor", lambda *args, **kwargs: args, (["self", "other"], ["alpha"])),
            (torch.ops.aten.add, None, (["self", "other"], ["alpha"])),
            ("aten::clone", None, (["self"], [])),
            ("aten::leaky_relu", lambda x: x, (["self"], [])),
            ("aten::sum.dim_IntList", lambda self, dim, dtype=None: self, (["self", "dim"], [])),
            ("aten::sum.dim_IntList", lambda self, keepdim, dim: self, (["self"], ["dim", "keepdim"])),
            (everything, lambda *args: args, ([*EVERYTHING], [])),
            (lambda x, y, z=3: x, None, (["x", "y"], [])),
        ],
    )  # fmt: skip
    def test_arguments_are_those_that_both_take(self, op: Any, reference: Any, expected: Any) -> None:
        assert names(schema.bind(op, reference)) == expected

    @pytest.mark.parametrize(
        ("op", "reference", "sentence"),
        [
            ("my_ops::no_op", None, "op must name a registered operator as namespace::name, got 'my_ops::no_op'"),
            ("no namespace", None, "op must name a registered operator"),
            (3, None, "op must be an operator, its name, or a function, got 3"),
            (torch.clone, None, "op must have a signature that can be read"),
            (torch.ops.aten.sum.out, None, None),
            (torch.ops.aten.index_fill, None, r"op must be one overload of aten\.index_fill, one of int_Tensor, "),
            ("aten::add.Tensor", lambda x: x, r"requires, but <lambda> takes \(x\) and no other"),
            (IDENTITY, lambda x, y: x, "require no more than my_ops::identity_conv_op takes, but .* requires y too"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_said_in_a_sentence(self, op: Any, reference: Any, sentence: str | None) -> None:
        if sentence is None:
            schema.bind(op, reference)
            return
        with pytest.raises(ValueError, match=sentence):
            schema.bind(op, reference)

    def test_an_argument_may_be_given(self) -> None:
        alike = testing.calls("aten::addmm", given={"self": testing.plans(shape=(2, 3)), "beta": 5})
        for call in sample(alike, 20):
            assert call.args[0].shape == (2, 3)
            assert call.kwargs["beta"] == 5

    def test_no_layout_and_no_values_means_dull_tensors(self) -> None:
        dull = testing.calls(IDENTITY, kinds=(), special=False, max_numel=50, max_rank=2, grads=("leaf",))
        for call in sample(dull, 50):
            (plan,) = call.plans
            assert set(plan.kinds) <= {"dense", "leaf", "empty", "scalar"}
            assert plan.numel <= 50
            assert len(plan.shape) <= 2
