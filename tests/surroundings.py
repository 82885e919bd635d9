"""What surrounds every test: a strict environment, and nothing left open."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from support.commands import prepare
from support.process import Process

QUICK = Path(__file__).with_name("unit")
"""Where no test starts a process."""

LEAK_GRACE_S = 5.0
"""How long what a module's tests have closed may take to be gone: gRPC's threads end a moment later."""

GRPC_OWN_DESCRIPTORS = 16
"""gRPC opens wake-up and poll descriptors at its first use in a process and keeps them."""


def pytest_configure(config: pytest.Config) -> None:
    examples = 100 if config.getoption("--slow") else 50
    hypothesis.settings.register_profile("tests", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """What has been imported is no test's garbage; to look through all of PyTorch for it takes long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """A gradient's bits depend on the number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_open(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No test module leaves a thread, a child process or a file descriptor behind."""
    if not request.path.is_relative_to(QUICK):
        prepare(tmp_path_factory.getbasetemp() / "compiled")
    before_threads = set(threading.enumerate())
    before_children = set(psutil.Process().children(recursive=True))
    before_files = _descriptors()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while (left := _left(before_threads, before_children, before_files)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not left, f"{request.path.name} leaves behind: {'; '.join(left)}"
    _no_traceback()


@pytest.fixture(autouse=True)
def no_traceback() -> Iterator[None]:
    """No process that a test has closed shows a traceback, but where the test says so."""
    yield
    _no_traceback()


def _no_traceback() -> None:
    found = list(Process.unexpected)
    Process.unexpected.clear()
    assert not found, "\n".join(found)


def _left(
    before_threads: set[threading.Thread],
    before_children: set[psutil.Process],
    before_files: dict[str, str],
) -> list[str]:
    threads = [f"thread {t.name}" for t in threading.enumerate() if t not in before_threads]
    there = psutil.Process().children(recursive=True)
    children = [f"process {child.pid}" for child in there if child not in before_children]
    opened = {number: what for number, what in _descriptors().items() if number not in before_files}
    own = [what for what in opened.values() if "eventfd" in what or "eventpoll" in what]
    files = [f"descriptor {number} ({what})" for number, what in opened.items() if what not in own]
    if len(own) > GRPC_OWN_DESCRIPTORS:
        files.append(f"{len(own)} event descriptors")
    return threads + children + files


def _descriptors() -> dict[str, str]:
    """What each open file descriptor of this process stands for."""
    found = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # noqa: PTH112, PTH208
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:
            continue
    return found
