"""A worker that joins again: it goes on by the run's settings, and by none that it was not built for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from afl.config import config_from_mapping
from afl.config.address import Address
from afl.core.messages import NOWHERE
from afl.errors import AflError, ExitCode
from afl.v1 import federation_pb2 as pb
from afl.wire.settings import RunSettings
from afl_worker.connection import Connection
from afl_worker.options import WorkerOptions
from afl_worker.runtime import WorkerProcess

SETTINGS = RunSettings.of_config(
    config_from_mapping(
        {
            "workers": 2,
            "task": {"name": "synthetic"},
            "algorithm": {"name": "afl-br", "rounds": 10, "eta_w": 0.05, "eta_q": 0.1},
        }
    )
)


class Recorder:
    """A connection's end that notes what it is told."""

    def __init__(self) -> None:
        self.liveness: dict[str, float] = {}
        self.sent: dict[str, Any] = {}
        self.assembler: object = None

    def set_liveness(self, **seconds: float) -> None:
        self.liveness = seconds

    def send_control(self, **parts: Any) -> None:
        self.sent.update(parts)

    def close(self, *, drain_s: float = 0.0) -> None:
        pass


def process() -> WorkerProcess:
    """One that was welcomed with :data:`SETTINGS` before."""
    built = WorkerProcess(WorkerOptions((1,), Address("127.0.0.1", 1)))
    built._settings = SETTINGS
    vector = SimpleNamespace(
        dim=3, frozen_length=0, buffers=SimpleNamespace(size=0), layout_hash=lambda: b"layout"
    )
    built._participant = cast("Any", SimpleNamespace(vector=vector, reported=lambda _worker: NOWHERE))
    return built


def welcome(settings: RunSettings) -> pb.Welcome:
    return pb.Welcome(run_id="run-1", settings=settings.to_message())


def test_what_may_change_with_the_servers_start_is_taken() -> None:
    worker, connection = process(), Recorder()
    changed = replace(SETTINGS, chunk_bytes=4096, heartbeat=0.5, peer_timeout=7.0)
    worker._welcomed(cast("Connection", connection), welcome(changed))
    assert worker._settings == changed, "reports are cut into the new chunks"
    assert connection.liveness == {"heartbeat": 0.5, "peer_timeout": 7.0}
    assert connection.sent["ready"].layout_hash == b"layout"


def test_other_settings_than_those_it_was_built_for_are_refused_by_name_and_the_server_told() -> None:
    worker, connection = process(), Recorder()
    changed = replace(SETTINGS, parameters=replace(SETTINGS.parameters, eta_w=0.08), batch_size=3)
    with pytest.raises(AflError, match=r"not those that this worker began with: batch_size is") as refused:
        worker._welcomed(cast("Connection", connection), welcome(changed))
    assert "eta_w is 0.05 here and 0.08 at the server" in str(refused.value)
    assert "start this worker again" in str(refused.value)
    assert refused.value.exit_code == ExitCode.CONFIG
    assert "ready" not in connection.sent
    assert "eta_w is 0.05" in connection.sent["failure"].message
