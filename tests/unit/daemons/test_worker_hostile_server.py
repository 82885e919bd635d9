"""A server that says what no configuration can be behind: the worker ends, and says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afl.config.address import Address
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.errors import ExitCode, PeerError, VersionError
from afl.v1 import federation_pb2 as pb
from afl.wire.settings import RunSettings
from afl_worker import runtime
from afl_worker.options import WorkerOptions
from afl_worker.runtime import Runtime

RIGHT = RunSettings(
    task="synthetic",
    task_options={},
    batch_size=4,
    evaluation_batch_size=64,
    threads=1,
    batch_oracles=False,
    parameters=AlgorithmSettings(
        3, 100, 10, 0.1, 0.01, CompressorChoice("top-k", {"ratio": 0.1}), CompressorChoice()
    ),
    chunk_bytes=1 << 20,
    heartbeat=10.0,
    peer_timeout=60.0,
)


class OneWelcome:
    """A connection over which a Welcome comes, and what is sent is kept."""

    is_open = True

    def __init__(self, welcome: pb.Welcome) -> None:
        self._welcome = welcome
        self.sent: list[str] = []

    def next_event(self, _: float | None) -> pb.Welcome:
        return self._welcome

    def send_control(self, **parts: object) -> None:
        self.sent += parts

    def close(self, *, drain_s: float = 0.0) -> None:
        self.sent.append(f"closed after {drain_s:g} s")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local_steps": 10**6 + 1}, "local_steps is 1000001; it must be from 1 to 1000000"),
        ({"threads": 2**31}, "threads is 2147483648; it must be from 1 to 1024"),
        ({"heartbeat": 1e300}, "heartbeat_seconds is 1e+300"),
        ({"heartbeat": 1e-300}, "heartbeat_seconds is 1e-300"),
        ({"peer_timeout": 1e300}, "peer_timeout_seconds is 1e+300"),
        ({"chunk_bytes": 2**32 - 4}, "chunk_bytes is 4294967292"),
        ({"workers": 2**32 - 1}, "workers is 4294967295"),
        ({"rounds": 2**64 - 1}, "rounds is 18446744073709551615"),
        ({"block": 10**400}, "block is 1000"),
        ({"local_steps": 10**30}, "local_steps is 1000"),
        ({"sampled": 10**30}, "sampled is 1000"),
        ({"task": "x" * 100_000}, "names a task or an algorithm xxx"),
        ({"task": "\x1b[2J"}, "\\x1b[2J: too long, or not printable"),
        ({"downlink": CompressorChoice("two\nlines")}, "two\\nlines: too long"),
    ],
)
def test_a_worker_ends_on_settings_that_cannot_be_used(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_run = {name: value for name, value in changes.items() if hasattr(RIGHT, name)}
    parameters = {name: value for name, value in changes.items() if name not in of_run}
    settings = replace(RIGHT, **of_run, parameters=replace(RIGHT.parameters, **parameters))
    connection = OneWelcome(pb.Welcome(run_id="run-1", seed=bytes(16), settings=settings.to_message()))
    monkeypatch.setattr(runtime, "Connection", lambda *_args, **_options: connection)
    options = WorkerOptions((0,), Address("127.0.0.1", 1), journal=tmp_path)
    with pytest.raises(PeerError) as caught:
        Runtime(options).run()
    assert caught.value.exit_code is ExitCode.REFUSED
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "goodbye" in connection.sent, "the server is told that it leaves"


def test_a_setting_of_a_later_version_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RIGHT.to_message()
    settings.algorithm_options = json.dumps({**json.loads(settings.algorithm_options), "future": 1})
    connection = OneWelcome(pb.Welcome(run_id="run-1", seed=bytes(16), settings=settings))
    monkeypatch.setattr(runtime, "Connection", lambda *_args, **_options: connection)
    options = WorkerOptions((0,), Address("127.0.0.1", 1), journal=tmp_path, give_up_after=0.01)
    with pytest.raises(VersionError, match=r"of another version: .* does not know 'future'") as caught:
        Runtime(options).run()
    assert caught.value.exit_code is ExitCode.VERSION


def test_settings_that_a_configuration_can_have_are_taken() -> None:
    replace(RIGHT, threads=1024, heartbeat=3600.0, peer_timeout=86400.0, chunk_bytes=1 << 24).check()
