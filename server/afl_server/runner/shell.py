"""The loop around the federation: brings it events with the time, and carries out what it wants done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from afl.core.rounds.results import Evaluation
from afl.daemon import events as log_events
from afl.errors import STOPS, ExitCode, StorageError
from afl.user_code import as_failure
from afl_server.federation import effects, events
from afl_server.federation.machine import Federation
from afl_server.pages.dual_window import DualWindow
from afl_server.runner.recording import Recorder
from afl_server.runner.tracing import RoundTraces
from afl_server.storage.checkpointing import Checkpointing
from afl_server.storage.descriptor_retry import retry_without_descriptor
from afl_server.storage.records import RunRecords

LOG = logging.getLogger("afl.server")


class Shell:
    """Drives one federation, on one event loop.

    Three threads take what would hold the loop up: one the engine's long calculations, one the log of
    outcomes, and one whatever the run need not wait for: models, and a checkpoint's way to the disk. A
    checkpoint counts only once the models that were chosen before it are there, which the last one's order
    sees to.

    Attributes:
        result: how the run, or this process's part of it, has ended, once it has.
        released: set once everybody has heard of the end who could.
        streams: carries out what concerns streams; set before the first event.

    Args:
        checkpointing: ``None`` for a run without durable state.
        recorder: writes down every event.
        traces: of rounds, where they are asked for.
    """

    def __init__(
        self,
        federation: Federation,
        records: RunRecords,
        checkpointing: Checkpointing | None,
        dual_window: DualWindow,
        recorder: Recorder | None = None,
        *,
        traces: RoundTraces | None = None,
    ) -> None:
        self.result: asyncio.Future[tuple[ExitCode, str]] = asyncio.get_running_loop().create_future()
        self.released = asyncio.Event()
        self.streams: Callable[[effects.Effect], None] = _no_streams
        self._federation = federation
        self._records = records
        self._checkpointing = checkpointing
        self._dual_window = dual_window
        self._recorder = recorder
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="afl-engine")
        self._log_thread = ThreadPoolExecutor(1, thread_name_prefix="afl-log")
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="afl-disk")
        self._publishing: asyncio.Future[None] | None = None
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._inbox: deque[events.Event] = deque()
        self._is_delivering = self._has_faulted = False
        self._carriers: dict[type[effects.Effect], Callable[[Any], None]] = {
            effects.Compute: lambda effect: self._spawn("outcome", self._compute(effect)),
            effects.Append: lambda effect: self._spawn("outcome", self._append(effect)),
            effects.Checkpoint: lambda effect: self._spawn("checkpoint", self._checkpoint(effect)),
            effects.SaveModel: lambda effect: self._spawn("model", self._save_model(effect)),
            effects.Record: self._record,
            effects.Timer: self._set_timer,
            effects.Log: _log,
            effects.Finish: lambda effect: self.result.set_result((effect.code, effect.reason)),
            effects.Release: lambda _: self.released.set(),
        }

    def deliver(self, event: events.Event) -> None:
        """Take an event to the federation, and carry out what follows from it; on the event loop."""
        self._inbox.append(event)
        if self._is_delivering:
            # Brought about by an effect: after the others of its event.
            return
        self._is_delivering = True
        try:
            while self._inbox:
                event, now = self._inbox.popleft(), time.monotonic()
                try:
                    if self._recorder is not None:
                        self._recorder.add(event, now)
                    self.carry_out(self._federation.handle(event, now))
                    if self._traces is not None:
                        self._traces.look()
                except Exception as error:  # noqa: BLE001  # whoever called must not be blamed for it
                    self._fault(error)
        finally:
            self._is_delivering = False

    def _fault(self, error: Exception) -> None:
        """What was to be done is lost: the server ends, at once where it cannot even say so."""
        if not self._has_faulted:
            self._has_faulted = True
            self._inbox.append(events.Faulted(error))
        elif not self.result.done():
            failure = as_failure(error)
            self.result.set_result((failure.exit_code, f"the server failed: {failure}"))
            self.released.set()

    async def begin(self) -> None:
        """Let the run begin; returns once what it begins with is durable."""
        self.deliver(events.Started())
        while self._work and not self._federation.has_begun:
            await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)

    def carry_out(self, wanted: list[effects.Effect]) -> None:
        """Do what is wanted, in order."""
        for effect in wanted:
            self._carriers.get(type(effect), self.streams)(effect)

    def carry_out_now(self, wanted: list[effects.Effect]) -> None:
        """Do what a resumed run wants before any event: models are written before anything goes on.

        Raises:
            StorageError: if something cannot be written.
        """
        for effect in wanted:
            if isinstance(effect, effects.SaveModel):
                self._records.save_model(effect.name, effect.model, effect.rounds_applied)
            else:
                self.carry_out([effect])

    async def close(self) -> None:
        """Wait for everything that is under way."""
        while self._work:
            await asyncio.wait(self._work)
        for timer in self._timers.values():
            timer.cancel()
        if self._publishing is not None:
            await asyncio.wait([self._publishing])
        for thread in (self._disk_thread, self._log_thread, self._engine_thread):
            # It is idle: nothing is under way. Where memory has run out, no thread could be started to wait.
            thread.shutdown()
        if self._recorder is not None:
            self._recorder.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    # Work on threads; each returns the event that answers it.

    async def _compute(self, effect: effects.Compute) -> events.Event:
        try:
            return events.EngineDone(await self._loop.run_in_executor(self._engine_thread, effect.call))
        except Exception as error:  # noqa: BLE001  # the federation's to judge
            return events.EngineDone(error=error)
        except (asyncio.CancelledError, *STOPS):
            raise
        except BaseException as error:  # noqa: BLE001  # an algorithm of one's own may raise anything
            return events.EngineDone(error=as_failure(error))

    async def _append(self, effect: effects.Append) -> events.Event:
        assert self._checkpointing is not None
        append = partial(self._checkpointing.append, effect.outcome, effect.moment, effect.round)
        is_due = await self._loop.run_in_executor(self._log_thread, append)
        is_busy = self._publishing is not None and not self._publishing.done()
        return events.Written(is_due and not is_busy)

    async def _checkpoint(self, effect: effects.Checkpoint) -> events.Event:
        assert self._checkpointing is not None
        values = {**effect.values, "metrics_bytes": self._records.metrics_bytes}
        if self._publishing is not None:
            # One that has failed is no loss while the log goes on; its error comes again here.
            await self._publishing
        write = partial(self._checkpointing.write, values, effect.arrays, effect.round)
        temporary = await self._loop.run_in_executor(self._log_thread, write)
        # One job: whoever waits for the thread's end waits for all of it.
        publish = self._checkpointing.publish
        self._publishing = self._loop.run_in_executor(self._disk_thread, publish, temporary)
        if effect.waits:
            await self._publishing
        else:
            self._publishing.add_done_callback(_note_published)
        return events.Written()

    async def _save_model(self, effect: effects.SaveModel) -> events.Event | None:
        if effect.is_salvage and self._records.lost():
            return None
        save = partial(self._records.save_model, effect.name, effect.model, effect.rounds_applied)
        await self._loop.run_in_executor(self._disk_thread, retry_without_descriptor, save)
        return events.ModelWritten(effect.name)

    def _spawn(self, what: events.Artifact, work: Coroutine[None, None, events.Event | None]) -> None:
        task = asyncio.create_task(self._answer(what, work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _answer(self, what: events.Artifact, work: Coroutine[None, None, events.Event | None]) -> None:
        try:
            event = await work
        except StorageError as error:
            event = self._unwritten(what, error)
        except Exception as error:  # noqa: BLE001  # the federation's to judge
            reason = f"the {what} cannot be written: {error}"
            event = events.WriteFailed(what, reason, ExitCode.INTERNAL, error)
        if event is not None:
            self.deliver(event)

    def _unwritten(self, what: events.Artifact, error: StorageError) -> events.WriteFailed:
        return events.WriteFailed(what, str(error), is_final=bool(self._records.lost()))

    # At once.

    def _record(self, effect: effects.Record) -> None:
        closed, moment = effect.closed, effect.moment
        up, down = moment.counters.uplink, moment.counters.downlink
        try:
            if isinstance(closed, Evaluation):
                self._records.evaluation(closed, up=up, down=down)
            else:
                if closed.mean_loss is None:  # else nobody knows them
                    self._dual_window.add(closed.round, closed.dual_weights)
                self._records.train_round(closed, seconds=moment.round_seconds, up=up, down=down)
        except StorageError as error:
            self.deliver(self._unwritten("metrics", error))

    def _set_timer(self, effect: effects.Timer) -> None:
        name = (effect.name, effect.member)
        running = self._timers.pop(name, None)
        if running is not None:
            running.cancel()
        if effect.at is not None:
            # The loop's clock is the monotonic one.
            self._timers[name] = self._loop.call_at(effect.at, self._timer_fired, *name)

    def _timer_fired(self, name: str, member: int) -> None:
        del self._timers[name, member]
        self.deliver(events.TimerFired(name, member))


def _note_published(publishing: asyncio.Future[None]) -> None:
    error = None if publishing.cancelled() else publishing.exception()
    if error is not None:
        LOG.error("%s", error, extra=log_events.CheckpointFailed().extra)


def _log(effect: effects.Log) -> None:
    level = logging.getLevelNamesMapping()[effect.level]
    LOG.log(level, "%s", effect.message, exc_info=effect.error, extra=effect.event.extra)


def _no_streams(effect: effects.Effect) -> None:
    raise AssertionError(f"{effect} before there are streams")
