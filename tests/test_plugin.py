"""The pytest plugin: its fixtures, its marker, its coverage table, and the calls that it keeps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import _identity_conv_pytest
import hypothesis
import pytest
import torch
from support_build import ROOT

from identity_conv.testing import Call, State, TensorPlan, Violation, failures, session
from identity_conv.testing.coverage import Coverage
from identity_conv.testing.report import LISTENERS, CheckRun, Report

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "_identity_conv_pytest", "-p", "no:cacheprovider")

#: Two operators in Python: `right`, and `wrong` on tensors with an offset.
OPERATORS = """
import pytest
import torch
from identity_conv.testing import Call, TensorPlan
from identity_conv.testing.registry import CHECKS

@torch.library.custom_op("plugin::right", mutates_args=())
def right(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@torch.library.custom_op("plugin::wrong", mutates_args=())
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.storage_offset() == 0 else torch.zeros_like(x)

for op in (right, wrong):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: grad.clone())

SOME = {
    "inputs": [Call((TensorPlan((3,)),)), Call((TensorPlan((5,), offset=2),))],
    "skip": {name: "too slow for this" for name in CHECKS if name not in ("values", "layout", "alias")},
}
"""


def test_loading_it_imports_neither_torch_nor_the_package(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it():
            assert "_identity_conv_pytest" in sys.modules
            assert not {"torch", "numpy", "identity_conv"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=1)
    assert "kernel" not in result.stdout.str()
    assert not (pytester.path / ".kernel_corpus").exists()


def test_a_spec_is_checked_and_what_fails_is_looked_at_first_the_next_time(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        OPERATORS
        + """
seen = []

@pytest.mark.kernel_spec(right, torch.clone)
def test_right(check_kernel, device):
    report = check_kernel(**SOME)
    assert {run.device for run in report.runs} == {device}

@pytest.mark.kernel_spec(wrong, torch.clone)
def test_wrong(check_kernel):
    from identity_conv.testing import report
    report.LISTENERS.append(seen.append)
    try:
        check_kernel(**SOME)
    finally:
        report.LISTENERS.remove(seen.append)
        print("looked at", len(seen), "times", seen[0].cases, "calls first")
"""
    )
    first = pytester.runpytest_subprocess(*PLUGIN, "-rA")
    first.assert_outcomes(passed=1 + torch.cuda.is_available(), failed=1, skipped=1 - torch.cuda.is_available())
    first.stdout.fnmatch_lines(["*CheckFailure: plugin.wrong.default: *layout*", "looked at 1 times*"])
    kept = list(pytester.path.glob(".kernel_corpus/plugin.wrong.default/*/call.json"))
    assert kept
    records = [json.loads(file.read_text()) for file in kept]
    assert "layout" in [record["check"] for record in records]

    # Nothing that is drawn fails now, but for what is kept.
    module = pytester.path / "test_a_spec_is_checked_and_what_fails_is_looked_at_first_the_next_time.py"
    module.write_text(module.read_text().replace("TensorPlan((5,), offset=2)", "TensorPlan((5,))"))
    second = pytester.runpytest_subprocess(*PLUGIN, "-rA", "-k", "wrong")
    second.assert_outcomes(failed=1)
    module.write_text(module.read_text().replace("x.storage_offset() == 0", "True"))
    third = pytester.runpytest_subprocess(*PLUGIN, "-rA", "-k", "wrong")
    third.assert_outcomes(passed=1)
    third.stdout.fnmatch_lines(["looked at 2 times*"])


def test_the_coverage_names_what_was_never_reached(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        OPERATORS
        + """
from identity_conv.testing import check_op

def test_directly():
    check_op(right, torch.clone, **SOME)
"""
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "--kernel-coverage")
    result.assert_outcomes(passed=1)
    text = result.stdout.str()
    table = next(line for line in text.splitlines() if line.startswith("float32"))
    assert int(table.split()[1]) >= 2  # checks that looked at a dense one
    assert int(table.split()[3]) > 0  # with an offset
    assert int(table.split()[2]) == 0  # permuted
    assert "float64, float16" in next(line for line in text.splitlines() if line.startswith("  values ("))


def test_the_coverage_says_apart_what_was_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        OPERATORS
        + """
from identity_conv.testing import check_op

def halves(x):
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError("x must be float32, float16 or bfloat16")
    return x.clone()

def test_directly():
    skip = {name: "too slow for this" for name in CHECKS if name != "values"}
    check_op(right, halves, dtypes=[torch.float32, torch.float16], skip=skip)
"""
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "--kernel-coverage")
    result.assert_outcomes(passed=1)
    (left_out,) = (line for line in result.outlines if line.startswith("left out by dtypes, or refused"))
    assert {"bfloat16", "float64", "bool"} <= set(left_out.rpartition(": ")[2].split(", "))
    shown = result.outlines[result.outlines.index(left_out) + 1 :]
    assert not any("float64" in line or "bfloat16" in line for line in shown)
    assert any(line.startswith("float16 ") for line in shown)
    assert not any("in any layout" in line for line in shown)


@pytest.mark.parametrize(
    ("marker", "told"), [("", "none"), ("@pytest.mark.kernel_spec('my::op', dtypes=[])", "kernel_spec('my::op')")]
)
def test_a_test_without_a_spec_is_told(marker: str, told: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"import pytest\n{marker}\ndef test_it(check_kernel):\n    check_kernel()\n")
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [f"*check_kernel needs the marker kernel_spec(op, reference, [*][*]options), got {told}*"]
    )


@pytest.mark.parametrize(("profile", "examples"), [("dev", 50), ("ci", 100), ("night", 5000)])
def test_each_profile_is_there_once_hypothesis_is(profile: str, examples: int) -> None:
    _identity_conv_pytest.register_profiles()
    chosen = hypothesis.settings.get_profile(f"identity_conv-{profile}")
    assert (chosen.max_examples, chosen.deadline) == (examples, None)
    assert "_identity_conv_pytest:register_profiles" in (ROOT / "pyproject.toml").read_text()


def test_a_chosen_profile_is_hypothesis_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import settings

        def test_it():
            assert settings().max_examples == 5000
        """
    )
    pytester.runpytest_subprocess(*PLUGIN, "--kernel-profile=night").assert_outcomes(passed=1)


class TestKeptCalls:
    CALLS = (
        Call((TensorPlan((2, 3), torch.complex64, permutation=(1, 0), conj=True, cells=((0, "nan"),)),)),
        Call((TensorPlan((4,)), [TensorPlan(()), TensorPlan((0,), torch.bool)], 2, None), {"alpha": 1.5, "b": "x"}),
        Call(((1, 2), 1 + 2j, float("inf"), torch.int8, torch.strided, torch.device("cpu"), torch.channels_last)),
        Call((TensorPlan((2,)), TensorPlan((2,))), shared=True),
        Call((State("my_ops.IdentityConvClass", {"channels": 3}), TensorPlan((1,)))),
    )

    def test_what_is_kept_is_what_is_read(self, tmp_path: Path) -> None:
        for call in self.CALLS:
            assert failures.keep(tmp_path, "ns.op.default", Violation("values", "wrong", case=call))
        assert sorted(map(repr, failures.kept(tmp_path, "ns.op.default"))) == sorted(map(repr, self.CALLS))
        assert not list(failures.kept(tmp_path, "ns.other.default"))

    def test_what_no_file_can_hold_is_left_out(self, tmp_path: Path) -> None:
        assert failures.keep(tmp_path, "ns.op", Violation("leak", "leaks")) is None
        assert failures.keep(tmp_path, "ns.op", Violation("values", "wrong", case=Call((object(),)))) is None
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"call": 3}', '{"call": {"torch": "save"}}', '{"call": {"plan": {"shape": -1}}}']
    )
    def test_a_damaged_file_is_named(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "ns.op" / "1").mkdir(parents=True)
        (tmp_path / "ns.op" / "1" / "call.json").write_text(text)
        with pytest.raises(ValueError, match=r"call\.json must describe a call"):
            list(failures.kept(tmp_path, "ns.op"))

    def test_the_program_without_python_takes_them(
        self, tmp_path: Path, packages: dict[str, Path], program: Path
    ) -> None:
        plan = TensorPlan((2, 3, 8, 9), offset=3, grad="leaf")
        place = failures.keep(tmp_path, "ns.op", Violation("layout", "wrong", case=Call((plan,))))
        assert place
        output = tmp_path / "y.pt"
        command = [program, packages["cpu"], "--input", place / "inputs.pt", "--output", output]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": "", "PYTHONHOME": ""})
        torch.testing.assert_close(torch.load(output), plan.build().detach())


def test_coverage_of_several_processes_is_one() -> None:
    def report(dtype: str) -> Report:
        return Report("op", "quick", 0, runs=[CheckRun("values", "cpu", 1, cells={(dtype, "dense"): 1})])

    home, away = Coverage(), Coverage()
    home.add(report("float32"))
    away.add(report("int64"))
    home.merge(json.loads(json.dumps(away.data())))
    assert set(home.reached["cpu", "values"]) == {("float32", "dense"), ("int64", "dense")}
    assert Coverage().lines() == ["no operator was checked"]


def test_a_session_that_is_over_listens_no_more(tmp_path: Path) -> None:
    before = list(LISTENERS)
    over = session.Session(tmp_path, "quick")
    assert len(LISTENERS) == len(before) + 1
    over.close()
    assert before == LISTENERS
