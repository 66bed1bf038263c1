"""Damaged and forged packages: a right result or a named error; never a crash, a hang, or a file elsewhere."""

from __future__ import annotations

import collections
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import support_fuzz
import torch
from support_build import ROOT, run_python

import identity_conv


def check(package: Path, folder: Path, seed: int, count: int) -> None:
    (folder / "cases").mkdir()
    done = run_python(Path(support_fuzz.__file__), package, folder / "cases", str(seed), str(count))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"after {lines[-1:]}: {done.stderr[-2000:]}"
    outcomes = collections.Counter(tuple(line.split(maxsplit=1)) for line in lines)
    named = {
        "right",
        "damaged",
        "not-a-package",
        "format",
        "host",
        "library-not-loaded",
        "library-conflict",
        "not-found",
    }
    assert {outcome for _, outcome in outcomes} <= named, outcomes
    assert len(lines) == count
    # What a digest covers is never taken as it is.
    refused = sum(number for (_, outcome), number in outcomes.items() if outcome != "right")
    assert refused > 0.9 * count, outcomes
    assert {path.name for path in (folder / "cases").iterdir()} <= {"case0.pt2", "case1.pt2"}
    assert not list(folder.rglob("*escaped*"))


def test_files(packages: dict[str, Path], tmp_path: Path) -> None:
    check(packages["cpu"], tmp_path, seed=6, count=400)


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
def test_thousands_of_files(packages: dict[str, Path], tmp_path: Path, seed: int) -> None:
    check(packages["cpu"], tmp_path, seed=1000 + seed, count=1000)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build with AddressSanitizer and UBSan of the runtime and the two programs that fuzz it."""
    build = tmp_path_factory.mktemp("sanitized")
    configure = ["cmake", "-S", ROOT / "tests" / "cpp", "-B", build, "-DIDENTITY_CONV_SANITIZE=ON",
                 "-DIDENTITY_CONV_UNIT_TESTS=OFF", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
                 f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]  # fmt: skip
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", build, "-j2", "--target", "open_each", "run_each"], check=True)
    return build


def run_sanitized(*command: object) -> list[str]:
    environment = {"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-5000:]
    assert "runtime error" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake isn't installed")
def test_files_under_sanitizers(sanitized: Path, packages: dict[str, Path], tmp_path: Path) -> None:
    for seed in range(4):
        folder = tmp_path / f"cases{seed}"
        folder.mkdir()
        files = []
        for number, (_, data) in enumerate(support_fuzz.cases(packages["cpu"], 2000 + seed, 500)):
            files.append(folder / f"{number}.pt2")
            files[-1].write_bytes(data)
        lines = run_sanitized(sanitized / "open_each", packages["cpu"], *files)
        assert len(lines) == 501
        assert lines[0].startswith("right")
        shutil.rmtree(folder)


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake isn't installed")
def test_inputs_under_sanitizers(sanitized: Path, packages: dict[str, Path]) -> None:
    for seed in range(4):
        (line,) = run_sanitized(sanitized / "run_each", packages["cpu"], seed, 1000)
        computed, refused = (int(word) for word in line.split() if word.isdigit())
        assert computed > 100
        assert refused > 100
        assert computed + refused == 1000


@pytest.mark.parametrize("case", range(40))
def test_inputs(package: identity_conv.Package, case: int) -> None:
    check_input(package, case)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_thousands_of_inputs(package: identity_conv.Package) -> None:
    for case in range(1000, 6000):
        check_input(package, case)


def check_input(package: identity_conv.Package, case: int) -> None:
    """Legal and illegal tensors, by a seed: computed rightly, or refused by one sentence."""
    chance = random.Random(case)
    sizes = [chance.choice([0, 1, 2, 3, 5, 64, 65, 600]) if chance.random() < 0.5 else usual for usual in (2, 3, 8, 9)]
    sizes = sizes[: chance.choice([4, 4, 4, 3, 0])] + [2] * chance.choice([0, 0, 0, 1])
    if torch.Size(sizes).numel() > 1 << 22:
        sizes[0] = 0
    dtype = chance.choice(
        [torch.float32] * 5 + [torch.float64, torch.int64, torch.bfloat16, torch.complex64, torch.bool]
    )
    x = torch.zeros(sizes, dtype=dtype) if chance.random() < 0.1 else torch.ones(sizes).mul(chance.random()).to(dtype)
    if x.dim() > 1 and chance.random() < 0.5:
        x = chance.choice(
            [x.transpose(0, -1), x[..., ::2], x.flip(0), x[:1].expand(min(4, 4 * len(x)), *x.shape[1:]), x.mT]
        )
    try:
        y, refusal = package(x), None
    except identity_conv.InputError as error:
        y, refusal = None, str(error)
    except identity_conv.ExecutionError:
        assert 0 in x.shape[2:]  # torch's convolution says of such an image that its kernel is larger
        return
    if refusal is None:
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
    else:
        assert "input" in refusal
        assert "\n" not in refusal


@pytest.fixture(scope="module")
def package(packages: dict[str, Path]) -> identity_conv.Package:
    return identity_conv.load_package(packages["cpu"])
