"""The loop around the federation: what it makes of a disk, a timer and a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from afl.config import config_from_mapping
from afl.errors import ExitCode, StorageError
from afl_server.federation import effects, events
from afl_server.pages.dual_window import DualWindow
from afl_server.runner.build import build
from afl_server.runner.shell import Shell
from afl_server.storage.checkpointing import Checkpointing
from afl_server.storage.run_directory import OpenRun, open_run


def drive(folder: Path, what: Callable[[Shell, OpenRun], Awaitable[None]]) -> None:
    """With a run of one worker that is durable, without sockets."""
    config = config_from_mapping(
        {
            "workers": 1,
            "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 20}},
            "algorithm": {"name": "afl-br", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1},
            "run": {"seed": 7, "directory": str(folder / "run")},
        }
    )

    async def main() -> None:
        run = open_run(config, 7)
        records = run.records
        try:
            federation, vector = build(config, records.run_id, records.directory, records.ranking, 0.0)
            assert run.store is not None
            checkpointing = Checkpointing(run.store, records, vector, 50)
            shell = Shell(federation, records, checkpointing, DualWindow.of(config))
            shell.streams = lambda effect: None
            await what(shell, run)
            await shell.close()
        finally:
            run.close()

    asyncio.run(main())


def test_a_run_begins_once_its_beginning_is_on_the_disk(tmp_path: Path) -> None:
    async def what(shell: Shell, run: OpenRun) -> None:
        assert run.store is not None
        assert run.store.is_empty
        await shell.begin()
        assert not run.store.is_empty

    drive(tmp_path, what)


def test_a_run_that_is_stopped_ends_with_a_checkpoint_and_its_model(tmp_path: Path) -> None:
    async def what(shell: Shell, run: OpenRun) -> None:
        await shell.begin()
        shell.deliver(events.StopAsked("enough"))
        assert await shell.result == (ExitCode.INTERRUPTED, "enough")
        await shell.released.wait()

    drive(tmp_path, what)
    assert (tmp_path / "run" / "model-final.safetensors").exists()


def test_a_checkpoint_that_fails_is_no_loss_and_its_error_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(temporary: Path) -> None:
        raise StorageError("full")

    async def what(shell: Shell, run: OpenRun) -> None:
        await shell.begin()
        monkeypatch.setattr(run.store, "publish", fails)
        taken = []
        monkeypatch.setattr(shell, "deliver", taken.append)
        for answer in (events.Written, events.WriteFailed):
            shell.carry_out([effects.Checkpoint({}, {}, 1, waits=False)])
            for _ in range(500):
                if isinstance(taken[-1] if taken else None, answer):
                    break
                await asyncio.sleep(0.01)
        assert [type(event) for event in taken] == [events.Written, events.WriteFailed]

    drive(tmp_path, what)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert getattr(record, "event", "") == "checkpoint_failed"


def test_timers_fire_in_time_and_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def what(shell: Shell, run: OpenRun) -> None:
        await shell.begin()
        taken: list[events.Event] = []
        monkeypatch.setattr(shell, "deliver", taken.append)
        now = asyncio.get_running_loop().time()
        shell.carry_out(
            [
                effects.Timer("grace", now + 0.01),
                effects.Timer("grace", now + 0.05),
                effects.Timer("probe", now + 0.02, 3),
                effects.Timer("alone", now + 0.02),
                effects.Timer("alone", None),
            ]
        )
        await asyncio.sleep(0.2)
        assert taken == [events.TimerFired("probe", 3), events.TimerFired("grace")]

    drive(tmp_path, what)
