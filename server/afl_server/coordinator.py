"""The run on the server: sessions on one side, the round engine on the other.

Everything runs on one event loop. For large models the engine's arithmetic moves to one thread of its own,
in order, so that the loop is never held up; for small ones a thread hop would cost more than the work.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from afl._version import __version__
from afl.algorithms.afl_com import Realizations
from afl.algorithms.registry import server_half
from afl.codecs.payload import bytes_of
from afl.config import Config
from afl.engine import Evaluation, Opening, RoundEngine
from afl.errors import ConfigError, ExitCode
from afl.initialization import realization_digest
from afl.messages import (
    EVALUATION_PHASE,
    NOWHERE,
    Ack,
    Encoding,
    FailureCause,
    GoodbyeStatus,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
    Role,
    Step,
    ValueType,
)
from afl.parameters import ParameterVector
from afl.randomness import Purpose, SharedRandomness
from afl.tasks.registry import task_identity
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent, WireCount, float_equivalents
from afl.wire.fast_chunk import ChunkView
from afl.wire.frames import PROTOCOL, control, position_of, traffic_of_kind
from afl.wire.settings import RunSettings
from afl_server.broadcast import Broadcast
from afl_server.records import RunRecords, copy_of
from afl_server.session import Session, State, read_join

LOG = logging.getLogger("afl.server")

INLINE_DIM = 1 << 20
"""Up to this dimension the engine runs on the event loop: its longest call is then a few milliseconds."""

PROBE_TIMEOUT_S = 5.0
"""How long a session may take to prove that it is alive when another claims one of its workers."""

FAREWELL_TIMEOUT_S = 10.0
"""How long the end of the run waits for workers to have read their goodbye."""

_R = TypeVar("_R")


@dataclass
class Tallies:
    """Counters of the run, read by metrics and the summary."""

    uplink: WireCount = field(default_factory=WireCount)
    downlink: WireCount = field(default_factory=WireCount)
    sessions: int = 0
    refused: int = 0
    reconnections: int = 0
    lost_residuals: int = 0
    digest_mismatches: int = 0
    failures: int = 0
    refused_reports: int = 0


class Coordinator:
    """Drives one run to its end.

    Args:
        config: with its seed filled in.
        vector: the initial model; becomes the run's model.
        local_options: the task's options that are this machine's own and are not sent.
    """

    def __init__(
        self,
        config: Config,
        vector: ParameterVector,
        randomness: SharedRandomness,
        records: RunRecords,
        local_options: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self.settings = RunSettings.of_config(config, local_options)
        self.run_id = records.run_id
        self.tallies = Tallies()
        self.vector = vector
        self.records = records
        algorithm = server_half(self.settings.parameters, vector.values, randomness)
        self.engine = RoundEngine(
            algorithm,
            workers=config.workers,
            rounds=config.algorithm.rounds,
            evaluate_every=config.evaluation.every,
        )
        self.random_round = randomness.stream(Purpose.RANDOM_OUTPUT).integer(config.algorithm.rounds) + 1
        self.sessions: set[Session] = set()
        self.result: asyncio.Future[tuple[ExitCode, str]] = asyncio.get_running_loop().create_future()
        self.started_at = time.monotonic()
        self.round_started_at = time.monotonic()
        self.first_round_at: float | None = None
        self._randomness = randomness
        self._layout_hash = vector.layout_hash()
        self._digest = realization_digest(Realizations(self.settings.parameters, vector.dim, randomness))
        self._owners: dict[int, Session] = {}
        self._known: dict[int, bytes] = {}
        self._open: Broadcast = Broadcast.whole(
            self.engine.step, NOWHERE, (), self.engine.dual_weights.tolist(), self.settings.chunk_bytes
        )
        self._streaming: Broadcast | None = None
        self._model: Broadcast | None = None
        self._inline = vector.dim <= INLINE_DIM
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="afl-engine")
        self._turn = asyncio.Lock()
        self._relief = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    # The run.

    async def start(self) -> None:
        """Record the initial model if it is the random output."""
        if self.random_round == 1:
            await self._save("random", rounds_applied=0)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or badly."""
        return self.result.done()

    @property
    def missing_workers(self) -> list[int]:
        """Workers without a session that is ready."""
        return [worker for worker in range(self.config.workers) if not self._is_ready(worker)]

    @property
    def stragglers(self) -> list[int]:
        """Workers whose report the open step waits for."""
        return self.engine.missing()

    async def abort(self, code: ExitCode, reason: str) -> None:
        """End the run before its last round."""
        if not self.is_over:
            LOG.error("the run stops: %s", reason, extra={"event": "run_aborted", "code": int(code)})
            await self._save("final", rounds_applied=self._rounds_applied())
            self._finish(code, reason, GoodbyeStatus.ABORTED)

    def _rounds_applied(self) -> int:
        position = self.engine.step.position
        return position.round if position.phase == EVALUATION_PHASE else position.round - 1

    def _finish(self, code: ExitCode, reason: str, status: GoodbyeStatus) -> None:
        if self.is_over:
            return
        self.result.set_result((code, reason))
        for session in list(self.sessions):
            session.end(status, reason)

    async def farewell(self) -> None:
        """Wait, bounded, until every session has read its goodbye."""
        deadline = time.monotonic() + FAREWELL_TIMEOUT_S
        while self.sessions and time.monotonic() < deadline:
            waiting = [asyncio.ensure_future(session.is_over.wait()) for session in self.sessions]
            await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for task in waiting:
                task.cancel()
        self._thread.shutdown(wait=True)

    # Sessions.

    def admit(self, peer: str) -> Session:
        """A new stream's session; one too many is ended at once."""
        session = Session(self, peer)
        if len(self.sessions) >= self.config.server.max_sessions:
            self.tallies.refused += 1
            session.end(
                GoodbyeStatus.TRY_LATER,
                f"the server holds {len(self.sessions)} sessions, as many as server.max_sessions allows",
            )
        self.sessions.add(session)
        self.tallies.sessions += 1
        return session

    async def join(self, session: Session, message: pb.Join) -> None:
        """A session's first frame: check who it is and welcome it, or end it."""
        if self.is_over:
            code, reason = self.result.result()
            finished = code is ExitCode.OK
            session.end(GoodbyeStatus.FINISHED if finished else GoodbyeStatus.ABORTED, reason)
            return
        refusal = self._refusal(message)
        if refusal:
            self.refuse(session, refusal)
            return
        workers, standings = read_join(message)
        outside = [worker for worker in workers if worker >= self.config.workers]
        if outside:
            self.refuse(
                session,
                f"worker {outside[0]} is out of range: the run has {self.config.workers} workers, "
                f"0 to {self.config.workers - 1}",
            )
            return
        for worker in workers:
            if not await self._take_over(worker, message.incarnation):
                self.refuse(
                    session,
                    f"worker {worker} is taken: another process "
                    f"({self._owners[worker].peer}) runs it and answers",
                )
                return
        session.workers = workers
        session.reported = standings
        session.incarnation = message.incarnation
        session.applied = position_of(message.applied) if message.run_id else NOWHERE
        for worker in workers:
            self._owners[worker] = session
        session.state = State.JOINED
        session.send(control(pb.ServerFrame(welcome=self._welcome(session, message))))

    def refuse(self, session: Session, reason: str) -> None:
        """End a session that cannot help the run."""
        self.tallies.refused += 1
        LOG.warning("refused %s: %s", session.label, reason, extra={"event": "refused"})
        session.end(GoodbyeStatus.REFUSED, reason)

    async def make_ready(self, session: Session, message: pb.Ready) -> None:
        """A session's worker has its task, data and model."""
        if message.layout_hash != self._layout_hash:
            self.refuse(
                session,
                f"the model's layout differs: this worker's has {message.dim} trainable parameters, the "
                f"run's {self.vector.dim}; names, shapes, types and order must be the same (is the task's "
                "version, or an option of it, another?)",
            )
            return
        if not hmac.compare_digest(message.realization_digest, self._digest):
            self.refuse(
                session,
                "the shared randomness differs: this worker draws another first realization from the same "
                "seed, so it would decode wrongly (is its afl or a compressor plugin another version?)",
            )
            return
        await self._check_residuals(session)
        if session.state is not State.JOINED:
            return
        async with self._turn:
            session.state = State.READY
            await self._catch_up(session)
        LOG.info("%s ready", session.label, extra={"event": "worker_ready", "workers": list(session.workers)})

    async def leave(self, session: Session) -> None:
        """A session's stream has ended; idempotent."""
        if session.is_over.is_set():
            return
        session.state = State.ENDED
        session.is_over.set()
        self.sessions.discard(session)
        for worker in session.workers:
            if self._owners.get(worker) is session:
                del self._owners[worker]
                if not self.is_over:
                    async with self._turn:
                        self.engine.cut(worker)
        self._relieve()
        if session.workers and not self.is_over:
            LOG.warning("%s gone", session.label, extra={"event": "session_ended"})

    def fail(self, session: Session, message: pb.Failure) -> None:
        """A worker could not do a step."""
        self.tallies.failures += 1
        position = position_of(message.position)
        where = f"worker {message.worker}, round {position.round}"
        LOG.error(
            "%s failed: %s\n%s",
            where,
            message.message,
            message.traceback,
            extra={"event": "worker_failed", "worker": message.worker, "round": position.round},
        )
        if int(message.cause) == FailureCause.NON_FINITE and message.worker in session.workers:
            self._spawn(self.abort(ExitCode.DIVERGED, f"{where}: {message.message}"))

    # Reports.

    async def begin_report(self, report: Report) -> Ack | None:
        """A report's opening."""
        if self.is_over:
            return None
        if self.engine.step.kind is Kind.TRAIN and report.position == self.engine.step.position:
            self.tallies.uplink.float_equivalents += 1 + sum(map(float_equivalents, report.payloads))
        async with self._turn:
            ack = self.engine.begin_report(report)
        await self._after(ack)
        return ack

    async def add_piece(self, chunk: pb.Chunk | ChunkView) -> Ack | None:
        """The next piece of a payload."""
        header = self.engine.incoming_header(chunk.worker)
        if self.is_over or header is None:
            return None
        # A piece of plain values is summed in a fraction of a millisecond; a thread hop would cost more.
        is_short = header.encoding is not Encoding.INDEXED
        async with self._turn:
            ack = await self._on_engine(
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
        return self._owners.get(worker) is session

    def is_congested(self, session: Session) -> bool:
        """Whether to stop reading from a session: what it sends must wait, and enough waits already."""
        engine = self.engine
        if engine.algorithm.waiting_bytes <= self.config.server.reorder_buffer:
            return False
        pending = next((worker for worker in session.workers if not engine.holds(worker)), None)
        return pending is not None and engine.algorithm.would_wait(pending)

    async def relief(self) -> None:
        """Wait until the sum has moved on."""
        await self._relief.wait()

    def count_received(self, length: int, content: FrameContent) -> None:
        """A frame has come in."""
        self.tallies.uplink.add(length, content)

    def count_chunk(self, length: int, chunk: ChunkView) -> None:
        """A frame with one chunk and nothing else has come in."""
        header = self.engine.incoming_header(chunk.worker)
        in_indices = max(0, min(len(chunk.data), (header.index_bytes if header else 0) - chunk.offset))
        traffic = traffic_of_kind(self.engine.step.kind)
        content = FrameContent(traffic, values=len(chunk.data) - in_indices, indices=in_indices)
        self.tallies.uplink.add(length, content)

    def count_commit(self, session: Session, broadcast: Broadcast) -> None:
        """A step has gone out to a session: what the paper would charge for it, for each worker."""
        charge = sum(map(float_equivalents, broadcast.headers)) + 1
        self.tallies.downlink.float_equivalents += charge * len(session.workers)
        session.applied = broadcast.step.position

    # Inner workings.

    async def _on_engine(self, call: Callable[..., _R], *args: object, is_short: bool = False) -> _R:
        """Run an engine call: here if it or the model is small, else on the engine's thread.

        Whoever calls holds the turn.
        """
        if self._inline or is_short:
            return call(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    async def _after(self, ack: Ack | None) -> None:
        """What an accepted piece or report sets in motion."""
        if ack is not None and ack.reason:
            self.tallies.refused_reports += 1
            return
        self._relieve()
        if not self._inline:
            await self._stream()
        if ack is not None and self.engine.complete and not self.is_over:
            await self._close_step()

    def _relieve(self) -> None:
        self._relief.set()
        self._relief = asyncio.Event()

    async def _stream(self) -> None:
        """Broadcast what is already final of the next payload."""
        step = self.engine.next_step()
        if step is None:
            return
        ready = self.engine.algorithm.streamed()
        if self._streaming is None:
            if len(ready) < self.settings.chunk_bytes:
                return
            self._streaming = Broadcast(step, self.engine.step.position)
            # Every worker has begun its report, so every model has the open step's payload.
            self._open.forget_payload()
            self._send_to_ready(self._streaming)
        broadcast = self._streaming
        complete = len(ready) == step.payloads[0].total_bytes
        before = len(broadcast.frames)
        broadcast.extend(ready, self.settings.chunk_bytes, complete=complete)
        if len(broadcast.frames) > before:
            broadcast.announce()

    async def _close_step(self) -> None:
        """All workers have reported: close the step and broadcast the next."""
        async with self._turn:
            if not self.engine.complete:
                return
            closed = self.engine.step
            if closed.kind is Kind.EVALUATE:
                digest = await self._on_engine(self._own_digest)
                self.engine.expect_digest(digest)
            opening = await self._on_engine(self.engine.advance)
            self._model = None
            if opening is not None:
                if closed.kind is Kind.EVALUATE and self.engine.last_evaluation is not None:
                    await self._heal(self.engine.last_evaluation)
                await self._broadcast(closed, opening)
        if closed.kind is Kind.EVALUATE:
            assert self.engine.last_evaluation is not None
            await self._evaluated(self.engine.last_evaluation)
        else:
            self._trained(closed)
        if opening is None:
            await self._save("final", rounds_applied=closed.position.round)
            self._finish(ExitCode.OK, "the run is complete", GoodbyeStatus.FINISHED)
            return
        self._settle_soon()
        if opening.step.position == Position(self.random_round, 0):
            await self._save("random", rounds_applied=self.random_round - 1)

    async def _broadcast(self, closed: Step, opening: Opening) -> None:
        weights = opening.dual_weights.tolist()
        if self._streaming is not None:
            assert self._streaming.step == opening.step
            self._open, self._streaming = self._streaming, None
            self._open.close(weights)
            return
        chunk_bytes = self.settings.chunk_bytes
        self._open = await self._on_engine(
            Broadcast.whole, opening.step, closed.position, opening.payloads, weights, chunk_bytes
        )
        self._send_to_ready(self._open)

    def _send_to_ready(self, broadcast: Broadcast) -> None:
        for session in self.sessions:
            if session.state is State.READY:
                session.send(broadcast)

    def _trained(self, closed: Step) -> None:
        now = time.monotonic()
        summary = self.engine.last_round
        assert summary is not None
        assert summary.round == closed.position.round
        if self.first_round_at is None:
            self.first_round_at = now
        self.records.train_round(
            summary,
            seconds=now - self.round_started_at,
            up=self.tallies.uplink,
            down=self.tallies.downlink,
        )
        self.round_started_at = now

    async def _evaluated(self, evaluation: Evaluation) -> None:
        is_best = self.records.evaluation(evaluation, up=self.tallies.uplink, down=self.tallies.downlink)
        self.round_started_at = time.monotonic()
        if is_best:
            await self._save("best", rounds_applied=evaluation.round)

    async def _heal(self, evaluation: Evaluation) -> None:
        """Send the model to workers whose copy is not the server's, before the next step reaches them."""
        for worker in evaluation.diverged:
            self.tallies.digest_mismatches += 1
            LOG.error(
                "worker %d: its model differs from the server's after round %d; it is sent the model",
                worker,
                evaluation.round,
                extra={"event": "digest_mismatch", "worker": worker, "round": evaluation.round},
            )
        owners = (self._owners.get(worker) for worker in evaluation.diverged)
        for session in dict.fromkeys(owners):
            if session is not None and session.state is State.READY:
                await self._send_model(session)

    def _settle_soon(self) -> None:
        """Move the server's own model once the broadcast is on its way."""
        if self._inline:
            asyncio.get_running_loop().call_soon(self.engine.algorithm.settle)
        else:
            self._spawn(self._settle())

    async def _settle(self) -> None:
        async with self._turn:
            await self._on_engine(self.engine.algorithm.settle)

    def _own_digest(self) -> bytes:
        self.engine.algorithm.settle()
        return self.vector.digest()

    async def _save(self, name: str, *, rounds_applied: int) -> None:
        """Write a copy of the model; the copy is taken now, the disk is not waited for on the loop."""
        async with self._turn:
            tensors = await self._on_engine(self._copy)
        await asyncio.to_thread(self.records.save_model, name, tensors, rounds_applied)

    def _copy(self) -> dict[str, Tensor]:
        self.engine.algorithm.settle()
        return copy_of(self.vector)

    def _refusal(self, message: pb.Join) -> str:
        """Why a Join cannot be accepted, or nothing."""
        if message.protocol != PROTOCOL:
            return (
                f"protocol version {message.protocol} (afl {message.package_version}) cannot talk to "
                f"protocol version {PROTOCOL} (afl {__version__}); install the same afl at both ends"
            )
        if message.package_version != __version__:
            return (
                f"this worker runs afl {message.package_version}, the server afl {__version__}; "
                "mixed versions are refused: install the same at both ends"
            )
        if message.run_id and message.run_id != self.run_id:
            return (
                f"this worker belongs to run {message.run_id}; this server runs {self.run_id}. "
                "Restart the worker to join the new run"
            )
        if message.task and not _is_same_task(message.task, self.config.task.name):
            return (
                f"this worker was started for the task {message.task!r}; the run's is "
                f"{self.config.task.name!r}. Start it without --task, or with the run's"
            )
        if message.layout_hash and message.layout_hash != self._layout_hash:
            return (
                "the model's layout differs from the run's: names, shapes, types and order must be the same"
            )
        return ""

    async def _take_over(self, worker: int, incarnation: bytes) -> bool:
        """Whether a new session may have the worker: nobody has it, or who has it is gone."""
        owner = self._owners.get(worker)
        if owner is None:
            return True
        if owner.incarnation != incarnation:
            owner.heard.clear()
            owner.send(control(pb.ServerFrame(heartbeat=pb.Heartbeat(reply_wanted=True))))
            try:
                await asyncio.wait_for(owner.heard.wait(), PROBE_TIMEOUT_S)
            except TimeoutError:
                LOG.warning("%s does not answer and is replaced", owner.label, extra={"event": "replaced"})
            else:
                return self._owners.get(worker) is None
        owner.end(GoodbyeStatus.TRY_LATER, "replaced by a newer session")
        await self.leave(owner)
        return True

    def _is_ready(self, worker: int) -> bool:
        owner = self._owners.get(worker)
        return owner is not None and owner.state is State.READY

    def _welcome(self, session: Session, message: pb.Join) -> pb.Welcome:
        is_first = not message.run_id
        if not is_first:
            self.tallies.reconnections += 1
        position = self.engine.step.position
        return pb.Welcome(
            run_id=self.run_id,
            server_version=__version__,
            settings=self.settings.to_message(),
            seed=self._randomness.seed if is_first else b"",
            workers=[
                pb.Expectation(
                    worker=worker,
                    position=pb.Position(round=position.round, phase=position.phase),
                    held=self.engine.holds(worker),
                )
                for worker in session.workers
            ],
        )

    async def _check_residuals(self, session: Session) -> None:
        """A new process for a worker that has already reported has lost its residual: say so, or refuse."""
        fresh = [worker for worker in session.workers if self._known.get(worker) != session.incarnation]
        lost = [
            worker
            for worker in fresh
            if worker in self._known and session.reported[worker] == NOWHERE and self._had_residual(worker)
        ]
        if lost and self.config.faults.lost_residual == "refuse":
            self.refuse(
                session,
                f"worker {lost[0]} comes back without its uplink residual, "
                "and faults.lost_residual is refuse",
            )
            return
        for worker in lost:
            self.tallies.lost_residuals += 1
            LOG.warning(
                "worker %d came back without its uplink residual; it goes on with a zero residual",
                worker,
                extra={"event": "lost_residual", "worker": worker},
            )
        for worker in fresh:
            if self.engine.is_partial(worker):
                await self._restart_round(worker)
        self._known.update(dict.fromkeys(session.workers, session.incarnation))

    def _had_residual(self, worker: int) -> bool:
        """Whether the worker's earlier process had a residual worth losing."""
        reported_once = self.engine.step.position > Position(1, 0) or self.engine.holds(worker)
        return reported_once and self.settings.parameters.uplink.name != "identity"

    async def _restart_round(self, worker: int) -> None:
        """Part of a payload is in the sum whose rest will never come: begin the sum again.

        Every other session is cut; each comes back by itself and sends its report again.
        """
        LOG.warning(
            "worker %d restarted in the middle of its report: round %d is summed again",
            worker,
            self.engine.step.position.round,
            extra={"event": "round_restarted", "worker": worker},
        )
        async with self._turn:
            self.engine.restart_round()
            self._streaming = None
        for other in list(self.sessions):
            if worker not in other.workers and other.state is State.READY:
                other.end(GoodbyeStatus.TRY_LATER, "the round's sum begins again")

    async def _catch_up(self, session: Session) -> None:
        """Bring a session's model to the open step, and let it follow what is already under way."""
        if session.applied == self._open.step.position and session.applied != NOWHERE:
            if any(not self.engine.holds(worker) for worker in session.workers):
                session.send(self._repeat_open())
        elif session.applied == self._open.base and session.applied != NOWHERE:
            session.send(self._open)
        else:
            await self._send_model(session)
            session.send(self._repeat_open())
        if self._streaming is not None:
            session.send(self._streaming)

    def _repeat_open(self) -> Broadcast:
        """The open step without its payload, for a model that already has it."""
        opening = self.engine.opening()
        return Broadcast.whole(
            opening.step, self._open.base, (), opening.dual_weights.tolist(), self.settings.chunk_bytes
        )

    async def _send_model(self, session: Session) -> None:
        if self._model is None:
            self._model = await self._on_engine(self._model_broadcast)
        session.send(self._model)

    def _model_broadcast(self) -> Broadcast:
        self.engine.algorithm.settle()
        values = self.vector.numpy()
        payloads = [Payload(model_header(self.vector.dim), (bytes_of(values),))]
        frozen = self.vector.frozen_bytes()
        if frozen:
            payloads.append(Payload(frozen_header(len(frozen)), (memoryview(frozen),)))
        step = Step(self.engine.step.position, Kind.MODEL, tuple(payload.header for payload in payloads))
        weights = self.engine.dual_weights.tolist()
        return Broadcast.whole(step, NOWHERE, payloads, weights, self.settings.chunk_bytes)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _is_same_task(one: str, other: str) -> bool:
    try:
        return task_identity(one) == task_identity(other)
    except ConfigError:
        return False


def model_header(dim: int) -> PayloadHeader:
    """The header of a whole model."""
    return PayloadHeader(Role.MODEL, Encoding.DENSE, dim, dim, 4 * dim)


def frozen_header(length: int) -> PayloadHeader:
    """The header of the parameters that are not trained."""
    return PayloadHeader(Role.FROZEN, Encoding.DENSE, length, length, length, ValueType.BYTES)
