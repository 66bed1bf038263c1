"""What all tests share: the device they run on, and the worked example's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from support_build import TINY
from torch.export import Dim

collect_ignore = ["examples"]  # projects of their own, which test_examples.py runs

settings.register_profile(
    "identity_conv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("night", parent=settings.get_profile("identity_conv"), derandomize=False, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "identity_conv"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves GPU tests out where there is no GPU, and night tests out unless asked for by marker."""
    left_out = set()
    if not torch.cuda.is_available():
        left_out |= {item for item in items if item.get_closest_marker("gpu")}
    if "night" not in config.getoption("markexpr"):
        left_out |= {item for item in items if item.get_closest_marker("night")}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: tests marked gpu are left out"
    return f"torch {torch.__version__}, GPU {gpu}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache, for this process and those that it starts."""
    monkeypatch.setenv("IDENTITY_CONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("IDENTITY_CONV_PREFIX", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source that compiles in a moment."""
    path = tmp_path / "tiny.cpp"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One package of IdentityModel for each device, with free batch, height and width."""
    import identity_conv

    free = ({0: Dim("n", max=64), 2: Dim("h", max=512), 3: Dim("w", max=512)},)
    found = {}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        model = identity_conv.IdentityModel().to(device)
        program = identity_conv.export(model, (torch.randn(2, 3, 8, 9, device=device),), dynamic_shapes=free)
        found[device] = identity_conv.compile_package(program, tmp_path_factory.mktemp(device) / "model.pt2")
    return found


@pytest.fixture(scope="session")
def program() -> Path:
    """identity-conv-run."""
    from identity_conv import targets

    return targets.program().build()


@pytest.fixture(scope="session")
def library() -> Path:
    """The worked example's library."""
    from identity_conv import targets

    return targets.operators().build()
