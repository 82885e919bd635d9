"""The worker's life: join, train, come back after a cut, leave."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch

from afl._version import __version__
from afl.config.quantities import shown_seconds
from afl.core.algorithms.registry import ALGORITHMS, WorkerSide
from afl.core.messages import (
    NOWHERE,
    Ack,
    AckStatus,
    CommittedStep,
    FailureCause,
    GoodbyeStatus,
    Kind,
    Payload,
    Position,
    Report,
)
from afl.core.participant import Participant
from afl.core.randomness import SEED_BYTES, SharedRandomness
from afl.daemon import events
from afl.daemon.fault_points import reached
from afl.errors import (
    ADVICE_NON_FINITE,
    AflError,
    ConfigError,
    LostServerError,
    NonFiniteError,
    ProtocolError,
    RefusedError,
    RunAbortedError,
    place,
    placed,
)
from afl.security.identity import WorkerIds
from afl.tasks.base import TaskContext
from afl.tasks.initialization import build_vector, realization_digest
from afl.tasks.registry import load_task
from afl.tasks.worker_data import worker_data
from afl.user_code import as_failure, worth_tracing
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import StepAssembler
from afl.wire.frames import (
    JOIN_BELOW_BYTES,
    PROTOCOL,
    Frame,
    chunk_frames,
    joined,
    number,
    position_of,
    report_frame,
)
from afl.wire.settings import RunSettings
from afl_worker.batched import BatchedOracle
from afl_worker.connection import Connection, Farewell, Lost
from afl_worker.journal import Journals, remove_left_behind
from afl_worker.options import WorkerOptions
from afl_worker.oracle import TaskOracle
from afl_worker.timings import TimedOracle, Timings

LOG = logging.getLogger("afl.worker")

FIRST_BACKOFF_S = 0.1
LARGEST_BACKOFF_S = 5.0
EARLY_BACKOFF_S = 1.0
EARLY_S = 60.0
"""A server that is started again is there within seconds: for so long after a session, pauses stay short."""

LARGEST_CHUNK_BYTES = 16 * 1024 * 1024
"""The largest chunk the configuration allows; what a run uses is known only after the Welcome."""

SEND_FIRST_S = 0.02
"""How long the next round's randomness waits for a report to be on its way: the report is on the round's
critical path, the randomness is not."""

FAILURE_DRAIN_S = 10.0
"""How long a failing worker waits for its traceback to reach the server."""


RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A run id that may come over the wire: it names a folder here, so it must not lead out of another."""


class WorkerProcess:
    """Runs the hosted workers until the run is over.

    Raises:
        ConfigError: if there is no such device.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._device = _device(options.device)
        self._incarnation = os.urandom(16)
        self._run_id = ""
        self._settings: RunSettings | None = None
        self._randomness: SharedRandomness | None = None
        self._participant: Participant | None = None
        self._journals: Journals | None = None
        self._digest = b""
        self._connection: Connection | None = None
        self._is_welcome = False
        self.is_over = False
        """Whether the run has ended as configured."""
        self._timings = Timings()
        self._last_session = time.monotonic()

    def run(self) -> str:
        """Until the run is complete; returns the server's last word.

        Raises:
            RefusedError: if the server refuses this worker.
            LostServerError: if no server could be reached for ``give_up_after``.
            RunAbortedError: if the run was stopped.
            AflError: if the task cannot be built here, or its loss or gradient is not finite.
        """
        backoff = FIRST_BACKOFF_S
        steps = 0
        while True:
            try:
                ending, was_welcomed = self._session()
            except AflError:
                self._close()
                raise
            self._close()
            if isinstance(ending, Farewell) and ending.status is GoodbyeStatus.FINISHED:
                LOG.info(
                    "where the time went: %s",
                    self._timings,
                    extra=events.Timings(steps=self._timings.steps, **self._timings.seconds()).extra,
                )
                if self._journals is not None:
                    self._journals.remove()
                elif RUN_ID.fullmatch(ending.run_id):
                    # A process of these workers before this one may have been killed as the run ended.
                    remove_left_behind(self._options.journal, ending.run_id, self._options.workers)
                self.is_over = True
                return ending.reason
            if was_welcomed:
                self._last_session = time.monotonic()
            if self._timings.steps > steps:
                backoff = FIRST_BACKOFF_S
            steps = self._timings.steps
            self._give_up_if_due(ending.reason)
            LOG.warning(
                "no session with %s (%s); trying again in %.1f s",
                self._options.server,
                ending.reason,
                backoff,
                extra=events.Reconnecting(seconds=backoff, reason=ending.reason).extra,
            )
            pause = backoff * random.uniform(0.5, 1.0)  # noqa: S311  # spreads reconnections; no secret
            left = self._time_left()
            time.sleep(pause if left is None else min(pause, left))
            self._give_up_if_due(ending.reason)
            is_early = time.monotonic() - self._last_session < EARLY_S
            backoff = min(2 * backoff, EARLY_BACKOFF_S if is_early else LARGEST_BACKOFF_S)

    def _session(self) -> tuple[Farewell | Lost, bool]:
        """One connection, from its beginning to its end; how it ended, and whether we were welcomed."""
        try:
            self._connection = Connection(
                self._options.server,
                chunk_bytes=self._settings.chunk_bytes if self._settings else LARGEST_CHUNK_BYTES,
                use_proxy=self._options.use_proxy,
                files=self._options.credentials,
            )
        except ConfigError as error:
            # They could be used when this process began; who replaces them is not done, or will see this.
            return Lost(str(error)), False
        return self._converse(self._connection)

    @property
    def has_session(self) -> bool:
        """Whether the server has welcomed this process, and the connection is open still."""
        connection = self._connection
        return self._is_welcome and connection is not None and connection.is_open

    def _close(self) -> None:
        self._is_welcome = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def leave(self, reason: str) -> None:
        """Tell the server, if there is one, that this process goes: after an interrupt, which leaves the
        connection open for it."""
        if self._connection is not None:
            self._connection.send_control(
                goodbye=pb.Goodbye(status=number(GoodbyeStatus.LEAVING), reason=reason)
            )
            self._connection.close(drain_s=1.0)

    def _time_left(self) -> float | None:
        """Seconds until this worker gives up, at least 0, if no session comes; ``None`` for never."""
        limit = self._options.give_up_after
        return None if limit is None else max(0.0, self._last_session + limit - time.monotonic())

    def _give_up_if_due(self, reason: str) -> None:
        limit = self._options.give_up_after
        silence = time.monotonic() - self._last_session
        if limit is not None and silence >= limit:
            raise LostServerError(
                f"no session with the server at {self._options.server} for {shown_seconds(silence)} "
                f"(--give-up-after {shown_seconds(limit)}); the last try: {reason}"
            )

    # One connection.

    def _converse(self, connection: Connection) -> tuple[Farewell | Lost, bool]:
        """Until the stream ends; how it ended, and whether the server had welcomed us."""
        connection.send_control(join=self._join())
        was_welcomed = False
        while True:
            with self._timings.wait:
                event = connection.next_event(None if was_welcomed else self._time_left())
            if event is None:
                return Lost("no answer"), False
            if isinstance(event, Lost):
                return event, was_welcomed
            if isinstance(event, Farewell):
                self._raise_if_final(event)
                return event, was_welcomed
            try:
                if isinstance(event, pb.Welcome):
                    was_welcomed = True
                    self._welcomed(connection, event)
                    self._is_welcome = True
                elif isinstance(event, Ack):
                    self._answered(connection, event)
                else:
                    self._step(connection, event)
            except ProtocolError as error:
                # A fresh stream starts from where both ends really are.
                return Lost(f"the server broke the protocol: {error}"), was_welcomed

    def _named(self, position: Position) -> str:
        """The update rounds of a position, for a message."""
        assert self._settings is not None
        return self._settings.parameters.named(position.round)

    def _answered(self, connection: Connection, ack: Ack) -> None:
        """What a late report carried is part of a later one; one that counted is not kept."""
        if self._settings is None:
            raise ProtocolError("an answer to a report before the Welcome")
        if ack.status is AckStatus.ACCEPTED:
            if self._participant is not None:
                self._participant.counted(ack.worker, ack.position)
            return
        rounds = self._named(ack.position)
        LOG.warning(
            "the server answers worker %d, %s: %s",
            ack.worker,
            rounds,
            ack.reason,
            extra=events.ReportAnswered(
                worker=ack.worker, round=ack.position.round, status=ack.status.name.lower()
            ).extra,
        )
        if ack.status is not AckStatus.LATE or self._participant is None:
            return
        try:
            was_held = self._participant.late(ack.worker, ack.position)
        except NonFiniteError as error:
            self._fail(connection, ack.worker, ack.position, error)
        if was_held:
            LOG.info(
                "worker %d: its report for %s was late; what it carried is sent later",
                ack.worker,
                rounds,
                extra=events.PutBack(worker=ack.worker, round=ack.position.round).extra,
            )

    def _join(self) -> pb.Join:
        participant = self._participant
        applied = participant.applied if participant else NOWHERE
        return pb.Join(
            protocol=PROTOCOL,
            package_version=__version__,
            incarnation=self._incarnation,
            run_id=self._run_id,
            task=self._options.task or "",
            layout_hash=participant.vector.layout_hash() if participant else b"",
            applied=_message(applied),
            workers=self._options.workers,
        )

    def _welcomed(self, connection: Connection, welcome: pb.Welcome) -> None:
        settings = RunSettings.of_message(welcome.settings)
        connection.set_liveness(heartbeat=settings.heartbeat, peer_timeout=settings.peer_timeout)
        if self._participant is None:
            self._run_id = ""
            self._set_up(connection, welcome, settings)
        else:
            self._go_on_with(connection, settings)
            open_position = position_of(welcome.workers[0].position) if welcome.workers else NOWHERE
            LOG.info(
                "joined again: run %s, %s",
                welcome.run_id,
                self._named(open_position),
                extra=events.JoinedAgain(run_id=welcome.run_id, round=open_position.round).extra,
            )
        assert self._participant is not None
        self._run_id = welcome.run_id
        vector = self._participant.vector
        most = 8 * vector.dim + vector.frozen_length + 4 * vector.buffers.size + vector.dim // 8 + 1024
        connection.assembler = StepAssembler(self._options.workers, largest=most)
        connection.send_control(
            ready=pb.Ready(
                layout_hash=vector.layout_hash(),
                dim=vector.dim,
                realization_digest=self._digest,
                workers=[
                    pb.Standing(worker=worker, reported=_message(self._participant.reported(worker)))
                    for worker in self._options.workers
                ],
            )
        )
        for expectation in welcome.workers:
            held = self._participant.held(expectation.worker, position_of(expectation.position))
            if held is not None and not expectation.held:
                kind, (report, payloads) = held
                connection.send(_frames(report, kind, payloads, settings.chunk_bytes))

    def _go_on_with(self, connection: Connection, settings: RunSettings) -> None:
        """Take what the server may have changed meanwhile; this process was built for all the rest."""
        assert self._settings is not None
        different = self._settings.differences(settings)
        if different:
            error = ConfigError(
                f"the server's settings are not those that this worker began with: {'; '.join(different)}; "
                "give the server the run's own configuration, or start this worker again to take part by the "
                "server's"
            )
            self._fail(connection, self._options.workers[0], NOWHERE, error)
        self._settings = settings

    def _set_up(self, connection: Connection, welcome: pb.Welcome, settings: RunSettings) -> None:
        """Build the task, its data and its model: once in the process's life."""
        if len(welcome.seed) != SEED_BYTES:
            raise ProtocolError(f"a seed of {len(welcome.seed)} bytes; it has {SEED_BYTES}")
        if not RUN_ID.fullmatch(welcome.run_id):
            raise ProtocolError(f"the run id {welcome.run_id[:80]!r}, which cannot name a folder of journals")
        if settings.algorithm not in ALGORITHMS:
            raise ProtocolError(f"the algorithm {settings.algorithm!r}, which this version does not have")
        randomness = SharedRandomness(welcome.seed)
        torch.set_num_threads(settings.threads)
        device = self._device
        self._settings = settings
        try:
            name = self._options.task or settings.task
            task = load_task(
                name,
                settings.task_options,
                allow_path=self._options.task is not None,
                local=self._options.task_options,
            )
            vector = build_vector(task, randomness, device)
            context = TaskContext(settings.workers, randomness)
            data = {worker: worker_data(task, worker, context) for worker in self._options.workers}
            oracle = (BatchedOracle if settings.batch_oracles else TaskOracle)(
                task,
                vector,
                data,
                randomness,
                batch_size=settings.batch_size,
                evaluation_batch_size=settings.evaluation_batch_size,
                device=device,
            )
            side = WorkerSide(
                settings.parameters,
                vector.dim,
                randomness,
                self._options.workers,
                device,
                keeps_old=settings.skips_non_finite,
            )
            journals = Journals(
                self._options.journal,
                welcome.run_id,
                vector.layout_hash(),
                self._options.workers,
                settings.journal,
            )
            kept = journals.read()
        except Exception as error:  # noqa: BLE001  # a task's data and model may be anything; the server hears of it
            self._fail(connection, self._options.workers[0], NOWHERE, error)
        self._journals = journals
        self._randomness = randomness
        self._digest = realization_digest(side)
        timed = TimedOracle(oracle, self._timings)
        self._participant = Participant(
            vector,
            side,
            timed,
            self._options.workers,
            keeper=journals if journals.is_on else None,
            skips_non_finite=settings.skips_non_finite,
        )
        self._participant.resume(kept, position_of(welcome.buffers_averaged))
        for worker, entry in kept.items():
            LOG.info(
                "worker %d goes on from its journal: its report of %s",
                worker,
                self._named(entry.report.position),
                extra=events.JournalRead(worker=worker, round=entry.report.position.round).extra,
            )
        LOG.info(
            "run %s: %s on %s as %s of %d, on %s",
            welcome.run_id,
            settings.algorithm,
            settings.task,
            WorkerIds.of(self._options.workers).named,
            settings.workers,
            device,
            extra=events.Joined(run_id=welcome.run_id, device=str(device)).extra,
        )
        # What is there by now stays: the collector need not look at it again in every round.
        gc.collect()
        gc.freeze()

    def _step(self, connection: Connection, committed: CommittedStep) -> None:
        assert self._participant is not None
        assert self._settings is not None
        step = committed.step
        worker = self._options.workers[0]
        reached("worker.before-apply")
        try:
            with self._timings.codec:
                for kind, (report, payloads) in self._participant.take(committed):
                    worker = report.worker
                    connection.send(_frames(report, kind, payloads, self._settings.chunk_bytes))
            self._timings.steps += 1
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a task's code raises, the server must hear of it
            self._fail(connection, worker, step.position, error)
        if connection.assembler is not None:
            connection.assembler.recycle(committed)
        if step.kind is Kind.TRAIN:
            connection.wait_taken(SEND_FIRST_S)
            with self._timings.prepare:
                self._participant.prepare(step.position.round + 1)

    def _fail(self, connection: Connection, worker: int, position: Position, error: Exception) -> NoReturn:
        """Tell the server why this worker cannot go on, wait for it to have heard, and end."""
        cause = FailureCause.TASK
        if isinstance(error, NonFiniteError):
            cause = FailureCause.NON_FINITE
            error = NonFiniteError(f"{error}; {ADVICE_NON_FINITE}")
        elif isinstance(error.__cause__ or error, torch.cuda.OutOfMemoryError | MemoryError):
            cause = FailureCause.OUT_OF_MEMORY
        failure = as_failure(error)
        raised = worth_tracing(failure)
        connection.send_control(
            failure=pb.Failure(
                worker=worker,
                position=_message(position),
                cause=number(cause),
                message=str(failure),
                traceback="" if raised is None else "".join(traceback.format_exception(raised)),
            )
        )
        connection.close(drain_s=FAILURE_DRAIN_S)
        raise placed(place(worker, self._named(position)), failure) from failure

    @staticmethod
    def _raise_if_final(farewell: Farewell) -> None:
        if farewell.status is GoodbyeStatus.REFUSED:
            raise RefusedError(f"the server refused this worker: {farewell.reason}")
        if farewell.status is GoodbyeStatus.ABORTED:
            raise RunAbortedError(f"the run was stopped: {farewell.reason}")


def _frames(report: Report, kind: Kind, payloads: list[Payload], chunk_bytes: int) -> Iterator[Frame]:
    """A report's frames: one if it is small, else its opening and its chunks."""
    opening = report_frame(report, kind)
    chunks = (
        frame
        for index, payload in enumerate(payloads)
        for frame in chunk_frames(pb.WorkerFrame, payload, chunk_bytes, worker=report.worker, index=index)
    )
    if sum(payload.header.total_bytes for payload in payloads) < JOIN_BELOW_BYTES:
        yield joined([opening, *chunks])
        return
    yield opening
    yield from chunks


def _message(position: Position) -> pb.Position:
    return pb.Position(round=position.round, phase=position.phase)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no CUDA device here; use --device cpu or auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such device; write auto, cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"--device {name}: the devices here are cuda:0 to cuda:{count - 1}; name one of them"
        )
    return device
