"""identity-conv-run: the package without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support_package import without_libraries
from test_package import close_to

import identity_conv


def run(*command: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


def test_the_same_output_where_no_python_can_be_found(
    device: str, packages: dict[str, Path], program: Path, tmp_path: Path
) -> None:
    x, y = torch.randn(4, 3, 7, 5), tmp_path / "y.pt"
    torch.save(x, tmp_path / "x.pt")
    command = [program, packages[device], "--input", tmp_path / "x.pt", "--output", y]
    done = run("env", "-i", *command, "--repeat", 20)
    assert done.returncode == 0, done.stderr
    result = torch.load(y)
    torch.testing.assert_close(result.cpu(), x, **close_to(x.to(device)))
    assert torch.equal(result.cpu(), identity_conv.load_package(packages[device])(x.to(device)).cpu())
    assert re.search(r"first result \d+\.\d+ s after start", done.stdout)
    assert re.search(r"median \d+\.\d+ us a call over 20 calls ", done.stdout)
    assert " us a call over 1 call " in run("env", "-i", *command, "--repeat", 1).stdout


def test_neither_program_nor_library_needs_python(program: Path, library: Path) -> None:
    for file in (program, library):
        needed = [line for line in run("readelf", "-d", file).stdout.splitlines() if "NEEDED" in line]
        assert needed
        assert not [line for line in needed if "python" in line]
        assert " Py" not in run("nm", "-D", "--undefined-only", file).stdout


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2),
        torch.arange(48, dtype=torch.float32).reshape(2, 3, 2, 4)[..., 1:3],
        torch.arange(24, dtype=torch.float32).reshape(2, 2, 2, 3).permute(0, 3, 1, 2),
        torch.zeros(1, 3, 1, 1),
        torch.zeros(0, 3, 2, 2),
    ],
    ids=["plain", "slice", "channels last", "single pixel", "empty"],
)
def test_tensor_files_go_round(packages: dict[str, Path], program: Path, tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save(tensor, tmp_path / "x.pt")
    done = run(program, packages["cpu"], "--input", tmp_path / "x.pt", "--output", tmp_path / "y.pt")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), tensor)


def test_refusals_are_one_sentence_and_leave_no_output(
    packages: dict[str, Path], program: Path, tmp_path: Path
) -> None:
    x, bad, text = tmp_path / "x.pt", tmp_path / "bad.pt", tmp_path / "text.pt"
    torch.save(torch.randn(2, 3, 8, 8), x)
    torch.save(torch.randn(2, 4, 8, 8), bad)
    text.write_text("text")
    package, y = packages["cpu"], tmp_path / "y.pt"
    bare, fifo = without_libraries(package, tmp_path / "bare.pt2"), tmp_path / "fifo.pt"
    os.mkfifo(fifo)
    out = ["--output", y]
    cases = [
        ([tmp_path / "no.pt2", "--input", x, *out], 1, "no.pt2: no such file"),
        ([bare, "--input", x, *out], 1, "which no loaded library registers"),
        ([package, "--verify", "--input", fifo, *out], 1, "fifo.pt: is not a regular file"),
        ([package, "--input", x, "--output", ""], 2, "--output must name a file"),
        ([package, "--input", x, *out, *out], 2, "--output is one file, which holds every output: give it once"),
        ([package, "--input", x], 2, "--output, --repeat or --verify is needed"),
        ([package, "--library", tmp_path / "no.so", "--input", x, *out], 1, "cannot load the operator library"),
        ([package, "--input", bad, *out], 1, "input x: size of dimension 1 must be 3, got 4"),
        ([package, "--input", text, *out], 1, "is not a file of tensors as torch.save writes it"),
        ([package, "--input", x, "--input", x, *out], 1, "number of input tensors must be 1"),
        ([package, "--input", x, "--output", tmp_path / "no" / "y.pt"], 1, "cannot be written"),
        (
            [package, "--input", x, *out, "--repeat", "0"],
            2,
            "--repeat must be a positive integer",
        ),
        ([package, "--input", x, *out, "--repeat", "1e3"], 2, "--repeat must be a positive"),
        ([package, "--bogus"], 2, "no option --bogus"),
        ([], 2, "a package is needed"),
    ]
    for arguments, status, sentence in cases:
        done = run(program, *arguments)
        assert done.returncode == status, (arguments, done.stderr)
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("identity-conv-run: ")
        assert not list(tmp_path.glob("y.pt*"))


def test_help_says_how(program: Path) -> None:
    done = run(program, "--help")
    assert done.returncode == 0
    for option in ("--library", "--input", "--output", "--repeat", "--version"):
        assert option in done.stdout


def test_says_its_version_and_torchs(program: Path) -> None:
    done = run("env", "-i", program, "--version")
    version = f"version {identity_conv.__version__}, torch {torch.__version__.partition('+')[0]}"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"identity-conv-run, {version}\n", "")


@pytest.mark.gpu
def test_a_package_for_cuda_where_no_device_is_visible(
    packages: dict[str, Path], program: Path, tmp_path: Path
) -> None:
    torch.save(torch.randn(2, 3, 8, 8), tmp_path / "x.pt")
    command = [program, packages["cuda"], "--input", tmp_path / "x.pt", "--repeat", "1"]
    done = run(*command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert "compiled for cuda, and no such device is visible here" in done.stderr


@pytest.mark.night
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake isn't installed")
def test_cmake_builds_the_same(packages: dict[str, Path], tmp_path: Path) -> None:
    sources = Path(identity_conv.__file__).parent.parent / "src"
    build = tmp_path / "build"
    subprocess.run(
        ["cmake", "-S", sources, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"], check=True
    )
    subprocess.run(["cmake", "--build", build, "-j2"], check=True)
    torch.save(torch.randn(2, 3, 8, 8), tmp_path / "x.pt")
    done = run(
        build / "identity-conv-run", packages["cpu"], "--input", tmp_path / "x.pt", "--output", tmp_path / "y.pt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), torch.load(tmp_path / "x.pt"))
