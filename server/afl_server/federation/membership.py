"""Members that come and go: who is let in, what a newcomer must know, and what a leaver leaves behind."""

from __future__ import annotations

from afl._version import __version__
from afl.config import Config
from afl.core.engine import RoundEngine
from afl.core.messages import NOWHERE, FailureCause, GoodbyeStatus
from afl.daemon import events as log_events
from afl.errors import ProtocolError, place
from afl.security.identity import MOST_WORKERS_A_SESSION
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import control
from afl.wire.settings import RunSettings
from afl_server.federation.admission import Admission
from afl_server.federation.counters import Counters, Incident, Incidents
from afl_server.federation.effects import Effect, End, HangUp, Heartbeat, Log, Send, Timer
from afl_server.federation.events import FailureTold, Joined, Opened, Ready
from afl_server.federation.log_rate import LogRate, and_left_out
from afl_server.federation.members import Member, Members, State

HEARTBEAT = control(pb.ServerFrame(heartbeat=pb.Heartbeat()))
HEARTBEAT_WITH_REPLY = control(pb.ServerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)))

PROBE_TIMEOUT_S = 5.0
"""How long a member may take to prove that it is alive when another process claims one of its workers."""


class Membership:
    """Lets members into a run, and sees them off.

    Attributes:
        farewell: what members are told once the run, or this process's part of it, is over; ``None`` before.
        informed: the workers that know of it.

    Args:
        seed: the run's, for processes that have yet to build their model.
        out: where effects are put.
    """

    def __init__(
        self,
        *,
        config: Config,
        settings: RunSettings,
        seed: bytes,
        engine: RoundEngine,
        members: Members,
        counters: Counters,
        incidents: Incidents,
        admission: Admission,
        out: list[Effect],
    ) -> None:
        self.farewell: tuple[GoodbyeStatus, str] | None = None
        self.informed: set[int] = set()
        self._server = config.server
        self._refuses_lost_residuals = config.faults.lost_residual == "refuse"
        self._settings = settings
        self._seed = seed
        self._engine = engine
        self._members = members
        self._counters = counters
        self._incidents = incidents
        self._admission = admission
        self._out = out
        self._log_rate = LogRate()
        self._claimants: dict[int, list[Member]] = {}
        """By the id of a member that is asked whether it is alive: those that claim one of its workers."""

    # Coming.

    def open(self, event: Opened, now: float) -> None:
        """A new stream; that of a peer without identity, or one too many, is ended at once."""
        member = Member(event.member, event.peer, event.permission, now)
        sessions = len(self._members)
        self._members.add(member)
        if event.permission.refusal:
            self.refuse(member, event.permission.refusal, now)
        elif sessions >= self._server.max_sessions:
            reason = f"the server holds {sessions} sessions, as many as server.max_sessions allows"
            self._turn_away(member, reason, GoodbyeStatus.TRY_LATER, now)
        else:
            self._counters.sessions += 1
            self._out.append(Timer("handshake", now + self._server.handshake_timeout, member.id))
            return
        self._members.remove(member, now)

    def hear(self, member: Member, now: float) -> None:
        """Something has come of a member: it is alive.

        Of one that has been ended nothing counts: it neither keeps its workers nor goes on being waited for.
        """
        if member.state is State.ENDED:
            return
        member.last_seen = now
        if member.state is State.NEW:
            self._out.append(Timer("handshake", None, member.id))
        if self._claimants:
            for claimant in self._no_longer_asked(member):
                self._refuse_taken(claimant, member, now)

    def handshake_expired(self, member: Member, now: float) -> None:
        """A stream on which nothing has come."""
        self.refuse(member, f"no Join within {self._server.handshake_timeout:g} s", now)

    def join(self, member: Member, event: Joined, now: float) -> None:
        """Check who it is and welcome it, or end it; who speaks for its workers already is asked first.

        Raises:
            ProtocolError: if the workers are not such as a Join may name.
        """
        if member.state is not State.NEW:
            raise ProtocolError("a second Join in one session")
        forbidden = member.permission.forbids(event.workers)
        if forbidden:
            self.refuse(member, forbidden, now)
            return
        if self.farewell is not None:
            self.informed.update(event.workers)
            self.end(member, *self.farewell)
            return
        refusal = self._admission.of_join(event)
        if refusal:
            self.refuse(member, refusal, now)
            return
        _check_workers(event.workers)
        member.join = event
        member.state = State.JOINING
        self._claim(member, now)

    def _claim(self, member: Member, now: float, *, may_ask: bool = True) -> None:
        """Give a joining member its workers, one owner after the other.

        The same process come back replaces its own stream; another must not answer a probe. A member that is
        replaced is told so; its stream then ends.
        """
        if member.state is not State.JOINING:
            # Told meanwhile that the run is over, or gone.
            return
        assert member.join is not None
        # When one owner has gone, another may have come for a worker that was free: ask until none is left.
        while (owner := self._members.owner_of_any(member.join.workers)) is not None:
            if owner.incarnation == member.incarnation:
                # Its process is alive, so whoever waited for it to be gone has waited in vain.
                for claimant in self._no_longer_asked(owner):
                    self._refuse_taken(claimant, owner, now)
                self._replace(owner, now)
            elif owner.is_paused or not may_ask:
                # The answer of one that is paused would not be read, since its turn in the sum has not come;
                # the transport's own keepalive ends it if it is gone.
                self._refuse_taken(member, owner, now)
                return
            else:
                if owner.id not in self._claimants:
                    self._out.append(Send(owner.id, HEARTBEAT_WITH_REPLY))
                    self._out.append(Timer("probe", now + PROBE_TIMEOUT_S, owner.id))
                self._claimants.setdefault(owner.id, []).append(member)
                return
        self._welcome(member)

    def probe_expired(self, owner: Member, now: float) -> None:
        """A member has not answered while another process claims one of its workers."""
        claimants = self._no_longer_asked(owner)
        self._out.append(
            Log(
                "WARNING",
                f"{owner.label} does not answer and is replaced",
                log_events.Replaced(peer=owner.peer, workers=owner.workers),
            )
        )
        self._replace(owner, now)
        for place_, claimant in enumerate(claimants):
            # The first was quicker than the others.
            self._claim(claimant, now, may_ask=place_ == 0)

    def _no_longer_asked(self, owner: Member) -> list[Member]:
        claimants = self._claimants.pop(owner.id, [])
        if claimants:
            self._out.append(Timer("probe", None, owner.id))
        return claimants

    def _replace(self, owner: Member, now: float) -> None:
        self.end(owner, GoodbyeStatus.TRY_LATER, "replaced by a newer session")
        self.leave(owner, now)

    def _refuse_taken(self, member: Member, rival: Member, now: float) -> None:
        if member.state is not State.JOINING:
            return
        assert member.join is not None
        worker = next((one for one in member.join.workers if one in rival.workers), member.join.workers[0])
        self.refuse(
            member,
            f"worker {worker} is taken: another process ({rival.peer}) runs it and answers; "
            "start this one with another --id, or end that one",
            now,
        )

    def _welcome(self, member: Member) -> None:
        assert member.join is not None
        engine, position = self._engine, self._engine.step.position
        if member.join.run_id:
            self._counters.reconnections += 1
        member.workers = member.join.workers
        member.told_held = {worker for worker in member.workers if engine.holds(worker)}
        member.state = State.JOINED
        self._members.give(member)
        welcome = pb.Welcome(
            run_id=self._admission.run_id,
            server_version=__version__,
            settings=self._settings.to_message(),
            # A process that has built its model has drawn from the seed.
            seed=b"" if member.join.layout_hash else self._seed,
            workers=[
                pb.Expectation(
                    worker=worker,
                    position=pb.Position(round=position.round, phase=position.phase),
                    held=worker in member.told_held,
                )
                for worker in member.workers
            ],
            buffers_averaged=pb.Position(
                round=engine.buffers_averaged.round, phase=engine.buffers_averaged.phase
            ),
        )
        self._out.append(Send(member.id, control(pb.ServerFrame(welcome=welcome))))

    # Newcomers.

    def is_as_ready(self, member: Member, event: Ready, now: float) -> bool:
        """Whether a member is as the run needs it; one that is not is refused.

        Raises:
            ProtocolError: if it does not follow from its Join.
        """
        if member.state is not State.JOINED:
            raise ProtocolError("a Ready that does not follow a Join")
        if tuple(worker for worker, _ in event.reported) != member.workers:
            raise ProtocolError("a Ready must say where each worker of its Join stands, in the same order")
        member.reported = dict(event.reported)
        refusal = self._admission.of_ready(event) or self._residual_refusal(member)
        if refusal:
            self.refuse(member, refusal, now)
        return not refusal

    def take_in(self, member: Member) -> int | None:
        """Say what the workers of a new process have lost, and count those that were there before.

        Returns:
            a worker of which the sum holds the beginning of a payload whose rest will never come, if any.
        """
        engine = self._engine
        lost = self._lost_residuals(member)
        self._incidents.count(Incident.LOST_RESIDUAL, lost)
        self._counters.lost_residuals += len(lost)
        for worker in lost:
            self._tell_lost(member, worker)
        newcomers = self._members.newcomers(member)
        restarted = [worker for worker in newcomers if self._members.was_known(worker)]
        self._counters.worker_restarts += len(restarted)
        self._incidents.count(Incident.RESTART, restarted)
        self._members.remember(member)
        partial = (
            worker
            for worker in newcomers
            # What a journal holds is sent again byte for byte.
            if engine.is_partial(worker) and member.reported[worker] != engine.step.position
        )
        return next(partial, None)

    def _tell_lost(self, member: Member, worker: int) -> None:
        reported = member.reported[worker]
        if self._is_ahead(member, worker):
            message = (
                f"worker {worker} has reported of {self._settings.parameters.named(reported.round)}, which "
                "this server has yet to open: its state is an older one; the worker continues from there, "
                "with the residual that it has"
            )
            self._out.append(
                Log("WARNING", message, log_events.WorkerAhead(worker=worker, round=reported.round))
            )
            return
        what = "a zero residual" if reported == NOWHERE else "an older one"
        message = f"worker {worker} came back without its uplink residual; it continues with {what}"
        self._out.append(Log("WARNING", message, log_events.LostResidual(worker=worker)))

    def _lost_residuals(self, member: Member) -> list[int]:
        """Workers whose residual is not the one after their last report that the server has."""
        engine = self._engine
        if not engine.algorithm.keeps_residuals:
            return []
        return [
            worker
            for worker in self._members.newcomers(member)
            if member.reported[worker].round < engine.trained(worker) or self._is_ahead(member, worker)
        ]

    def _residual_refusal(self, member: Member) -> str:
        lost = self._lost_residuals(member)
        if not lost or not self._refuses_lost_residuals:
            return ""
        what = "ahead of this server" if self._is_ahead(member, lost[0]) else "without its uplink residual"
        return f"worker {lost[0]} comes back {what}, and faults.lost_residual is refuse"

    def _is_ahead(self, member: Member, worker: int) -> bool:
        """Whether the worker has reported of a round that the server, put back to an old state, has yet to
        open."""
        return member.reported[worker] > self._engine.step.position

    # Staying.

    def beat(self) -> None:
        """Send heartbeats."""
        for member in self._members:
            if State.NEW < member.state < State.ENDED:
                self._out.append(Heartbeat(member.id))

    def end_silent(self, now: float) -> None:
        """End members of which nothing has come for too long."""
        for member in self._members:
            silence = now - member.last_seen
            if member.state is State.NEW or member.is_paused or silence <= self._server.peer_timeout:
                continue
            self._out.append(
                Log(
                    "WARNING",
                    f"{member.label} silent for {silence:.0f} s and given up",
                    log_events.PeerTimeout(peer=member.peer, workers=member.workers, seconds=silence),
                )
            )
            self.end(member, GoodbyeStatus.TRY_LATER, f"nothing heard for {silence:.0f} s")
            self.leave(member, now)

    def failed(self, member: Member, event: FailureTold) -> str:
        """A worker could not do a step.

        Returns:
            why the run must end; empty if it need not.

        Raises:
            ProtocolError: if the member does not speak for the worker.
        """
        if event.worker not in member.workers:
            raise ProtocolError(f"a failure of worker {event.worker}, which is not one of this session's")
        self._counters.failures += 1
        self._incidents.count(Incident.FAILURE, [event.worker])
        round_ = event.position.round
        where = place(event.worker, self._settings.parameters.named(round_))
        what = "\n".join(part for part in (event.message, event.traceback.rstrip()) if part)
        failed = log_events.WorkerFailed(worker=event.worker, round=round_ or None)
        self._out.append(Log("ERROR", f"{where} failed: {what}", failed))
        is_fatal = event.cause == FailureCause.NON_FINITE and not self._engine.policy.skips_non_finite
        return f"{where}: {event.message}" if is_fatal else ""

    # Going.

    def refuse(self, member: Member, reason: str, now: float) -> None:
        """End a member that cannot help the run."""
        self._turn_away(member, reason, GoodbyeStatus.REFUSED, now)

    def _turn_away(self, member: Member, reason: str, status: GoodbyeStatus, now: float) -> None:
        self._counters.refused += 1
        left_out = self._log_rate.left_out(f"refused {member.workers}: {reason}", now)
        if left_out is not None:
            refused = log_events.Refused(
                peer=member.peer, workers=member.workers, reason=reason, left_out=left_out
            )
            message = f"refused {member.label}: {reason}{and_left_out(left_out)}"
            self._out.append(Log("WARNING", message, refused))
        self.end(member, status, reason)

    def cut_off(self, member: Member, now: float) -> None:
        """End a member whose peer takes nothing, not even a goodbye."""
        member.state = State.ENDED
        left_out = self._log_rate.left_out(f"not reading {member.workers}", now)
        if left_out is not None:
            message = (
                f"{member.label} takes nothing of what it is sent and is cut off{and_left_out(left_out)}"
            )
            event = log_events.NotReading(peer=member.peer, workers=member.workers, left_out=left_out)
            self._out.append(Log("WARNING", message, event))
        self._out.append(HangUp(member.id, member.peer))

    def end(self, member: Member, status: GoodbyeStatus, reason: str) -> None:
        """Say goodbye, once."""
        if member.state is not State.ENDED:
            self._out.append(End(member.id, status, reason))
            member.state = State.ENDED

    def finish(self, status: GoodbyeStatus, reason: str) -> None:
        """The run, or this process's part of it, is over: tell everybody, and whoever comes."""
        self.farewell = (status, reason)
        for member in self._members:
            self.informed.update(member.workers)
            self.end(member, status, reason)

    def leave(self, member: Member, now: float) -> None:
        """A member's stream has ended, or is as good as ended: its workers are free; idempotent."""
        if member not in self._members:
            return
        had_owner = self._members.alone_since() is None
        is_new = member.state is State.NEW
        member.state = State.ENDED
        for worker in self._members.remove(member, now):
            self._engine.cut(worker)
        if is_new:
            self._out.append(Timer("handshake", None, member.id))
        if self.farewell is None:
            if member.workers:
                gone = log_events.SessionEnded(peer=member.peer, workers=member.workers)
                self._out.append(Log("WARNING", f"{member.label} gone", gone))
            if had_owner and self._members.alone_since() is not None:
                self.watch_alone(now)
        for claimant in self._no_longer_asked(member):
            self._claim(claimant, now)

    def watch_alone(self, now: float) -> None:
        """No worker has a stream from now on."""
        if self._server.give_up_after is not None:
            self._out.append(Timer("alone", now + self._server.give_up_after))


def _check_workers(workers: tuple[int, ...]) -> None:
    if not workers:
        raise ProtocolError("a Join that names no worker")
    if len(workers) > MOST_WORKERS_A_SESSION:
        raise ProtocolError(f"a Join of {len(workers)} workers; {MOST_WORKERS_A_SESSION} are the most")
    if list(workers) != sorted(set(workers)):
        raise ProtocolError("the workers of a Join must be ascending and each named once")
