"""identity-conv run: a package over a folder of inputs, restartable, by any number of processes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support_build import CONSOLE_SCRIPT, environment, run_python, stderr_of

import identity_conv
from identity_conv import batch


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    for i in range(12):
        torch.save(torch.full((1 + i % 3, 3, 4, 5), float(i)), folder / f"{i}.pt")
    return folder


def check(inputs: Path, outputs: Path) -> None:
    """Every output is there, right, and nothing else is."""
    names = sorted(path.name for path in inputs.glob("*.pt"))
    assert sorted(path.name for path in outputs.iterdir()) == [".package", *names]
    for name in names:
        assert torch.equal(torch.load(outputs / name).cpu(), torch.load(inputs / name))


def test_is_restartable(packages: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    first = batch.run(packages["cpu"], inputs, outputs)
    assert (first.done, first.by_others, first.device) == (12, 0, "cpu")
    check(inputs, outputs)
    (outputs / "3.pt").unlink()
    torch.save(torch.full((1, 3, 4, 5), -1.0), inputs / "4.pt")
    again = batch.run(packages["cpu"], inputs, outputs)
    assert (again.done, again.by_others) == (2, 10)
    check(inputs, outputs)


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_shows_a_bar_on_a_terminal_alone(
    packages: dict[str, Path], inputs: Path, tmp_path: Path, terminal: bool
) -> None:
    run = (*CONSOLE_SCRIPT, "run", packages["cpu"], inputs, tmp_path / "outputs")
    shown = stderr_of(*run, terminal=terminal)
    assert b"identity_conv: 12 done on cpu in " in shown
    assert (b"12/12" in shown) == (b"\x1b[" in shown) == terminal
    if not terminal:
        assert shown.count(b"\n") == 1


def test_outputs_of_another_package_are_refused(packages: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    batch.run(packages["cpu"], inputs, tmp_path / "outputs")
    other = tmp_path / "model.pt2"
    identity_conv.compile_package(identity_conv.export(identity_conv.IdentityModel(), (torch.ones(1, 3, 4, 5),)), other)
    with pytest.raises(ValueError, match=r"outputs must be a folder for this package's outputs, and '.*outputs' has"):
        batch.run(other, inputs, tmp_path / "outputs")


def test_ranks_share_the_work(packages: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("identity-conv")
    run = [command, "run"] if command.exists() else [sys.executable, *CONSOLE_SCRIPT, "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*torchrun, *run, packages["cpu"], inputs, tmp_path / "outputs"],
        env=environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check(inputs, tmp_path / "outputs")
    said = [line.split(": ")[2].split() for line in done.stderr.splitlines() if ": rank " in line]
    assert len(said) == 2
    assert sum(int(words[0]) for words in said) == 12


# Slow calls, so that kills fall into them, and a line for each output that stands.
WORKER = """
import os, sys, time
import identity_conv
from identity_conv import batch
log = os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
call, write = batch._call, batch._write
def slow_call(package, file):
    time.sleep(0.05)
    return call(package, file)
def told_write(path, output):
    write(path, output)
    os.write(log, f"{path.name}\\n".encode())
batch._call, batch._write = slow_call, told_write
print("ready", flush=True)
batch.run(*sys.argv[1:4])
"""


def test_nothing_is_lost_or_done_twice_when_workers_are_killed(
    packages: dict[str, Path], inputs: Path, tmp_path: Path
) -> None:
    outputs, log, moments = tmp_path / "outputs", tmp_path / "log", random.Random(0)

    def start() -> subprocess.Popen[str]:
        arguments = [packages["cpu"], inputs, outputs, log]
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments], env=environment({}), stdout=subprocess.PIPE, text=True
        )

    workers = [start() for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    while not log.stat().st_size:
        time.sleep(0.01)
    for worker in workers[:2]:
        time.sleep(moments.uniform(0, 0.1))
        worker.send_signal(signal.SIGKILL)
    assert workers[2].wait(timeout=60) == 0  # it takes up what the others had begun
    for worker in workers:
        worker.communicate()
    check(inputs, outputs)
    assert max(Counter(log.read_text().split()).values()) == 1


def test_every_input_that_fails_is_named_and_the_others_are_done(
    packages: dict[str, Path], inputs: Path, tmp_path: Path
) -> None:
    torch.save(torch.zeros(1, 4, 4, 4), inputs / "wrong.pt")
    (inputs / "none.pt").write_bytes(b"no tensor")
    done = run_python(*CONSOLE_SCRIPT, "run", packages["cpu"], inputs, tmp_path / "outputs")
    assert done.returncode == 1
    assert "identity-conv: run: 2 of 14 inputs failed" in done.stderr
    assert "wrong.pt: input x: size of dimension 1 must be 3, got 4" in done.stderr
    assert "none.pt: it is no file of tensors as torch.save writes it" in done.stderr
    assert len(list((tmp_path / "outputs").glob("*.pt"))) == 12
    # What is done by now stays so, and the document says both.
    done = run_python(*CONSOLE_SCRIPT, "run", packages["cpu"], inputs, tmp_path / "outputs", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["done"], document["by_others"]) == (0, 12)
    assert document["failed"] == {
        str(inputs / "none.pt"): "it is no file of tensors as torch.save writes it",
        str(inputs / "wrong.pt"): "input x: size of dimension 1 must be 3, got 4",
    }
    (inputs / "none.pt").unlink()
    (inputs / "wrong.pt").unlink()
    batch.run(packages["cpu"], inputs, tmp_path / "outputs")
    assert len(list((tmp_path / "outputs").glob("*.pt"))) == 12


@pytest.mark.parametrize("given", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_arguments_by_position_and_by_name(given: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles:
        device = torch.device("cpu")

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    monkeypatch.setattr(batch, "load_package", lambda *args, **kwargs: Doubles())
    (tmp_path / "model.pt2").touch()
    x = torch.randn(2, 3)
    torch.save(given(x), tmp_path / "x.pt")
    assert batch.run(tmp_path / "model.pt2", tmp_path / "x.pt", tmp_path / "outputs").done == 1
    assert torch.equal(torch.load(tmp_path / "outputs" / "x.pt"), 2 * x)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": "nothing"}, "inputs must be a .pt file or a folder of them, and there is no '.*nothing'"),
        ({"inputs": "empty"}, "inputs must be a .pt file or a folder of them, and the folder '.*empty' has none"),
        ({"outputs": "inputs"}, "outputs must be another folder than that of the inputs, got .*inputs"),
    ],
)
def test_bad_folders(
    change: dict[str, str], sentence: str, packages: dict[str, Path], inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    folders = {"inputs": "inputs", "outputs": "outputs"} | change
    with pytest.raises((FileNotFoundError, ValueError), match=sentence):
        batch.run(packages["cpu"], tmp_path / folders["inputs"], tmp_path / folders["outputs"])
    assert not (tmp_path / "outputs").exists()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_rank_has_its_own_gpu(packages: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    said = []
    for rank in ("0", "1"):
        done = run_python(
            *CONSOLE_SCRIPT, "run", packages["cuda"], inputs, tmp_path / f"outputs{rank}", RANK=rank, LOCAL_RANK=rank
        )
        assert done.returncode == 0, done.stderr
        check(inputs, tmp_path / f"outputs{rank}")
        said.append(done.stderr)
    assert "12 done on cuda:0 " in said[0]
    assert "12 done on cuda:1 " in said[1]
