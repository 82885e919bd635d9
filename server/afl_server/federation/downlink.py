"""What members are sent: the open step, the next one while it is being summed, and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from afl.core.messages import NOWHERE, Kind, Position, Step
from afl.core.rounds.results import Evaluation, Opening
from afl.daemon import events as log_events
from afl.wire.frames import ack_frame, receipt_frame
from afl_server.federation.broadcast import Broadcast, model_payloads
from afl_server.federation.counters import Incident
from afl_server.federation.effects import Announce, Follow, Job
from afl_server.federation.events import NO_STEP
from afl_server.federation.members import Member, State
from afl_server.federation.run import Run


class Downlink:
    """Serializes each step once, for all members."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._engine = run.engine
        self._members = run.members
        self._chunk_bytes = run.config.server.chunk_bytes
        self._open = self._framed(run.engine.opening(), NOWHERE)
        self._streaming: Broadcast | None = None
        self._model: Broadcast | None = None

    def begin_with(self, opening: Opening, base: Position) -> None:
        """A resumed run's open step, before any member."""
        self._open = self._framed(opening, base)

    def stream(self) -> None:
        """Broadcast what is already final of the next payload."""
        engine = self._engine
        step = engine.next_step()
        if step is None:
            return
        ready = engine.algorithm.streamed()
        if self._streaming is None:
            if len(ready) < self._chunk_bytes:
                return
            self._streaming = Broadcast(step, engine.step.position, range(engine.workers))
            # Every worker has begun its report, so every model has the open step's payload.
            self._open.forget_payload()
            self._model = None
            self._send_to_ready(self._streaming)
        broadcast = self._streaming
        complete = len(ready) == step.payloads[0].total_bytes
        before = len(broadcast.frames)
        broadcast.extend(ready, self._chunk_bytes, complete=complete)
        if len(broadcast.frames) > before:
            self._run.out.append(Announce())

    def abandon(self) -> None:
        """What is being streamed will never be complete."""
        if self._streaming is not None:
            self._streaming.is_abandoned = True
            self._streaming = None
            self._run.out.append(Announce())

    def model_moved(self) -> None:
        """The model is not what was last sent of it."""
        self._model = None

    def open(self, opening: Opening, closed: Step) -> Job[None]:
        """Send the step that has been opened; the rest of it, where it has been streamed."""
        if self._streaming is not None:
            assert self._streaming.step == opening.step
            self._open, self._streaming = self._streaming, None
            self._open.close(self._told(opening))
            self._run.out.append(Announce())
            return
        self._open = yield from self._run.compute(lambda: self._framed(opening, closed.position))
        self._send_to_ready(self._open)

    def catch_up(self, member: Member) -> Job[None]:
        """Bring a member's model to the open step, and let it follow what is already under way."""
        engine = self._engine
        # Whatever the policy is now: a process before this one may have closed steps without the late.
        for worker, reported in member.reported.items():
            if engine.is_late(worker, reported):
                self._run.counters.late_reports += 1
                self._run.send(member.id, ack_frame(engine.late_ack(worker, reported), Kind.TRAIN))
        if not self._open.is_for(member.workers):
            # Its next step brings the model; what is not trained comes at the first contact only.
            if member.applied == NOWHERE:
                yield from self._send_model(member)
            return
        position = self._open.step.position
        # A report that was made before is sent again by itself, unless it was held when the worker was
        # welcomed, and the sum has begun again since; one that is held is not made again.
        asked = [
            worker
            for worker in member.workers
            if worker in self._open.participants
            and (member.reported[worker] != position or worker in member.told_held)
            and not engine.holds(worker)
        ]
        if member.applied == self._open.base != NOWHERE:
            yield from self._go_on(member, self._open)
        else:
            if member.applied != position:
                yield from self._send_model(member)
            if asked:
                self._follow(member, self._repeated(asked))
        if self._streaming is not None:
            yield from self._go_on(member, self._streaming)

    def _go_on(self, member: Member, broadcast: Broadcast) -> Job[None]:
        """Send a step to a member that has just become ready; the rest of it, where it has a part."""
        partial, first = member.partial, None
        if (partial.position, partial.kind) == (broadcast.step.position, broadcast.step.kind):
            member.partial = NO_STEP
            if (yield from self._run.compute(lambda: broadcast.begins_with(partial))):
                first = partial.payload, partial.offset
        self._run.out.append(Follow(member.id, member.workers, broadcast, first))

    def acknowledge(self, closed: Step, reported: Sequence[int]) -> None:
        """Tell workers whose models are in a closed step, and whose process is not sent the next one, that
        they need not be kept."""
        for worker in reported if closed.kind is Kind.TRAIN else ():
            owner = self._members.owners.get(worker)
            if owner is not None and owner.state is State.READY and not self._open.is_for(owner.workers):
                self._run.send(owner.id, receipt_frame(worker, closed.position))

    def go_on_with(self, member: Member) -> Job[None]:
        """Send the open step to a member that owes nothing any more, whatever its model is."""
        if self._open.is_for(member.workers):
            yield from self._send_model(member)
            self._follow(member, self._repeated())

    def tell_diverged(self, evaluation: Evaluation, *, is_last: bool) -> None:
        """Log and count the workers whose model is not the server's."""
        self._run.count(Incident.DIGEST_MISMATCH, evaluation.diverged)
        self._run.counters.digest_mismatches += len(evaluation.diverged)
        end = "" if is_last else "; it is sent the model"
        for worker in evaluation.diverged:
            mismatch = log_events.DigestMismatch(worker=worker, round=evaluation.round)
            message = f"worker {worker}: its model differs from the server's after round {evaluation.round}"
            self._run.log("ERROR", message + end, mismatch)

    def heal(self, evaluation: Evaluation) -> Job[None]:
        """Send the model to workers whose copy is not the server's, before the next step reaches them."""
        for member in dict.fromkeys(map(self._members.owners.get, evaluation.diverged)):
            if member is not None and member.state is State.READY:
                yield from self._send_model(member)

    def _send_to_ready(self, broadcast: Broadcast) -> None:
        for member in self._members.ready():
            # Who owes a report must know that it is late before another step is taken.
            if broadcast.is_for(member.workers) and not member.owes:
                self._follow(member, broadcast)

    def _follow(self, member: Member, broadcast: Broadcast) -> None:
        self._run.out.append(Follow(member.id, member.workers, broadcast))

    def _send_model(self, member: Member) -> Job[None]:
        if self._model is None:
            self._model = yield from self._run.compute(self._model_broadcast)
        yield from self._go_on(member, self._model)

    def _model_broadcast(self) -> Broadcast:
        engine = self._engine
        payloads = tuple(model_payloads(engine.model, engine.worker_params, engine.algorithm.companions))
        step = Step(self._engine.step.position, Kind.MODEL, tuple(payload.header for payload in payloads))
        everybody = range(self._engine.workers)
        return self._framed(Opening(step, payloads, np.empty(0), everybody), NOWHERE)

    def _repeated(self, asked: Sequence[int] | None = None) -> Broadcast:
        """The open step without its payload, for a model that already has it.

        Args:
            asked: the workers that are to answer; by default all that take part.
        """
        opening = self._engine.opening()
        if asked is not None:
            opening = replace(opening, participants=asked, left_out=frozenset())
        return self._framed(opening, self._open.base)

    def _framed(self, opening: Opening, base: Position) -> Broadcast:
        return Broadcast.whole(opening, base, dual_weights=self._told(opening), chunk_bytes=self._chunk_bytes)

    def _told(self, opening: Opening) -> list[float]:
        """What workers are told of q."""
        return opening.dual_weights.tolist() if self._engine.algorithm.sends_dual_weights else []
