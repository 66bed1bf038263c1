"""Custom operators on several processes: DTensor, data, tensor and pipeline parallel, checkpoints, by torchrun."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import distributed_worker
import pytest
import torch
import torch.distributed as dist
from support_build import environment, run_python, write_program

from identity_conv import scaling, sharding, toolchain

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@functools.cache
def outcomes(device: str, world: int) -> list[dict[str, str]]:
    """What each rank says of each scenario: one torchrun for all, since starting ranks takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run(
            [sys.executable, *command, distributed_worker.__file__, device, folder],
            env=environment({"OMP_NUM_THREADS": "1"}),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    assert len(found) == world, done.stderr
    return found


@pytest.mark.parametrize("scenario", [each.__name__ for each in distributed_worker.SCENARIOS])
@pytest.mark.parametrize(
    ("device", "world"),
    [("cpu", 2), pytest.param("cpu", 4, marks=pytest.mark.night), pytest.param("cuda", 2, marks=TWO_GPUS)],
)
def test_equals_one_process(device: str, world: int, scenario: str) -> None:
    said = [rank.get(scenario, "never reached") for rank in outcomes(device, world)]
    assert said == ["ok"] * world, "\n".join(said)


@pytest.mark.parametrize("ranks", [scaling, distributed_worker], ids=["bench scaling", "these tests"])
def test_nccl_is_told_the_gpu_of_a_rank(ranks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: asked.append((backend, kwargs)))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(scaling, "run", lambda device: iter(()))
    monkeypatch.setattr(distributed_worker, "SCENARIOS", [])
    monkeypatch.setattr(distributed_worker, "DEVICE", "cuda")
    monkeypatch.setattr(sys, "argv", ["scaling", "cuda"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks.main()
    gpu, (backend, options) = asked
    assert (gpu, backend, options["device_id"]) == (torch.device("cuda", 1), "nccl", gpu)


def test_rules_wait_for_the_import_of_dtensor() -> None:
    code = """
import sys, identity_conv
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed.tensor as dtensor
rules = dtensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert torch.ops.my_ops.identity_conv_op.default in rules
"""
    done = run_python("-c", f"import torch{code}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sharding.pointwise("my_ops::nothing"), "op must be a registered operator, .* got 'my_ops::nothing'"),
        (lambda: sharding.pointwise("nothing"), "op must be a registered operator, .* got 'nothing'"),
        (lambda: sharding.pointwise("aten::cat"), "not lists of them"),
        (lambda: sharding.pointwise("aten::ones"), "op must take a tensor"),
        (
            lambda: sharding.pointwise("my_ops::identity_conv_op", keeps_partial=["mean"]),
            "keeps_partial may name sum, avg, product, max, min, got mean",
        ),
        (
            lambda: sharding.reduces("my_ops::identity_conv_op", 0, partial="mean"),
            "partial must be one of sum, avg, product, max, min or None, got 'mean'",
        ),
    ],
)
def test_wrong_rules_are_refused(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("killed", [False, True], ids=["all live", "one is killed meanwhile"])
def test_ranks_of_a_torchrun_build_once_on_a_cold_cache(
    killed: bool, source: Path, cache: Path, tmp_path: Path
) -> None:
    log, folder = tmp_path / "log", tmp_path / "loaded"
    folder.mkdir()
    compiler = write_program(
        tmp_path / "bin" / "g++",
        f'case "$*" in *" -c "*) echo compiled >> {log}; sleep 1;; esac; exec {toolchain.find_cxx()} "$@"',
    )
    script = tmp_path / "rank.py"
    script.write_text(f"""
import ctypes, os, pathlib, signal, threading, time
import _identity_conv_entry
from identity_conv import Extension

def end_as_it_is_compiled():
    while not os.path.exists({str(log)!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)  # torchrun ends the other ranks, one of which builds, and starts all again

if {killed} and os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "00":
    threading.Thread(target=end_as_it_is_compiled, daemon=True).start()
assert ctypes.CDLL(str(Extension("tiny", [{str(source)!r}]).build())).answer() == 42
pathlib.Path({str(folder)!r}, os.environ["RANK"]).touch()
""")
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--nproc-per-node", "4", "--max-restarts", "1", script],
        env=environment({"OMP_NUM_THREADS": "1", "CXX": compiler}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "3"]
    assert log.read_text().count("compiled") == 1 + killed
