"""Peers that word as much as they can, each time something else: the log, the memory and the run bear it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from afl.errors import ExitCode
from afl.v1 import federation_pb2 as pb
from support import Federation
from support.raw_client import RawClient

SECONDS = 8.0
MOST_LOG_BYTES = 1_000_000
MOST_GROWTH = 1.3
INSIDER = 2
CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 20, "examples": 16}},
    "algorithm": {"name": "afl-br", "rounds": 20, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 20},
}


def worded(number: int) -> str:
    return f"{number}\x1b]52;c;ZXZpbA==\x07\x1b[2J\u202e\nforged " + "x" * 100_000


def stranger(port: int, number: int) -> None:
    with RawClient(port) as client:
        client.send(join=client.join_message([INSIDER], package_version=worded(number), task=worded(number)))
        client.goodbye()


def insider(port: int, number: int) -> None:
    """It speaks for a worker."""
    with RawClient(port) as client:
        client.join([INSIDER])
        for _ in range(3):
            client.send(failure=pb.Failure(worker=INSIDER, message=worded(number), traceback=worded(number)))
        client.send(goodbye=pb.Goodbye(reason=worded(number)))
        client.wait_for_end()


def flooded(attack: Callable[[int, int], None], port: int) -> threading.Thread:
    def go_on() -> None:
        until, number = time.monotonic() + SECONDS, 0
        while time.monotonic() < until:
            number += 1
            with contextlib.suppress(AssertionError):
                attack(port, number)

    thread = threading.Thread(target=go_on)
    thread.start()
    return thread


@pytest.mark.long
def test_what_peers_word_fills_neither_the_log_nor_the_memory(tmp_path: Path) -> None:
    with Federation(CONFIG, tmp_path) as federation:
        federation.start("0-1")
        federation.wait_until(lambda status: status["workers_missing"] == [INSIDER])
        server = psutil.Process(federation.server.pid)
        stranger(federation.port, 0)
        insider(federation.port, 0)
        before = server.memory_info().rss
        for thread in [flooded(stranger, federation.port), flooded(insider, federation.port)]:
            thread.join()
        assert federation.metrics()["afl_refused_sessions_total"] > 10
        assert server.memory_info().rss < MOST_GROWTH * before
        written = federation.server.text
        assert len(written) < MOST_LOG_BYTES
        assert written.replace("\n", "").isprintable()
        assert "\\\\x1b]52;c;" in written, "what was said is there, as text"
        federation.start(str(INSIDER))
        federation.server.expect(ExitCode.OK)
