"""Shapes that depend on each other: drawn calls have them, shrunk ones too; and sizes that depend on data."""

from __future__ import annotations

import dataclasses
import pickle
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import custom_op

from identity_conv import testing
from identity_conv.testing import Call, CheckFailure, TensorPlan, check_class, check_op, checking, tracing
from identity_conv.testing.classes import MethodSubject
from identity_conv.testing.shrink import shrink
from identity_conv.testing.subject import Subject
from identity_conv.testing.tied_shapes import Shapes, reshaped


def fit(shapes: dict, *plans: TensorPlan) -> list[tuple[int, ...]]:
    return [plan.shape for plan in Shapes(shapes).fit(Call(plans), ["x", "y", "z"]).plans]


def test_earlier_arguments_decide_over_later_ones() -> None:
    plans = (TensorPlan((7, 5)), TensorPlan((2,)), TensorPlan((3, 3)))
    assert fit({"x": ("N", 4), "y": ("N",)}, *plans) == [(7, 4), (7,), (3, 3)]
    assert fit({"x": ("N", "M"), "y": ("M", "K"), "z": ("K",)}, *plans) == [(7, 5), (5, 3), (3,)]
    assert fit({"x": ("...", "H"), "y": ("...", "H"), "z": ("H",)}, *plans) == [(7, 5), (7, 5), (5,)]
    assert fit({"x": ("N", "..."), "y": (2, "..."), "z": ("...",)}, *plans) == [(7, 5), (2, 5), (5,)]
    assert fit({"x": ("N<=4", 4), "y": ("N",)}, *plans) == [(2, 4), (2,), (3, 3)]
    for shape in ((), (0,), (0, 3), (1, 2, 3)):
        found = fit({"x": ("...", "N", 4), "y": ("N", "...")}, TensorPlan(shape), TensorPlan(shape))
        assert found[0][-1] == 4
        assert found[1] == (found[0][-2], *found[0][:-2])


def test_a_long_dimension_comes_to_each_of_those_that_are_named() -> None:
    rows = {"x": ("N", "C", 2, "L"), "y": ("C",)}
    drawn = TensorPlan((7,)), TensorPlan((2,)), TensorPlan((6,)), TensorPlan((5, 7))
    assert [fit(rows, plan, plan) for plan in drawn] == [
        [(3, 7, 2, 3), (7,)],
        [(3, 3, 2, 2), (3,)],
        [(6, 3, 2, 3), (3,)],
        [(5, 7, 2, 3), (7,)],
    ]
    assert fit(rows, TensorPlan((5000,))) == [(1, 1, 2, 5000)]  # no longer than it is
    assert fit({"x": ("N", 4)}, TensorPlan((7,))) == [(7, 4)]


def test_a_layout_stays_where_there_is_room() -> None:
    plan = TensorPlan((5, 7), permutation=(1, 0), step=(2, 3), cells=((0, "nan"), (30, "inf")))
    assert reshaped(plan, (5, 4)) == dataclasses.replace(plan, shape=(5, 4), cells=((0, "nan"),))
    assert reshaped(plan, (6,)).step == (3,)
    assert reshaped(plan, (2, 5, 7)).step == (1, 2, 3)
    assert reshaped(TensorPlan((5, 7), windows=2), (5, 1)) == TensorPlan((5, 1))


@pytest.mark.parametrize("shape", ["N", ("N", -1), ("N", "..", 3), ("...", "..."), ("N<4",), 3, (True,)])
def test_what_is_no_shape_is_named(shape) -> None:
    with pytest.raises(ValueError, match=r"shapes: x must be a tuple of names, sizes and at most one '...', got "):
        Shapes({"x": shape})


def test_an_argument_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"aten\.mv\.default has no argument matrix"):
        check_op(torch.ops.aten.mv, torch.mv, shapes={"matrix": ("N", "M")})
    with pytest.raises(TypeError, match="shapes must be a mapping"):
        check_op(torch.ops.aten.mv, torch.mv, shapes=["N"])


def test_methods_have_shapes_too() -> None:
    given = {"cls": "my_ops.IdentityConvClass", "method": "forward", "reference": torch.clone, "state": {"channels": 3}}
    with pytest.raises(ValueError, match=r"IdentityConvClass\.forward has no argument y"):
        check_class(**given, shapes={"y": ("N",)})
    subject = MethodSubject(*given.values(), {}, Shapes({"x": ("N", 3)}))
    assert subject.call(TensorPlan((5, 6, 7))).plans[0].shape == (5, 3)


def test_a_fresh_process_has_them() -> None:
    subject = Subject(torch.ops.aten.mv, torch.mv, {}, Shapes({"self": ("N", "M"), "vec": ("M<=9",)}))
    sent = pickle.loads(pickle.dumps(subject))
    assert [plan.shape for plan in sent.call(TensorPlan((5, 12))).plans] == [(5, 2), (2,)]


def alone(*checks: str) -> dict[str, str]:
    return dict.fromkeys(checking.CHECKS.keys() - set(checks), "not looked at here")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("test_shapes", "FRAGMENT") as library:
        yield library


def define(library: torch.library.Library, schema: str, kernel, fake=None) -> torch._ops.OpOverloadPacket:
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"test_shapes::{name}", fake, lib=library)
    return getattr(torch.ops.test_shapes, name)


def rows_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.shape != x.shape[-1:]:
        raise ValueError("weight must have the last size of x")
    return x * weight


def test_calls_have_the_shapes_and_shrunk_ones_too(library: torch.library.Library) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = rows_of(x, weight)
        return y + 1 if x.dim() == 3 and not weight.is_contiguous() else y

    op = define(library, "rows(Tensor x, Tensor weight) -> Tensor", wrong)
    with pytest.raises(CheckFailure) as caught:
        check_op(
            op,
            rows_of,
            shapes={"x": ("...", "H"), "weight": ("H",)},
            dtypes=[torch.float32],
            skip=alone("values", "layout", "sizes", "accepts"),
        )
    (violation,) = caught.value.violations
    assert violation.check == "layout"
    x, weight = violation.case.plans
    assert x.shape == (1, 1, 2)  # shrunk together
    assert weight.shape == (2,)


SELECT = "select(Tensor x, float least) -> Tensor"


def select(x: torch.Tensor, least: float) -> torch.Tensor:
    return x[x > least].clone() if x.dim() == 1 else x.new_empty(0)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({}, None),
        ({"dtype": torch.float64}, "expected torch.float32, got torch.float64"),
        ({"min": 2}, "expected size [01] of dimension 0, got one from 2 to"),
    ],
)
def test_a_fake_may_leave_a_size_open(library: torch.library.Library, how: dict, sentence: str | None) -> None:
    def fake(x: torch.Tensor, least: float) -> torch.Tensor:
        size = torch.library.get_ctx().new_dynamic_size(min=how.get("min", 0))
        return x.new_empty(size, dtype=how.get("dtype"))

    op = define(library, SELECT, select, fake)
    asked = {
        "shapes": {"x": ("N",)},
        "inputs": {"least": 1.2},
        "dtypes": [torch.float32],
        "skip": alone("fake", "symbolic"),
    }
    if sentence is None:
        report = check_op(op, select, **asked)
        assert {run.check for run in report.runs if run.cases} == {"fake", "symbolic"}
        return
    with pytest.raises(CheckFailure, match=sentence):
        check_op(op, select, **asked)


def test_an_open_size_may_be_computed_with() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = torch.empty(2, mode.shape_env.create_unbacked_symint() + 1, 3)
    assert list(tracing._differs(fake, torch.empty(2, 5, 3))) == []
    assert list(tracing._differs(fake, torch.empty(2, 5, 4)))


def test_a_fixed_size_may_be_asked_for(library: torch.library.Library) -> None:
    def area(boxes: torch.Tensor) -> torch.Tensor:
        return boxes[:, 2] * boxes[:, 3]

    def checked(boxes: torch.Tensor) -> torch.Tensor:
        if boxes.dim() != 2 or int(boxes.shape[1]) != 4:
            raise ValueError("boxes must be [N, 4]")
        return area(boxes)

    op = define(library, "area(Tensor boxes) -> Tensor", checked, checked)
    asked = {"dtypes": [torch.float32], "skip": alone("values", "fake", "symbolic")}
    check_op(op, area, shapes={"boxes": ("N", 4)}, **asked)

    def fixes(boxes: torch.Tensor) -> torch.Tensor:
        return boxes.new_empty(int(boxes.shape[0]))

    wrong = define(library, "area_fixed(Tensor boxes) -> Tensor", checked, fixes)
    with pytest.raises(CheckFailure, match="the fake fixes a size of the input: dimension 0"):
        check_op(wrong, area, shapes={"boxes": ("N", 4)}, **asked)


def test_the_fake_of_an_operator_that_writes_is_looked_at(library: torch.library.Library) -> None:
    def add(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x.clone() if y is None else y.add_(x).clone()

    def fake(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty_like(x, dtype=torch.float64)

    schema = "(Tensor x, Tensor(a!)? y=None) -> Tensor"
    asked = {"shapes": {"x": ("...",), "y": ("...",)}, "dtypes": [torch.float32], "skip": alone("values", "fake")}
    check_op(define(library, f"add{schema}", add, lambda x, y=None: torch.empty_like(x)), add, **asked)
    with pytest.raises(CheckFailure, match=r"expected torch\.float32, got torch\.float64"):
        check_op(define(library, f"add_wrong{schema}", add, fake), add, **asked)


def test_graphs_of_an_operator_that_writes_are_looked_at(library: torch.library.Library) -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.add_(x).clone()

    asked = {
        "shapes": {"x": ("...",), "y": ("...",)},
        "dtypes": [torch.float32],
        "skip": alone("compile", "export"),
        "tier": "full",
    }
    schema = "(Tensor x, Tensor(a!) y) -> Tensor"
    report = check_op(define(library, f"write{schema}", add, lambda x, y: torch.empty_like(x)), add, **asked)
    assert {run.check for run in report.runs if run.cases > 2} == {"compile", "export"}
    with pytest.raises(CheckFailure, match=r"\(compile, export\)"):
        check_op(define(library, f"write_unseen{schema}", add), add, **asked)


def test_an_operator_without_outputs_has_no_sizes_to_say(library: torch.library.Library) -> None:
    def negate(x: torch.Tensor) -> None:
        x.neg_()

    def by_data(x: torch.Tensor) -> None:
        x.mul_(-1 if float(x.sum()) else 1)

    op = define(library, "negate(Tensor(a!) x) -> ()", negate, lambda x: None)
    check_op(op, by_data, dtypes=[torch.float32], skip=alone("symbolic"))


def test_an_operator_that_writes_through_a_neg_view_is_not_blamed_for_torch(library: torch.library.Library) -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.add_(x).clone()

    op = define(library, "into(Tensor x, Tensor(a!) y) -> Tensor", add)
    with pytest.raises(RuntimeError, match="is_same"):  # what torch says itself
        op(torch.ones(2), torch._neg_view(torch.ones(2)))
    check_op(op, add, shapes={"x": ("...",), "y": ("...",)}, skip=alone("values", "layout", "accepts", "written"))


def test_dtypes_that_are_refused_on_purpose(library: torch.library.Library) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError("x must be float32 or float64")
        return x.clone()

    op = define(library, "copy(Tensor x) -> Tensor", kernel)
    with pytest.raises(CheckFailure, match=r"if that is meant, say dtypes=\[torch.float32, torch.float64\]"):
        check_op(op, torch.clone, skip=alone("values", "accepts"))


def test_what_is_wrong_with_any_number_of_threads_is_not_theirs(library: torch.library.Library) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.numel() == 100_003 else x.clone()

    op = define(library, "large(Tensor x) -> Tensor", kernel)
    with pytest.raises(CheckFailure) as caught:
        check_op(op, torch.clone, dtypes=[torch.float32], skip=alone("sizes", "threads"))
    assert [violation.check for violation in caught.value.violations] == ["sizes"]


def test_one_complaint_is_whole_and_the_others_a_line() -> None:
    with pytest.raises(CheckFailure) as caught:
        check_op(custom_op("test_shapes::half", mutates_args=())(half), lambda x: x * 2, dtypes=[torch.float32])
    failure = caught.value
    assert len(failure.violations) > 2
    text = str(failure)
    assert text.count("reproduce:") == 1
    assert len(text.splitlines()) == len(str(failure.violations[0]).splitlines()) + len(failure.violations) + 1
    for violation in failure.violations:
        assert violation.sentence in text
        assert repr(violation.case) in text


def half(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous() / 2)[:-1] if x.dim() else x / 2


def test_what_is_fitted_does_not_grow_while_it_is_shrunk() -> None:
    shapes = Shapes({"x": ("N", 4)})
    call = Call((TensorPlan((50, 4), offset=3, neg=True, seed=7),))
    shrunk = shrink(call, lambda call: call.plans[0].shape[0] >= 5, fit=lambda call: shapes.fit(call, ["x"]), seconds=9)
    assert shrunk == Call((TensorPlan((5, 4)),))


def test_the_least_bound_of_a_size_counts() -> None:
    shapes = Shapes({"x": ("N<=5", 4), "y": ("N<=300",)})
    assert shapes.fit(Call((TensorPlan((100, 4)),)), ["x"]).plans[0].shape[0] <= 5


def test_a_shape_of_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes are of tensors, and tensors is a List\[Tensor\]"):
        check_op(torch.ops.aten.cat, torch.cat, shapes={"tensors": ("N",)})


def test_a_given_call_has_the_shapes_too() -> None:
    calls = [Call((TensorPlan((2, 3)), TensorPlan((4,))))]
    with pytest.raises(ValueError, match="inputs: a call must have the shapes that shapes= says"):
        check_op(torch.ops.aten.mv, torch.mv, inputs=calls, shapes={"self": ("N", "M"), "vec": ("M",)})


def test_no_module_has_the_name_of_what_is_offered() -> None:
    modules = {each.name for each in pkgutil.iter_modules(testing.__path__)}
    assert modules.isdisjoint(testing.__all__)
