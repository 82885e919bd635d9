"""The run on the server: reports go to the round engine, its steps to all sessions.

Everything runs on one event loop. For large models the engine's arithmetic moves to one thread of its own,
in order, so that the loop is never held up; for small ones a thread hop would cost more than the work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from afl.core.algorithms.registry import server_half
from afl.core.engine import Opening, RoundEngine
from afl.core.messages import (
    NOWHERE,
    Ack,
    AckStatus,
    Encoding,
    GoodbyeStatus,
    Kind,
    Position,
    Report,
    Step,
)
from afl.core.model.buffer_mean import BufferMean
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import Purpose, SharedRandomness
from afl.daemon import events
from afl.errors import DivergedError, ExitCode, NonFiniteError, StorageError, place
from afl.security.identity import WorkerIds
from afl.v1 import federation_pb2 as pb
from afl.wire.fast_chunk import ChunkView
from afl.wire.frames import ack_frame
from afl.wire.settings import RunSettings
from afl_server.deadline import Deadline
from afl_server.downlink import Downlink
from afl_server.federation.broadcast import ModelCopy
from afl_server.federation.counters import Counters, Incident, Incidents
from afl_server.network.authentication import Gate
from afl_server.pages.dual_window import DualWindow
from afl_server.reception import Reception
from afl_server.roster import Roster
from afl_server.session import Session, State
from afl_server.storage.checkpointing import Keeper, Moment
from afl_server.storage.descriptor_retry import retry_without_descriptor
from afl_server.storage.run_directory import OpenRun
from afl_server.storage.store import Checkpoint, Entry
from afl_server.uninterrupted import uninterrupted

LOG = logging.getLogger("afl.server")

INLINE_DIM = 1 << 20
"""Up to this dimension the engine runs on the event loop: its longest call is then a few milliseconds."""

FAREWELL_CHECK_S = 0.05

FAREWELL_TIMEOUT_S = 10.0
"""How long the end of the run waits for workers to have read their goodbye."""

_R = TypeVar("_R")


class Coordinator:
    """Drives one run to its end.

    Args:
        run: whose directory and configuration it uses.
        vector: the initial model; becomes the run's model.
        local_options: the task's options that are this machine's own and are not sent.
        gate: who may come in; by default as the configuration says.
    """

    residual_norm: float | None = None
    """Of the server's own residual at this process's last evaluation, where it keeps one."""

    def __init__(
        self,
        run: OpenRun,
        vector: ParameterVector,
        randomness: SharedRandomness,
        local_options: frozenset[str] = frozenset(),
        gate: Gate | None = None,
    ) -> None:
        config, records = run.config, run.records
        self.config = config
        self.gate = Gate(config.server) if gate is None else gate
        self.settings = RunSettings.of_config(config, local_options)
        self.run_id = records.run_id
        self.counters = Counters()
        self.vector = vector
        self.records = records
        algorithm = server_half(self.settings.parameters, vector.values, randomness)
        self.engine = RoundEngine(
            algorithm,
            evaluate_every=config.evaluation.every,
            buffer_mean=BufferMean.of(vector.buffers, config.workers),
            policy=config.absence,
        )
        synchronizations = self.engine.synchronizations
        self.random_round = randomness.stream(Purpose.RANDOM_OUTPUT).integer(synchronizations) + 1
        self.roster = Roster(config.workers)
        self.result: asyncio.Future[tuple[ExitCode, str]] = asyncio.get_running_loop().create_future()
        self.last_word = GoodbyeStatus.FINISHED
        """What sessions are told once the run, or this process's part of it, is over."""
        self.started_at = time.monotonic()
        self.round_started_at = time.monotonic()
        self.step_opened_at = time.monotonic()
        self.step_seconds: dict[Kind, float] = {}
        """How long the last closed step of each kind was open."""
        self.report_seconds = [math.nan] * config.workers
        """How long after its step was opened each worker's last report was complete."""
        self.incidents = Incidents(config.workers)
        self.outcome_seconds = 0.0
        """How long it took to make the last outcome durable."""
        self.seconds_before = 0.0
        """How long earlier processes ran this run."""
        self.first_round: tuple[float, int] | None = None
        """When this process closed its first round, and which."""
        self.randomness = randomness
        self.dual_window = DualWindow.of(config)
        self.downlink = Downlink(self)
        # Where whole payloads are kept, closing a step folds all of them at once.
        at_once = config.workers if self.engine.policy.leaves_out else 1
        self._inline = vector.dim * at_once <= INLINE_DIM
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="afl-engine")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="afl-disk")
        self._keeper = None if run.store is None else Keeper(self, run.store, self._disk)
        self._pausing = ""
        """Why the run stops after its open step, if it does."""
        self._pause_code = ExitCode.INTERRUPTED
        self.deadline = Deadline(self)
        self._absent: list[int] = []
        """The workers that the last step was closed without."""
        self.informed: set[int] = set()
        """The workers that know that the run is over."""
        self.turn = asyncio.Lock()
        self._relief = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self.reception = Reception(self)

    # The run.

    async def start(self) -> None:
        """Make the run's beginning, or what it goes on from, durable."""
        self.counters.starts += 1
        if self._is_random_output(self.engine.opening()):
            await self._write("random", await self._snapshot(), self.engine.updates_applied)
        if self._keeper is not None:
            async with self.turn:
                await self._keeper.begin()
        if self.engine.finished:
            self._spawn(self._conclude(await self._snapshot(), self.engine.rounds))

    def go_on(self, checkpoint: Checkpoint, entries: Iterable[Entry]) -> None:
        """Go on from a checkpoint and the outcomes since, before any session.

        Raises:
            ConfigError: if the task is not the run's any more.
            StorageError: if a model cannot be written.
        """
        assert self._keeper is not None
        self._keeper.restore(checkpoint)
        self.records.round, self.records.last_evaluation = self.engine.last_round, self.engine.last_evaluation
        opening: Opening | None = None
        closed: Step | None = None
        replayed = 0
        for entry in entries:
            closed = self.engine.step
            opening = self._keeper.replay(entry)
            if opening is not None:
                # What is read lies in the log's own pages.
                own = tuple(payload.copied() for payload in opening.payloads)
                opening = replace(opening, payloads=own)
            self.engine.algorithm.settle()
            replayed += 1
            for name in self._outputs(self._record(closed, Moment.of_values(entry.values)), opening):
                self.records.save_model(name, ModelCopy(self.vector), self.engine.updates_applied)
        # Each outcome brings the counters of its time.
        self.counters.replayed_steps += replayed
        if opening is not None and closed is not None:
            self.downlink.begin_with(opening, closed.position)
        elif not self.engine.finished:
            self.downlink.begin_with(self.engine.opening(), NOWHERE)
        LOG.warning(
            "the run goes on with %s",
            self.open_rounds,
            extra=events.Resumed(run_id=self.run_id, round=self.engine.step.position.round).extra,
        )

    @property
    def open_rounds(self) -> str:
        """The update rounds of the open step, for a message."""
        return self.settings.parameters.named(self.engine.step.position.round)

    @property
    def seconds(self) -> float:
        """How long the run has run, in all its processes."""
        return self.seconds_before + time.monotonic() - self.started_at

    def stop(self, reason: str, code: ExitCode = ExitCode.INTERRUPTED) -> None:
        """Stop after the open step, or after ``server.grace``, so that the run can be gone on with; a run
        without durable state ends for good."""
        if self._keeper is None:
            self.abort(code, reason)
        elif not self.is_over:
            LOG.warning("%s; the open step is waited for", reason, extra=events.Stopping(reason=reason).extra)
            self._pausing, self._pause_code = reason, code
            self._spawn(self._pause_in_time())

    async def _pause_in_time(self) -> None:
        deadline = time.monotonic() + self.config.server.grace
        # A step that waits for someone who is not there, or goes meanwhile, is not waited for.
        while not self.is_over and all(self.roster.owner(worker) for worker in self.engine.missing()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            moved_on = asyncio.ensure_future(self.relief())
            either: set[asyncio.Future[Any]] = {self.result, moved_on}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            moved_on.cancel()
        async with self.turn:
            await self._pause()

    async def _pause(self) -> None:
        """End this process's part of the run; whoever calls holds the turn."""
        if self.is_over:
            return
        assert self._keeper is not None
        try:
            await self._keeper.checkpoint(waits=True)
        except StorageError as error:
            # The log has all that was closed.
            LOG.error("%s", error, extra=events.DiskFailed().extra)  # noqa: TRY400  # the message says all
        snapshot, applied = await self._snapshot_in_turn(), self.engine.updates_applied
        self._finish(self._pause_code, self._pausing, GoodbyeStatus.LEAVING)
        self._spawn(self._write("final", snapshot, applied))

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or badly."""
        return self.result.done()

    @property
    def can_go_on(self) -> bool:
        """Whether this process's part of the run is over, and the run is not."""
        return self.is_over and self.last_word is GoodbyeStatus.LEAVING

    def abort(self, code: ExitCode, reason: str) -> None:
        """End the run before its last round; the model as it is becomes the final one."""
        if self.is_over:
            return
        LOG.error("the run stops: %s", reason, extra=events.RunAborted(code=int(code), reason=reason).extra)
        self._finish(code, reason, GoodbyeStatus.ABORTED)
        if not self.records.lost():
            self._spawn(self._save_as_it_is())

    async def _save_as_it_is(self) -> None:
        async with self.turn:
            snapshot = await self._snapshot_in_turn()
            applied = self.engine.updates_applied
        await self._write("final", snapshot, applied)

    def _finish(self, code: ExitCode, reason: str, status: GoodbyeStatus) -> None:
        if self.is_over:
            return
        self.last_word = status
        self.result.set_result((code, reason))
        self.downlink.abandon()
        for session in self.roster:
            self.informed.update(session.workers)
            session.end(status, reason)

    async def farewell(self) -> None:
        """Wait for the disk and, bounded, until every session has read its goodbye; at the end of the run
        also for workers that have been away for so short a time that they may come back."""
        self.deadline.cancel()
        deadline = time.monotonic() + FAREWELL_TIMEOUT_S
        is_end = self.result.result()[0] is ExitCode.OK
        while time.monotonic() < deadline:
            waiting = [asyncio.ensure_future(session.is_over.wait()) for session in self.roster]
            if waiting:
                await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            elif is_end and not self.informed.issuperset(self.roster.returning()):
                await asyncio.sleep(FAREWELL_CHECK_S)
            else:
                break
            for task in waiting:
                task.cancel()
        while self._background:
            await asyncio.gather(*self._background)
        # What is being closed is closed to its end.
        async with self.turn:
            await asyncio.to_thread(self._disk.shutdown)
            if self._keeper is not None:
                await asyncio.to_thread(self._keeper.shutdown)
            await asyncio.to_thread(self._thread.shutdown)

    # Reports.

    async def begin_report(self, report: Report) -> Ack | None:
        """A report's opening."""
        if self.is_over:
            return None
        async with self.turn:
            ack = self.engine.begin_report(report)
        await self._after(ack)
        return ack

    async def add_piece(self, chunk: pb.Chunk | ChunkView) -> Ack | None:
        """The next piece of a payload."""
        header = self.engine.incoming_header(chunk.worker)
        if self.is_over or header is None:
            return None
        # A piece of plain values is summed in a fraction of a millisecond; a thread hop would cost more.
        is_short = header.encoding in {Encoding.DENSE, Encoding.SEEDED}
        async with self.turn:
            ack = await self.on_engine(
                self.engine.add_piece,
                chunk.worker,
                chunk.payload,
                chunk.offset,
                chunk.data,
                is_short=is_short,
            )
        await self._after(ack)
        return ack

    def is_owner(self, session: Session, worker: int) -> bool:
        """Whether the session speaks for the worker."""
        return self.roster.owner(worker) is session

    def is_congested(self, session: Session) -> bool:
        """Whether to stop reading from a session: what it sends must wait, and enough waits already."""
        engine = self.engine
        if engine.collector.waiting_bytes <= self.config.server.reorder_buffer:
            return False
        pending = next((worker for worker in session.workers if engine.awaits(worker)), None)
        return pending is not None and engine.collector.would_wait(pending)

    async def relief(self) -> None:
        """Wait until the sum has moved on."""
        await self._relief.wait()

    async def on_engine(self, call: Callable[..., _R], *args: object, is_short: bool = False) -> _R:
        """Run an engine call: here if it or the model is small, else on the engine's thread.

        Whoever calls holds the turn.
        """
        if self._inline or is_short:
            return call(*args)
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._thread, call, *args))

    # Inner workings.

    async def _after(self, ack: Ack | None) -> None:
        """What an accepted piece or report sets in motion."""
        if ack is not None and ack.reason:
            self.counters.refused_reports += 1
            if ack.status is not AckStatus.REFUSED:
                return
        self.relieve()
        if not self._inline:
            self.downlink.stream()
        if ack is None:
            return
        self._take_note(ack)
        await self.close_if_complete()

    def _take_note(self, ack: Ack) -> None:
        """Of a report that the open step now has."""
        report = self.engine.report(ack.worker)
        self.report_seconds[ack.worker] = time.monotonic() - self.step_opened_at
        if report.missing:
            self.incidents.count(Incident.NON_FINITE, [report.worker])
            LOG.warning(
                "%s: left out, since it is not finite: %s",
                place(report.worker, self.settings.parameters.named(report.position.round)),
                report.missing,
                extra=events.NonFinite(worker=report.worker, round=report.position.round).extra,
            )
        elif not self.engine.step.kind.is_of_evaluation:
            self.counters.charge_report(report)

    async def close_if_complete(self) -> None:
        """Close the open step if it can be; whatever fails in that ends the run."""
        if self.engine.complete and not self.is_over:
            await uninterrupted(self._close())

    async def _close(self) -> None:
        try:
            await self._close_step()
            self.records.require_convergence()
        except (NonFiniteError, DivergedError) as error:
            self.abort(ExitCode.DIVERGED, str(error))
        except StorageError as error:
            self.abort(ExitCode.STORAGE, str(error))
        except Exception:
            # A fault of the server, not of the session whose report happened to be the last.
            LOG.exception(
                "%s cannot be closed",
                self.open_rounds,
                extra=events.StepFailed(round=self.engine.step.position.round).extra,
            )
            self._finish(ExitCode.INTERNAL, "the server failed; its log has why", GoodbyeStatus.ABORTED)

    def relieve(self) -> None:
        """The sum has moved on: sessions that wait for it may be read again."""
        self._relief.set()
        self._relief = asyncio.Event()

    async def _close_step(self) -> None:
        """All workers have reported: close the step and broadcast the next."""
        async with self.turn:
            if not self.engine.complete:
                return
            closed = self.engine.step
            if closed.kind is Kind.EVALUATE:
                digest, self.residual_norm = await self.on_engine(self._own_state)
                self.engine.expect_digest(digest)
            absent, unanswered = self.engine.absent(), self.engine.missing()
            counted = [worker for worker in self.engine.participants if worker not in absent]
            opening = await self.on_engine(self.engine.advance)
            self.counters.absent_reports += len(absent)
            self.incidents.count(Incident.ABSENT, absent)
            self._tell_late(absent, unanswered)
            evaluation = self.engine.last_evaluation if closed.kind is Kind.EVALUATE else None
            if evaluation is not None:
                self.downlink.tell_diverged(evaluation, is_last=opening is None)
            moment = self._moment()
            if self._keeper is not None:
                # Before anyone hears of it: what was heard must never be undone.
                since = time.monotonic()
                await self._keeper.append(moment)
                self.outcome_seconds = time.monotonic() - since
            now = time.monotonic()
            self.step_seconds[closed.kind] = now - self.step_opened_at
            self.step_opened_at = now
            self.deadline.start()
            self.downlink.model_moved()
            is_last_here = bool(self._pausing) and opening is not None
            if evaluation is not None and opening is not None:
                await self.downlink.heal(evaluation)
            if opening is not None and not is_last_here:
                await self.downlink.open(opening, closed)
                self.downlink.acknowledge(closed, counted)
            outputs = self._outputs(self._record(closed, moment), opening)
            if outputs or opening is None:
                snapshot = await self._snapshot_in_turn()
                for name in outputs:
                    self._save(name, snapshot, self.engine.updates_applied)
                if opening is None:
                    self._spawn(self._conclude(snapshot, self.engine.rounds))
            if is_last_here:
                await self._pause()
            elif self._keeper is not None and (opening is None or self._keeper.is_due):
                await self._keeper.checkpoint()
            else:
                self._settle_soon()

    def _outputs(self, is_best: bool, opening: Opening | None) -> list[str]:
        """Which of the run's models the model as it now is is."""
        found = {"best": is_best, "random": self._is_random_output(opening)}
        return [name for name, is_output in found.items() if is_output]

    def _is_random_output(self, opening: Opening | None) -> bool:
        """Whether the model as it now is is w_r."""
        return opening is not None and opening.step.position == Position(self.random_round, 0)

    def _moment(self) -> Moment:
        now = time.monotonic()
        return Moment(now - self.round_started_at, self.seconds, self.counters.copied())

    def _tell_late(self, absent: list[int], unanswered: Sequence[int]) -> None:
        """The step has just been closed without some workers."""
        if absent != self._absent:
            LOG.warning(
                "steps are closed without %s" if absent else "steps are closed with all workers again%s",
                WorkerIds.of(absent).named if absent else "",
                extra=events.Absent(workers=absent).extra,
            )
        self._absent = absent
        for session in self.roster.ready():
            if not session.owes:
                session.owes.update(worker for worker in session.workers if worker in unanswered)
        for ack in self.engine.cut_off:
            owner = self.roster.owner(ack.worker)
            if owner is not None and ack.worker in owner.owes:
                self.counters.late_reports += 1
                owner.owes.discard(ack.worker)
                owner.send(ack_frame(ack, Kind.TRAIN))

    async def answered_late(self, session: Session, ack: Ack) -> None:
        """A late report has been answered: the session may go on, if it owes no other."""
        self.counters.late_reports += 1
        if ack.worker not in session.owes:
            return
        async with self.turn:
            session.owes.discard(ack.worker)
            if session.owes or session.state is not State.READY or self.is_over:
                return
            await self.downlink.go_on_with(session)

    def _record(self, closed: Step, moment: Moment) -> bool:
        """Write the metrics of a closed step; whether its evaluation is the best so far."""
        up, down = moment.counters.uplink, moment.counters.downlink
        if closed.kind is Kind.EVALUATE:
            assert self.engine.last_evaluation is not None
            self.round_started_at = time.monotonic()
            return self.records.evaluation(self.engine.last_evaluation, up=up, down=down)
        summary = self.engine.last_round
        if summary is not None and summary is not self.records.round:
            self.round_started_at = time.monotonic()
            self.dual_window.add(summary.round, summary.dual_weights)
            self.records.train_round(summary, seconds=moment.round_seconds, up=up, down=down)
            if self.first_round is None:
                self.first_round = (time.monotonic(), summary.round)
        return False

    def _settle_soon(self) -> None:
        """Move the server's own model once the broadcast is on its way."""
        if self._inline:
            asyncio.get_running_loop().call_soon(self.engine.algorithm.settle)
        else:
            self._spawn(self._settle())

    async def _settle(self) -> None:
        async with self.turn:
            await self.settle_in_turn()

    async def settle_in_turn(self) -> None:
        """Move the server's own model by what was closed; whoever calls holds the turn."""
        await self.on_engine(self.engine.algorithm.settle)

    def _own_state(self) -> tuple[bytes, float | None]:
        """The model's digest and the residual's norm."""
        self.engine.algorithm.settle()
        return self.vector.digest(), self.engine.algorithm.residual_norm

    async def _snapshot(self) -> ModelCopy:
        async with self.turn:
            return await self._snapshot_in_turn()

    async def _snapshot_in_turn(self) -> ModelCopy:
        """A copy of the model as it is now."""
        return await self.on_engine(self._copy)

    def _copy(self) -> ModelCopy:
        self.engine.algorithm.settle()
        return ModelCopy(self.vector)

    def _save(self, name: str, snapshot: ModelCopy, rounds_applied: int) -> None:
        """Write a copy of the model, in the background; the run does not wait for the disk."""
        self._spawn(self._write(name, snapshot, rounds_applied))

    async def _write(self, name: str, snapshot: ModelCopy, rounds_applied: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(
                self._disk, retry_without_descriptor, self.records.save_model, name, snapshot, rounds_applied
            )
        except StorageError as error:
            LOG.error("%s", error, extra=events.DiskFailed().extra)  # noqa: TRY400  # the message says all
            self._finish(ExitCode.STORAGE, str(error), GoodbyeStatus.ABORTED)
        except Exception as error:
            # Whatever it is, the run must not wait for a file that never comes.
            LOG.exception("model-%s cannot be written", name, extra=events.DiskFailed().extra)
            reason = f"model-{name}.safetensors cannot be written: {error}"
            self._finish(ExitCode.INTERNAL, reason, GoodbyeStatus.ABORTED)

    async def _conclude(self, snapshot: ModelCopy, rounds_applied: int) -> None:
        """The last model is safe before anyone is told that the run is complete."""
        await self._write("final", snapshot, rounds_applied)
        self._finish(ExitCode.OK, "the run is complete", GoodbyeStatus.FINISHED)

    def restart_round(self, worker: int, newcomer: Session) -> None:
        """Part of a payload is in the sum whose rest will never come: begin the sum again.

        Every other session is cut, also one that was welcomed and told that its report is held; each
        comes back by itself and sends its report again.
        """
        LOG.warning(
            "worker %d restarted in the middle of its report: the sum of %s begins again",
            worker,
            self.open_rounds,
            extra=events.RoundRestarted(worker=worker).extra,
        )
        self.engine.restart_round()
        self.downlink.abandon()
        for session in self.roster:
            if session is not newcomer and session.state in {State.JOINED, State.READY}:
                session.end(GoodbyeStatus.TRY_LATER, "the round's sum begins again")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
