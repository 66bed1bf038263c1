"""The mutants are wrong, each in its own way, and the checker says so; the score of checkers is what the page says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from support_build import run_python

from identity_conv.testing import isolation, memory, mutants
from identity_conv.testing.mutants import MUTANTS, RIGHT, Kernel, Outcome, Score, Verdict
from identity_conv.testing.registry import CHECKS

RECORD = Path(__file__).parent / "records" / "kill_score.json"
PAGE = Path(__file__).parent.parent / "docs" / "testing.md"

ON_CPU = [kernel for kernel in MUTANTS if kernel.device == "cpu"]
ON_CUDA = [kernel for kernel in MUTANTS if kernel.device == "cuda"]

#: Of several kinds; `night` takes all.
SAMPLE = (
    "offset_ignored", "nan_payload", "overflow_16", "empty_aborts", "alias_earlier", "reads_behind", "writes_behind",
    "zeros_unwritten", "shared_scratch", "fake_fixed", "grad_expanded", "Shared", "rolled_32", "clipped_nan",
    "summed_fake", "scaled_gradient_unsigned",
)  # fmt: skip


def marked(kernels: list[Kernel]) -> list:
    """Those of the sample as they are, the others for the night."""
    return [
        pytest.param(kernel, marks=() if kernel.name in SAMPLE else pytest.mark.night, id=kernel.name)
        for kernel in kernels
    ]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    memory.guarded_allocator(build=True)


def right_one(kernel: Kernel) -> object:
    """The right operator of the mutant's device and reference, or the right class."""
    return next(each for each in RIGHT if _fits(each) == _fits(kernel)).get()


def _fits(kernel: Kernel) -> tuple[object, ...]:
    return kernel.device, kernel.is_class, kernel.reference


def present(kernels: list[Kernel]) -> list[Kernel]:
    return [kernel for kernel in kernels if mutants.has(kernel.needs) and "GiB" not in kernel.needs]


class TestTable:
    def test_it_has_mutants_of_every_kind(self) -> None:
        assert len(ON_CPU) >= 40
        assert len(ON_CUDA) >= 15
        assert max(Counter((kernel.device, kernel.name) for kernel in (*MUTANTS, *RIGHT)).values()) == 1
        for kernel in MUTANTS:
            assert kernel.bug
            assert kernel.witness
            assert {*kernel.checks} <= {*CHECKS}

    def test_every_operator_of_the_library_stands_in_it(self) -> None:
        mutants.load("cpu")
        schemas = torch._C._jit_get_all_schemas()
        registered = {each.name for each in schemas if each.name.startswith("identity_conv_mutants::")}
        listed = {k.name for k in (*MUTANTS, *RIGHT) if k.device == "cpu" and not k.is_class and "::" not in k.name}
        assert registered == {f"identity_conv_mutants::{name}" for name in listed}


class TestWitnesses:
    def test_each_proves_its_mutant_wrong(self) -> None:
        assert [kernel.name for kernel, wrong in mutants.witnessed(present(ON_CPU)) if not wrong] == []

    def test_none_proves_a_right_kernel_wrong(self) -> None:
        assert [kernel.name for kernel, wrong in mutants.witnessed(present(ON_CPU), right_one) if wrong] == []

    def test_autograd_that_has_begun_proves_nothing_wrong(self) -> None:
        # Its threads don't survive a fork; where no GPU is, a torch with CUDA has them once it has made fakes.
        program = f"""
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_mutants import mutants, named, right_one

with FakeTensorMode():
    torch.ones(1)
torch.ones(1, requires_grad=True).sum().backward()
print([wrong for _, wrong in mutants.witnessed(named("grad_missing", "tail_lost"), right_one)])
print([wrong for _, wrong in mutants.witnessed(named("grad_missing", "tail_lost"))])
"""
        done = run_python("-c", program)
        assert done.stdout.splitlines() == ["[False, False]", "[True, True]"], done.stderr

    @pytest.mark.gpu
    def test_each_proves_its_mutant_wrong_on_cuda(self) -> None:
        assert [kernel.name for kernel, wrong in mutants.witnessed(present(ON_CUDA)) if not wrong] == []

    @pytest.mark.gpu
    def test_none_proves_a_right_kernel_wrong_on_cuda(self) -> None:
        assert [kernel.name for kernel, wrong in mutants.witnessed(present(ON_CUDA), right_one) if wrong] == []


def caught(kernel: Kernel) -> tuple[str, ...]:
    return mutants.checked(kernel, seed=0).checks


class TestChecker:
    @pytest.mark.parametrize("kernel", marked([kernel for kernel in ON_CPU if "GiB" not in kernel.needs]))
    def test_a_mutant_is_caught_for_its_own_bug(self, kernel: Kernel) -> None:
        assert {*caught(kernel)} & {*kernel.checks}

    def test_a_fresh_process_has_the_other_objects_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(isolation, "fork_serves", lambda: False)
        assert "state" in caught(*named("Shared"))

    @pytest.mark.night
    def test_a_mutant_that_needs_much_memory_is_caught(self) -> None:
        for kernel in ON_CPU:
            if "GiB" in kernel.needs and mutants.has(kernel.needs):
                assert {*caught(kernel)} & {*kernel.checks}, kernel.name

    @pytest.mark.night
    @pytest.mark.parametrize("kernel", [kernel for kernel in RIGHT if kernel.device == "cpu"], ids=lambda k: k.name)
    def test_a_right_kernel_passes(self, kernel: Kernel) -> None:
        for seed in range(3):
            assert not mutants.checked(kernel, seed).complains

    @pytest.mark.gpu
    @pytest.mark.parametrize("kernel", present(ON_CUDA), ids=lambda kernel: kernel.name)
    def test_a_mutant_on_cuda_is_caught_for_its_own_bug(self, kernel: Kernel) -> None:
        assert {*caught(kernel)} & {*kernel.checks}

    @pytest.mark.gpu
    @pytest.mark.parametrize("kernel", [kernel for kernel in RIGHT if kernel.device == "cuda"], ids=lambda k: k.name)
    def test_a_right_kernel_on_cuda_passes(self, kernel: Kernel) -> None:
        assert not mutants.checked(kernel, 0).complains


def named(*names: str) -> list[Kernel]:
    return [next(each for each in (*MUTANTS, *RIGHT) if (each.name, each.device) == (name, "cpu")) for name in names]


class TestScore:
    def test_it_counts_what_a_checker_says(self, capsys: pytest.CaptureFixture[str]) -> None:
        def checker(kernel: Kernel, seed: int) -> Verdict:
            says = {"tail_lost": ("values",), "leak": ("values",), "copied": ("grad",), "composed": ()}
            return Verdict(says.get(kernel.name, ()), calls=10, died="SIGSEGV" if kernel.name == "exits" else "")

        kernels = named("tail_lost", "leak", "exits", "overlap", "copied", "composed")
        score = mutants.kill_score(checker, kernels, seeds=3)
        assert (score.mutants, score.caught, score.right_reason) == (4, 3, 1)
        assert score.missed == ["overlap"]
        assert score.for_another_reason == ["leak", "exits"]
        assert (score.false_alarms, score.right, score.calls) == (["copied"], 2, 60)
        printed = capsys.readouterr().out
        assert "checker: caught 3 of 4, for the right reason 1, false alarms 1 of 2 in 60 calls" in printed
        assert "missed: overlap" in printed

    def test_two_parts_make_a_whole(self) -> None:
        parts = [Score("c", (Outcome(kernel, Verdict(kernel.checks), 1.0),)) for kernel in named("leak", "copied")]
        assert (parts[0] + parts[1]).record()["caught"] == 1
        assert (parts[0] + parts[1]).seconds == 2.0

    @pytest.mark.parametrize(
        ("checker", "catches", "misses"),
        [
            (mutants.opcheck, ("fake_flat", "writes_input", "empty_aborts"), ("offset_ignored", "Forgets", "copied")),
            (mutants.make_tensor_and_gradcheck, ("tail_lost", "grad_twice", "empty_aborts"), ("nan_payload", "copied")),
        ],
    )
    @pytest.mark.night
    def test_the_others_catch_what_their_samples_show(self, checker, catches: tuple, misses: tuple) -> None:
        score = mutants.kill_score(checker, named(*catches, *misses))
        assert score.missed == [name for name in misses if name != "copied"]
        assert not score.false_alarms


class TestRecord:
    RECORDS = json.loads(RECORD.read_text())

    def ours(self) -> dict[str, dict]:
        """Of each device the record of check_op."""
        return {each["device"]: each for each in self.RECORDS if each["checker"] == mutants.checked.title}

    def test_the_page_shows_it(self) -> None:
        assert mutants.table(self.RECORDS) in PAGE.read_text()

    def test_the_page_counts_as_the_table_and_the_record_do(self) -> None:
        page, ours = " ".join(PAGE.read_text().split()), self.ours()
        assert f"has {len(ON_CPU)} wrong kernels on CPU and {len(ON_CUDA)} on CUDA" in page
        assert f"check_op was shown {ours['cuda']['mutants']} of the mutants" in page
        said = f"caught {ours['cpu']['caught']} of {ours['cpu']['mutants']}"
        assert said in (mutants.__doc__ or "")

    def test_check_op_misses_nothing_and_raises_no_false_alarm(self) -> None:
        ours = self.ours()
        without_needs = [kernel for kernel in ON_CPU if not kernel.needs]  # such as more memory than there was
        assert len(without_needs) <= ours["cpu"]["mutants"] <= len(ON_CPU)
        assert ours["cpu"]["calls"] > 100_000
        assert ours["cuda"]["mutants"] >= 15
        for record in ours.values():
            assert not record["missed"]
            assert not record["false_alarms"]
            assert record["right_reason"] >= 0.95 * record["mutants"]
