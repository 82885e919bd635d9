"""What sessions are sent: the open step, the next one while it is being summed, and the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from afl.core.engine import Evaluation, Opening
from afl.core.messages import NOWHERE, Kind, Position, Step
from afl.daemon import events
from afl.wire.frames import ack_frame, receipt_frame
from afl_server.federation.broadcast import Broadcast, model_payloads
from afl_server.federation.counters import Incident
from afl_server.session import Session, State

if TYPE_CHECKING:
    from afl_server.coordinator import Coordinator

LOG = logging.getLogger("afl.server")


class Downlink:
    """Serializes each step once, for all sessions. Whoever calls what is a coroutine holds the run's turn.

    Args:
        run: whose steps and sessions they are.
    """

    def __init__(self, run: Coordinator) -> None:
        self._run = run
        self._open = self._framed(run.engine.opening(), NOWHERE)
        self._streaming: Broadcast | None = None
        self._model: Broadcast | None = None

    def begin_with(self, opening: Opening, base: Position) -> None:
        """The run goes on with this step, before any session."""
        self._open = self._framed(opening, base)

    def stream(self) -> None:
        """Broadcast what is already final of the next payload."""
        engine, chunk_bytes = self._run.engine, self._run.settings.chunk_bytes
        step = engine.next_step()
        if step is None:
            return
        ready = engine.algorithm.streamed()
        if self._streaming is None:
            if len(ready) < chunk_bytes:
                return
            self._streaming = Broadcast(step, engine.step.position, range(self._run.config.workers))
            # Every worker has begun its report, so every model has the open step's payload.
            self._open.forget_payload()
            self._model = None
            self._send_to_ready(self._streaming)
        broadcast = self._streaming
        complete = len(ready) == step.payloads[0].total_bytes
        before = len(broadcast.frames)
        broadcast.extend(ready, chunk_bytes, complete=complete)
        if len(broadcast.frames) > before:
            broadcast.announce()

    def abandon(self) -> None:
        """What is being streamed will never be complete."""
        if self._streaming is not None:
            self._streaming.abandon()
            self._streaming = None

    def model_moved(self) -> None:
        """The model is not what was last sent of it."""
        self._model = None

    async def open(self, opening: Opening, closed: Step) -> None:
        """Send the step that has been opened; the rest of it, where it has been streamed."""
        if self._streaming is not None:
            assert self._streaming.step == opening.step
            self._open, self._streaming = self._streaming, None
            self._open.close(self._told(opening.dual_weights))
            return
        self._open = await self._run.on_engine(self._framed, opening, closed.position)
        self._send_to_ready(self._open)

    async def catch_up(self, session: Session) -> None:
        """Bring a session's model to the open step, and let it follow what is already under way."""
        engine = self._run.engine
        # Whatever the policy is now: a process before this one may have closed steps without the late.
        for worker, reported in session.reported.items():
            if engine.is_late(worker, reported):
                self._run.counters.late_reports += 1
                session.send(ack_frame(engine.late_ack(worker, reported), Kind.TRAIN))
        if not self._open.is_for(session.workers):
            # Its next step brings the model; what is not trained comes at the first contact only.
            if session.applied == NOWHERE:
                await self._send_model(session)
            return
        position = self._open.step.position
        # A report that was made before is sent again by itself, unless it was held when the worker was
        # welcomed, and the sum has begun again since; one that is held is not made again.
        asked = [
            worker
            for worker in session.workers
            if worker in self._open.participants
            and (session.reported[worker] != position or worker in session.told_held)
            and not engine.holds(worker)
        ]
        if session.applied == self._open.base != NOWHERE:
            session.send(self._open)
        else:
            if session.applied != position:
                await self._send_model(session)
            if asked:
                session.send(self._repeated(asked))
        if self._streaming is not None:
            session.send(self._streaming)

    def acknowledge(self, closed: Step, reported: Sequence[int]) -> None:
        """Tell workers whose models are in a closed step, and whose process is not sent the next one, that
        they need not be kept."""
        for worker in reported if closed.kind is Kind.TRAIN else ():
            owner = self._run.roster.owner(worker)
            if owner is not None and owner.state is State.READY and not self._open.is_for(owner.workers):
                owner.send(receipt_frame(worker, closed.position))

    async def go_on_with(self, session: Session) -> None:
        """Send the open step to a session that owes nothing any more, whatever its model is."""
        if self._open.is_for(session.workers):
            await self._send_model(session)
            session.send(self._repeated())

    def tell_diverged(self, evaluation: Evaluation, *, is_last: bool) -> None:
        """Log and count the workers whose model is not the server's.

        Args:
            is_last: whether no step follows that would need another model.
        """
        self._run.incidents.count(Incident.DIGEST_MISMATCH, evaluation.diverged)
        for worker in evaluation.diverged:
            self._run.counters.digest_mismatches += 1
            LOG.error(
                "worker %d: its model differs from the server's after round %d%s",
                worker,
                evaluation.round,
                "" if is_last else "; it is sent the model",
                extra=events.DigestMismatch(worker=worker, round=evaluation.round).extra,
            )

    async def heal(self, evaluation: Evaluation) -> None:
        """Send the model to workers whose copy is not the server's, before the next step reaches them."""
        owners = map(self._run.roster.owner, evaluation.diverged)
        for session in dict.fromkeys(owners):
            if session is not None and session.state is State.READY:
                await self._send_model(session)

    def _send_to_ready(self, broadcast: Broadcast) -> None:
        for session in self._run.roster.ready():
            # Who owes a report must know that it is late before another step is taken.
            if broadcast.is_for(session.workers) and not session.owes:
                session.send(broadcast)

    async def _send_model(self, session: Session) -> None:
        if self._model is None:
            self._model = await self._run.on_engine(self._model_broadcast)
        session.send(self._model)

    def _model_broadcast(self) -> Broadcast:
        run = self._run
        run.engine.algorithm.settle()
        payloads = model_payloads(run.vector, run.engine.algorithm.worker_params)
        step = Step(run.engine.step.position, Kind.MODEL, tuple(payload.header for payload in payloads))
        return Broadcast.whole(
            step,
            NOWHERE,
            payloads,
            dual_weights=(),
            participants=range(run.config.workers),
            chunk_bytes=run.settings.chunk_bytes,
        )

    def _repeated(self, asked: Sequence[int] | None = None) -> Broadcast:
        """The open step without its payload, for a model that already has it.

        Args:
            asked: the workers that are to answer; by default all that take part.
        """
        opening = self._run.engine.opening()
        if asked is not None:
            opening = replace(opening, participants=asked)
        return self._framed(opening, self._open.base)

    def _framed(self, opening: Opening, base: Position) -> Broadcast:
        return Broadcast.whole(
            opening.step,
            base,
            opening.payloads,
            dual_weights=self._told(opening.dual_weights),
            participants=opening.participants,
            chunk_bytes=self._run.settings.chunk_bytes,
        )

    def _told(self, dual_weights: NDArray[np.float64]) -> list[float]:
        """What workers are told of q."""
        return dual_weights.tolist() if self._run.engine.algorithm.sends_dual_weights else []
