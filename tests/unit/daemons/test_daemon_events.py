"""Events of faults that only a fault of the program brings about, on the worker."""

from __future__ import annotations

import logging
import queue
from typing import Any

import pytest

from afl_worker import connection
from afl_worker.connection import Connection, Lost


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of luck")


def the_event(caplog: pytest.LogCaptureFixture) -> tuple[str, bool]:
    """The one that was logged, and whether with a traceback."""
    (record,) = [record for record in caplog.records if record.name.startswith("afl.")]
    return record.event, record.exc_info is not None  # type: ignore[attr-defined]


def test_a_receiving_thread_that_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "lone_chunk_of_server", fails)
    stream: Any = Connection.__new__(Connection)
    stream._call, stream._inbox = [b"frame"], queue.SimpleQueue()
    with caplog.at_level(logging.ERROR):
        stream._receive()
    assert the_event(caplog) == ("receiver_failed", True)
    assert isinstance(stream.next_event(), Lost)
