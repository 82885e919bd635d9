"""Events of faults that only a fault of the program or of the disk brings about."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from afl.config import config_from_mapping
from afl.core.randomness import SharedRandomness
from afl.errors import ExitCode, StorageError
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl_server.coordinator import Coordinator
from afl_server.network.authentication import Identity
from afl_server.network.service import FederationService
from afl_server.storage.run_directory import open_run
from afl_worker import connection
from afl_worker.connection import Connection, Lost


def drive(folder: Path, what: Callable[[Coordinator], Awaitable[None]]) -> None:
    """With a run of ``synthetic``, without sockets."""
    config = config_from_mapping(
        {
            "workers": 1,
            "task": {"name": "synthetic", "batch_size": 8},
            "algorithm": {"name": "afl-br", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1},
            "run": {"seed": 7, "directory": str(folder / "run")},
            "server": {"state": "off"},
        }
    )

    async def main() -> None:
        randomness = SharedRandomness.from_int(7)
        vector = build_vector(load_task("synthetic", {"dim": 20}, allow_path=True), randomness)
        run = open_run(config, 7)
        try:
            coordinator = Coordinator(run, vector, randomness)
            await what(coordinator)
            coordinator._disk.shutdown()
        finally:
            run.close()

    asyncio.run(main())


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of luck")


def the_event(caplog: pytest.LogCaptureFixture) -> tuple[str, bool]:
    """The one that was logged, and whether with a traceback."""
    (record,) = [record for record in caplog.records if record.name.startswith("afl.")]
    return record.event, record.exc_info is not None  # type: ignore[attr-defined]


def test_a_session_that_a_fault_of_the_server_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def what(run: Coordinator) -> None:
        service = FederationService.__new__(FederationService)
        service._coordinator = run
        session = run.reception.admit("peer", Identity())
        broken = asyncio.ensure_future(asyncio.to_thread(fails))
        await asyncio.wait([broken])
        await service._see_off(session, {broken})

    drive(tmp_path, what)
    assert the_event(caplog) == ("session_broke", True)


def test_a_step_that_cannot_be_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def what(run: Coordinator) -> None:
        monkeypatch.setattr(run, "_close_step", fails)
        await run._close()
        assert run.result.result()[0] is ExitCode.INTERNAL

    drive(tmp_path, what)
    assert the_event(caplog) == ("step_failed", True)


@pytest.mark.parametrize(
    ("error", "code"), [(StorageError("full"), ExitCode.STORAGE), (None, ExitCode.INTERNAL)]
)
def test_a_model_that_cannot_be_written(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: StorageError | None,
    code: ExitCode,
) -> None:
    def save(*_: object) -> None:
        raise error if error is not None else RuntimeError("out of luck")

    async def what(run: Coordinator) -> None:
        monkeypatch.setattr(run.records, "save_model", save)
        await run._write("final", await run._snapshot(), 0)
        assert run.result.result()[0] is code

    drive(tmp_path, what)
    assert the_event(caplog) == ("disk_failed", error is None)


def test_a_checkpoint_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        publishing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        publishing.set_exception(StorageError("full"))
        checkpointing._noted(publishing)

    asyncio.run(main())
    assert the_event(caplog) == ("checkpoint_failed", False)


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
