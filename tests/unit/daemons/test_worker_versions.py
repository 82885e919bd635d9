"""A worker of another version than the server that gives up while it waits for an answer."""

from __future__ import annotations

import time

import pytest

from afl.config.address import Address
from afl.core.messages import GoodbyeStatus
from afl.errors import VersionError
from afl_worker import runtime
from afl_worker.network.connection import Ended
from afl_worker.options import WorkerOptions
from afl_worker.reconnection import Carried


class Refusing:
    """The first connection ends since the versions differ; the next ones have no answer."""

    made = 0
    carried = Carried(0, 0, 0.0)

    def __init__(self, *_: object, **__: object) -> None:
        Refusing.made += 1

    def next_event(self, left: float | None) -> Ended | None:
        if Refusing.made == 1:
            return Ended("another version", GoodbyeStatus.OTHER_VERSION)
        assert left is not None
        time.sleep(left)
        return None

    def send_control(self, **_: object) -> None:
        pass

    def close(self, **_: object) -> None:
        pass


def test_it_ends_as_one_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "Connection", Refusing)
    monkeypatch.setattr(runtime, "VERSION_PAUSE_S", 0.01)
    worker = runtime.Runtime(WorkerOptions(server=Address("127.0.0.1", 1), workers=(0,), give_up_after=0.2))
    with pytest.raises(VersionError, match="the last try: another version"):
        worker.run()
    assert Refusing.made == 2
