"""The quick tier: a test here is pure and in this process, and takes at most seconds; this sees to it."""

from __future__ import annotations

import multiprocessing.process
import sys
import time
from collections.abc import Generator
from typing import Any

import grpc
import grpc.aio
import pytest

PROCESSOR_S = 6.0
"""The processor time that a test may take: unlike a clock on the wall, it is the same on a busy machine."""

OUTSIDE = {
    "os.exec": "becomes another process",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "os.posix_spawn": "starts a process",
    "socket.bind": "takes an address for a socket",
    "subprocess.Popen": "starts a process",
}
"""Python's audit events that leave this process."""

_running = ""
"""The quick test that runs."""

_seen: list[str] = []
"""What the running test was refused; it fails even if it swallowed that."""


def _refuse(what: str) -> None:
    if _running:
        _seen.append(f"{_running} {what}: a test that does belongs in tests/processes, not in tests/unit")
        raise AssertionError(_seen[-1])


def _refuse_audited(event: str, _: tuple[Any, ...]) -> None:
    if event in OUTSIDE:
        _refuse(OUTSIDE[event])


def _refuse_calls(owner: Any, name: str, what: str) -> None:
    """For what Python does not audit."""
    original = getattr(owner, name)

    def refused(*args: Any, **options: Any) -> Any:
        _refuse(what)
        return original(*args, **options)

    setattr(owner, name, refused)


sys.addaudithook(_refuse_audited)
_refuse_calls(multiprocessing.process.BaseProcess, "start", "starts a process")
_refuse_calls(grpc, "server", "starts a gRPC server")
_refuse_calls(grpc.aio, "server", "starts a gRPC server")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    return (yield from _watched(item))


def _watched(item: pytest.Item) -> Generator[None]:
    global _running
    _running, before = item.nodeid, time.process_time()
    try:
        yield
    finally:
        _running, taken = "", time.process_time() - before
        refused = list(_seen)
        _seen.clear()
    if refused:
        pytest.fail(refused[0], pytrace=False)
    if taken > PROCESSOR_S:
        pytest.fail(
            f"{item.nodeid} took {taken:.1f} s of a processor, and a quick test at most {PROCESSOR_S:g} s:"
            " make it smaller, or move it to tests/processes",
            pytrace=False,
        )
