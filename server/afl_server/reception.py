"""Sessions that come and go: who is let in, what a newcomer must know, and what a leaver leaves behind."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from afl._version import __version__
from afl.core.messages import NOWHERE, FailureCause, GoodbyeStatus
from afl.daemon import events
from afl.errors import ExitCode, ProtocolError, place
from afl.tasks.initialization import realization_digest
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import control, position_of
from afl_server.federation.admission import Admission
from afl_server.federation.counters import Incident
from afl_server.federation.log_rate import LogRate, and_left_out
from afl_server.network.authentication import Identity
from afl_server.session import Session, State, read_join, read_standings

if TYPE_CHECKING:
    from afl_server.coordinator import Coordinator

LOG = logging.getLogger("afl.server")


class Reception:
    """Lets sessions into a run, and sees them off.

    Args:
        run: whose sessions they are.
    """

    def __init__(self, run: Coordinator) -> None:
        self._run = run
        self._sparing = LogRate()
        self._admission = Admission(
            run_id=run.run_id,
            task=run.config.task.name,
            workers=run.config.workers,
            layout_hash=run.vector.layout_hash(),
            dim=run.vector.dim,
            realization_digest=realization_digest(run.engine.algorithm),
        )

    def admit(self, peer: str, identity: Identity) -> Session:
        """A new stream's session; that of a peer without identity, or one too many, is ended at once."""
        session = Session(self._run, peer, identity)
        if identity.refusal:
            self.refuse(session, identity.refusal)
            return session
        if len(self._run.roster) >= self._run.config.server.max_sessions:
            reason = (
                f"the server holds {len(self._run.roster)} sessions, as many as server.max_sessions allows"
            )
            self._turn_away(session, reason, GoodbyeStatus.TRY_LATER)
            return session
        self._run.roster.add(session)
        self._run.counters.sessions += 1
        return session

    async def join(self, session: Session, message: pb.Join) -> None:
        """A session's first frame: check who it is and welcome it, or end it."""
        forbidden = session.identity.forbids(message.workers)
        if forbidden:
            self.refuse(session, forbidden)
            return
        if self._run.is_over:
            self._run.informed.update(message.workers)
            session.end(self._run.last_word, self._run.result.result()[1])
            return
        refusal = self._admission.of_join(message)
        if refusal:
            self.refuse(session, refusal)
            return
        workers = read_join(message)
        roster = self._run.roster
        # While one owner is waited for, another may come for a worker that was free: ask until none has.
        while (worker := next((one for one in workers if roster.owner(one) is not None), None)) is not None:
            rival = await roster.rival(worker, message.incarnation)
            if rival is not None:
                self.refuse(
                    session,
                    f"worker {worker} is taken: another process ({rival.peer}) runs it and answers; "
                    "start this one with another --id, or end that one",
                )
                return
            replaced = roster.owner(worker)
            if replaced is not None:
                await self.leave(replaced)
        if session.state is not State.NEW:
            # Told meanwhile that the run is over.
            return
        session.workers = workers
        session.incarnation = message.incarnation
        session.applied = position_of(message.applied) if message.run_id else NOWHERE
        roster.give(session)
        session.state = State.JOINED
        session.send(control(pb.ServerFrame(welcome=self._welcome(session, message))))

    def refuse(self, session: Session, reason: str) -> None:
        """End a session that cannot help the run."""
        self._turn_away(session, reason, GoodbyeStatus.REFUSED)

    def _turn_away(self, session: Session, reason: str, status: GoodbyeStatus) -> None:
        self._run.counters.refused += 1
        left_out = self._sparing.left_out(f"refused {session.workers}: {reason}", time.monotonic())
        if left_out is not None:
            LOG.warning(
                "refused %s: %s%s",
                session.label,
                reason,
                and_left_out(left_out),
                extra=events.Refused(
                    peer=session.peer, workers=session.workers, reason=reason, left_out=left_out
                ).extra,
            )
        session.end(status, reason)

    def tell_not_reading(self, session: Session) -> None:
        """A session is cut off, since its peer takes nothing."""
        left_out = self._sparing.left_out(f"not reading {session.workers}", time.monotonic())
        if left_out is not None:
            LOG.warning(
                "%s takes nothing of what it is sent and is cut off%s",
                session.label,
                and_left_out(left_out),
                extra=events.NotReading(peer=session.peer, workers=session.workers, left_out=left_out).extra,
            )

    async def make_ready(self, session: Session, message: pb.Ready) -> None:
        """A session's worker has its task, data and model."""
        session.reported = read_standings(message, session.workers)
        refusal = self._admission.of_ready(message) or self._residual_refusal(session)
        if refusal:
            self.refuse(session, refusal)
            return
        async with self._run.turn:
            if session.state is not State.JOINED:
                return
            self._admit_newcomers(session)
            session.state = State.READY
            self._run.deadline.start_once()
            await self._run.downlink.catch_up(session)
        LOG.info(
            "%s ready",
            session.label,
            extra=events.WorkerReady(peer=session.peer, workers=session.workers).extra,
        )

    async def leave(self, session: Session) -> None:
        """A session's stream has ended; idempotent."""
        if session.is_over.is_set():
            return
        session.state = State.ENDED
        session.is_over.set()
        freed = self._run.roster.remove(session)
        if not self._run.is_over:
            async with self._run.turn:
                for worker in freed:
                    self._run.engine.cut(worker)
        self._run.relieve()
        if session.workers and not self._run.is_over:
            LOG.warning(
                "%s gone",
                session.label,
                extra=events.SessionEnded(peer=session.peer, workers=session.workers).extra,
            )

    def fail(self, session: Session, message: pb.Failure) -> None:
        """A worker could not do a step.

        Raises:
            ProtocolError: if the session does not speak for the worker.
        """
        if message.worker not in session.workers:
            raise ProtocolError(f"a failure of worker {message.worker}, which is not one of this session's")
        self._run.counters.failures += 1
        self._run.incidents.count(Incident.FAILURE, [message.worker])
        position = position_of(message.position)
        rounds = self._run.settings.parameters.named(position.round)
        where = place(message.worker, rounds)
        LOG.error(
            "%s failed: %s",
            where,
            "\n".join(part for part in (message.message, message.traceback.rstrip()) if part),
            extra=events.WorkerFailed(worker=message.worker, round=position.round or None).extra,
        )
        is_non_finite = int(message.cause) == FailureCause.NON_FINITE
        if is_non_finite and not self._run.engine.policy.skips_non_finite:
            self._run.abort(ExitCode.DIVERGED, f"{where}: {message.message}")

    def _welcome(self, session: Session, message: pb.Join) -> pb.Welcome:
        if message.run_id:
            self._run.counters.reconnections += 1
        position = self._run.engine.step.position
        session.told_held = {worker for worker in session.workers if self._run.engine.holds(worker)}
        return pb.Welcome(
            run_id=self._run.run_id,
            server_version=__version__,
            settings=self._run.settings.to_message(),
            # A process that has built its model has drawn from the seed.
            seed=b"" if message.layout_hash else self._run.randomness.seed,
            workers=[
                pb.Expectation(
                    worker=worker,
                    position=pb.Position(round=position.round, phase=position.phase),
                    held=worker in session.told_held,
                )
                for worker in session.workers
            ],
            buffers_averaged=pb.Position(
                round=self._run.engine.buffers_averaged.round, phase=self._run.engine.buffers_averaged.phase
            ),
        )

    def _lost_residuals(self, session: Session) -> list[int]:
        """Workers whose residual is not the one after their last report that the server has."""
        engine = self._run.engine
        if not engine.algorithm.keeps_residuals:
            return []
        return [
            worker
            for worker in self._run.roster.newcomers(session)
            if session.reported[worker].round < engine.trained(worker)
            or session.reported[worker] > engine.step.position
        ]

    def _residual_refusal(self, session: Session) -> str:
        lost = self._lost_residuals(session)
        if not lost or self._run.config.faults.lost_residual != "refuse":
            return ""
        what = "ahead of this server" if self._is_ahead(session, lost[0]) else "without its uplink residual"
        return f"worker {lost[0]} comes back {what}, and faults.lost_residual is refuse"

    def _is_ahead(self, session: Session, worker: int) -> bool:
        """Whether the worker has reported of a round that the server, put back to an old state, has yet to
        open."""
        return session.reported[worker] > self._run.engine.step.position

    def _admit_newcomers(self, session: Session) -> None:
        """New processes: say what their workers have lost, and begin the sum again if it holds part of it."""
        lost = self._lost_residuals(session)
        self._run.incidents.count(Incident.LOST_RESIDUAL, lost)
        for worker in lost:
            self._run.counters.lost_residuals += 1
            if self._is_ahead(session, worker):
                LOG.warning(
                    "worker %d has reported of %s, which this server has yet to open: its state is an "
                    "older one; the worker goes on from there, with the residual that it has",
                    worker,
                    self._run.settings.parameters.named(session.reported[worker].round),
                    extra=events.WorkerAhead(worker=worker, round=session.reported[worker].round).extra,
                )
            else:
                LOG.warning(
                    "worker %d came back without its uplink residual; it goes on with %s",
                    worker,
                    "a zero residual" if session.reported[worker] == NOWHERE else "an older one",
                    extra=events.LostResidual(worker=worker).extra,
                )
        roster = self._run.roster
        restarted = [worker for worker in roster.newcomers(session) if roster.was_known(worker)]
        self._run.counters.worker_restarts += len(restarted)
        self._run.incidents.count(Incident.RESTART, restarted)
        open_position = self._run.engine.step.position
        partial = [
            worker
            for worker in self._run.roster.newcomers(session)
            # What a journal holds is sent again byte for byte.
            if self._run.engine.is_partial(worker) and session.reported[worker] != open_position
        ]
        if partial:
            self._run.restart_round(partial[0], session)
        self._run.roster.remember(session)
