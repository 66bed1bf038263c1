"""The pytest plugin, installed outside the package: loading it imports neither torch nor the package.

It adds the fixtures `device` and `check_kernel`, the marker `kernel_spec`, and the options `--kernel-profile`,
`--kernel-coverage` and `--kernel-corpus`. A session that uses none of them runs as without it.

Example::

    @pytest.mark.kernel_spec("my_kernels::scale", lambda x, factor: x * factor, skip={"grad": "not trained"})
    def test_scale(check_kernel):
        check_kernel()
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from identity_conv.testing.report import Report
    from identity_conv.testing.session import Session

_PROFILES = ("dev", "ci", "night")
_CORPUS = ".kernel_corpus"


def register_profiles() -> None:
    """What hypothesis calls when it is imported: its profiles ``identity_conv-dev``, ``-ci`` and ``-night``."""
    from hypothesis import settings

    settings.register_profile("identity_conv-dev", deadline=None, max_examples=50)
    settings.register_profile("identity_conv-ci", deadline=None, derandomize=True, print_blob=True)
    settings.register_profile("identity_conv-night", deadline=None, max_examples=5000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("identity_conv", "kernels checked by property (identity_conv)")
    group.addoption(
        "--kernel-profile",
        choices=_PROFILES,
        help="how much is looked at: dev is quick, ci the same every time, night much; default: ci where the "
        "environment variable CI is set, else dev; given here it is hypothesis' profile too",
    )
    group.addoption(
        "--kernel-coverage",
        action="store_true",
        help="at the end, show which dtypes and layouts the checks have reached, and which never",
    )
    group.addoption(
        "--kernel-corpus",
        metavar="DIR",
        help=f"where calls that failed are kept, to be looked at first the next time; default: {_CORPUS} beside the "
        "configuration file",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "kernel_spec(op, reference, **options): what the fixture check_kernel checks; options are those of "
        "identity_conv.testing.check_op, and with method='name' of check_class",
    )
    profile = config.getoption("kernel_profile")
    if profile:
        from hypothesis import settings

        register_profiles()  # also where the entry point for hypothesis isn't installed
        settings.load_profile(f"identity_conv-{profile}")


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(_SESSION, None)
    if session is not None:
        session.close()


_SESSION = pytest.StashKey["Session"]()


def _session(config: pytest.Config) -> Session:
    """The session's state, made when a test first asks for it."""
    if _SESSION not in config.stash:
        from identity_conv.testing.session import Session

        corpus = config.getoption("kernel_corpus")
        profile = config.getoption("kernel_profile") or ("ci" if os.environ.get("CI") else "dev")
        place = Path(corpus) if corpus else config.rootpath / _CORPUS
        config.stash[_SESSION] = Session(place, tier="full" if profile == "night" else "quick")
    return config.stash[_SESSION]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Listens from the first test on where the coverage is asked for: a test may call check_op itself."""
    if session.config.getoption("kernel_coverage"):
        _session(session.config)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """A type of device; the test is skipped where there is none of it."""
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")
    return request.param


@pytest.fixture
def check_kernel(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Checks what the marker `kernel_spec` declares, first with the calls that failed once.

    It takes further options of ``check_op``, returns its report, and raises its ``CheckFailure``. Where the test has
    the fixture `device`, it checks there.
    """
    marker = request.node.get_closest_marker("kernel_spec")
    if marker is None or len(marker.args) != 2:
        given = "none" if marker is None else f"kernel_spec({', '.join(map(repr, marker.args))})"
        raise pytest.UsageError(
            f"{request.node.nodeid}: check_kernel needs the marker kernel_spec(op, reference, **options), got {given}"
        )
    devices = [request.getfixturevalue("device")] if "device" in request.fixturenames else None
    session = _session(request.config)

    def check(**options: Any) -> Report:
        return session.check(*marker.args, **{"devices": devices, **marker.kwargs, **options})

    return check


# --- what a session with several processes (pytest-xdist) sends home ---


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("kernel_coverage") and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernel_coverage"] = _session(session.config).coverage.data()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    found = getattr(node, "workeroutput", {}).get("kernel_coverage")
    if found:
        _session(node.config).coverage.merge(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("kernel_coverage"):
        terminalreporter.section("kernel coverage")
        for line in _session(config).coverage.lines():
            terminalreporter.write_line(line)
