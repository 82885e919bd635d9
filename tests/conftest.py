"""What all tests share: slow ones on request, time limits. What imports PyTorch is in ``surroundings``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        # So it is in the background of a script or under nohup, and what the tests start would inherit that.
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="also run the tests that take more than five seconds"
    )
    parser.addoption("--slow", action="store_true", help="also run these and the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands tests to others (pytest-xdist) does without: its start is waited for."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        config.pluginmanager.import_plugin("surroundings")


QUICK, PROCESSES = "unit", "processes"
"""The folders whose tests run in this process alone, and whose tests start some or take sockets.

All others run federations.
"""

QUICK_TIMEOUT_S = 120
"""Quick tests are held to seconds of processor time (tests/unit/conftest.py); this ends one that hangs."""

FEDERATION_TIMEOUT_S = 400
"""Federations are several processes that each import torch: on a busy machine a test may take minutes."""

TIMEOUTS = {QUICK: QUICK_TIMEOUT_S, PROCESSES: 120}


def folder_of(path: Path) -> str:
    """The folder of ``tests`` that a test lies in; it decides the tier."""
    return path.relative_to(TESTS).parts[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUTS.get(folder_of(item.path), FEDERATION_TIMEOUT_S)))
    left_out = {}
    if not config.getoption("--slow"):
        left_out["slow"] = pytest.mark.skip(reason="takes minutes; run with --slow")
        if not config.getoption("--long"):
            left_out["long"] = pytest.mark.skip(reason="takes more than five seconds; run with --long")
    for item in items:
        for kind in left_out.keys() & item.keywords:
            item.add_marker(left_out[kind])
