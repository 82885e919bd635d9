"""Members that come and go: who is let in, what a newcomer must know, and what a leaver leaves behind."""

from __future__ import annotations

from afl._version import __version__
from afl.config.address import shown_peer
from afl.core.messages import NOWHERE, FailureCause, GoodbyeStatus
from afl.core.rounds.engine import RoundEngine
from afl.daemon import events as log_events
from afl.errors import ProtocolError
from afl.names import own_word
from afl.outside import printable
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import control, position_message, spoken_protocol
from afl_server.federation.admission import Admission, version_refusal
from afl_server.federation.counters import Incident
from afl_server.federation.effects import End, HangUp, Heartbeat
from afl_server.federation.events import FailureTold, Joined, Opened, Ready
from afl_server.federation.members import Member, State
from afl_server.federation.run import Run

HEARTBEAT_WITH_REPLY = control(pb.ServerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)))

MOST_INCARNATION_BYTES = 64
"""It is kept for each worker; ours has 16."""

PROBE_TIMEOUT_S = 5.0
"""How long a member may take to prove that it is alive when another process claims one of its workers."""


class Membership:
    """Lets members into a run, and sees them off.

    Attributes:
        farewell: what members are told once the run, or this process's part of it, is over; ``None`` before.
        informed: the workers that know of it.
    """

    def __init__(self, run: Run) -> None:
        self.farewell: tuple[GoodbyeStatus, str] | None = None
        self.informed: set[int] = set()
        self._run = run
        self._members = run.members
        self.admission = Admission(run)
        self._claimants: dict[int, list[Member]] = {}
        """By the id of a member that is asked whether it is alive: those that claim one of its workers."""

    # Coming.

    def open(self, event: Opened) -> None:
        """A new stream; that of a peer without identity, or one too many, is ended at once."""
        run, server = self._run, self._run.config.server
        sessions = len(self._members)
        member = Member(event.member, event.peer, event.permission, run.now)
        self._members.by_id[member.id] = member
        if event.permission.refusal:
            self.refuse(member, event.permission.refusal)
        elif sessions >= server.max_sessions:
            reason = f"the server holds {sessions} sessions, as many as server.max_sessions allows"
            self.refuse(member, reason, GoodbyeStatus.TRY_LATER)
        else:
            run.counters.sessions += 1
            run.set_timer("handshake", run.now + server.handshake_timeout, member.id)
            return
        self._members.remove(member, run.now)

    def hear(self, member: Member) -> None:
        """Something has come of a member: it is alive.

        Of one that has been ended nothing counts: it neither keeps its workers nor goes on being waited for.
        """
        if member.state >= State.ENDED:
            return
        member.last_seen = self._run.now
        if member.state is State.NEW:
            self._run.set_timer("handshake", None, member.id)
        if self._claimants:
            for claimant in self._no_longer_asked(member):
                self._refuse_taken(claimant, member)

    def join(self, member: Member, event: Joined) -> None:
        """Check who it is and welcome it, or end it; who speaks for its workers already is asked first.

        Raises:
            ProtocolError: if the workers are not such as a Join may name.
        """
        if member.state is not State.NEW:
            raise ProtocolError("a second Join in one session")
        forbidden = member.permission.forbids(event.workers)
        if not forbidden and self.farewell is not None:
            self.informed.update(event.workers)
            self.end(member, *self.farewell)
            return
        if not forbidden and (other_version := version_refusal(event)):
            self.refuse(member, other_version, GoodbyeStatus.OTHER_VERSION)
            return
        refusal = forbidden or self.admission.of_join(event)
        if refusal:
            self.refuse(member, refusal)
            return
        _check_process(event)
        member.join = event
        member.state = State.JOINING
        self._claim(member)

    def _claim(self, member: Member, *, may_ask: bool = True) -> None:
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
                    self._refuse_taken(claimant, owner)
                self._replace(owner)
            elif owner.id in self._members.paused or not may_ask:
                # The answer of one that is paused would not be read, since its turn in the sum has not come;
                # the transport's own keepalive ends it if it is gone.
                self._refuse_taken(member, owner)
                return
            else:
                if owner.id not in self._claimants:
                    self._run.send(owner.id, HEARTBEAT_WITH_REPLY)
                    self._run.set_timer("probe", self._run.now + PROBE_TIMEOUT_S, owner.id)
                self._claimants.setdefault(owner.id, []).append(member)
                return
        self._welcome(member)

    def probe_expired(self, owner: Member) -> None:
        """A member has not answered while another process claims one of its workers."""
        claimants = self._no_longer_asked(owner)
        replaced = log_events.Replaced(peer=owner.peer, workers=owner.workers)
        self._run.log("WARNING", f"{owner.label} does not answer and is replaced", replaced)
        self._replace(owner)
        for place, claimant in enumerate(claimants):
            # The first was quicker than the others.
            self._claim(claimant, may_ask=place == 0)

    def _no_longer_asked(self, owner: Member) -> list[Member]:
        claimants = self._claimants.pop(owner.id, [])
        if claimants:
            self._run.set_timer("probe", None, owner.id)
        return claimants

    def _replace(self, owner: Member) -> None:
        self.end(owner, GoodbyeStatus.TRY_LATER, "replaced by a newer session")
        self.leave(owner)

    def _refuse_taken(self, member: Member, rival: Member) -> None:
        if member.state is not State.JOINING:
            return
        assert member.join is not None
        worker = next((one for one in member.join.workers if one in rival.workers), member.join.workers[0])
        self.refuse(
            member,
            f"worker {worker} is taken: another process (at {shown_peer(rival.peer)}) runs it and answers; "
            "start this one with another --id, or end that one",
        )

    def _welcome(self, member: Member) -> None:
        assert member.join is not None
        run, engine = self._run, self._run.engine
        if member.join.run_id:
            run.counters.reconnections += 1
        member.workers = member.join.workers
        member.told_held = {worker for worker in member.workers if engine.holds(worker)}
        member.state = State.JOINED
        for worker, name in zip(member.workers, member.join.sites, strict=False):
            if worker not in run.config.names:
                run.names[worker] = own_word(name)
        self._members.owners.update(dict.fromkeys(member.workers, member))
        engine.drop_shared(frozenset(member.workers))
        position = position_message(engine.step.position)
        welcome = pb.Welcome(
            run_id=run.description.run_id,
            server_version=__version__,
            settings=run.settings.to_message(),
            # A process that has built its model has drawn from the seed.
            seed=b"" if member.join.layout_hash else run.randomness.seed,
            workers=[_expectation(engine, worker, position) for worker in member.workers],
            buffers_averaged=position_message(engine.buffers_averaged),
            key_epoch=run.keys.epoch if run.keys is not None else 0,
            frozen_digest=engine.model.frozen_digest,
            protocol=spoken_protocol(member.join.protocol, member.join.oldest_protocol),
        )
        run.send(member.id, control(pb.ServerFrame(welcome=welcome)))

    # Newcomers.

    def is_as_ready(self, member: Member, event: Ready) -> bool:
        """Whether a member is as the run needs it; one that is not is refused.

        Raises:
            ProtocolError: if it does not follow from its Join.
        """
        if member.state is not State.JOINED:
            raise ProtocolError("a Ready that does not follow a Join")
        if tuple(worker for worker, _ in event.reported) != member.workers:
            raise ProtocolError("a Ready must say where each worker of its Join stands, in the same order")
        member.reported, member.partial = dict(event.reported), event.partial
        if event.keys.workers != (member.workers if self._run.keys is not None else ()):
            raise ProtocolError("a Ready that does not offer a key of each worker, where the run needs them")
        assert member.join is not None
        version, status = member.join.package_version, None
        refusal = self.admission.of_ready(event)
        if not refusal and (refusal := self.admission.of_arithmetic(event, version)):
            # An upgrade is then what helps, and may come.
            status = None if version == __version__ else GoodbyeStatus.OTHER_VERSION
        refusal = refusal or self._residual_refusal(member, event)
        if refusal:
            self.refuse(member, refusal, status)
        return not refusal

    def take_in(self, member: Member) -> int | None:
        """Say what the workers of a new process have lost, and count those that were there before.

        Returns:
            a worker of which the sum holds the beginning of a payload whose rest will never come, if any.
        """
        run, engine = self._run, self._run.engine
        lost = self._lost_residuals(member)
        self._count_lost(lost)
        for worker in lost:
            self._tell_lost(member, worker)
        newcomers = self._members.newcomers(member)
        restarted = [worker for worker in newcomers if worker in self._members.incarnations]
        run.count(Incident.RESTART, restarted)
        run.counters.worker_restarts += len(restarted)
        self._members.remember(member)
        partial = (
            worker
            for worker in newcomers
            # A report that a journal holds goes on where it was.
            if member.reported[worker] != engine.step.position and not engine.drop_beginning(worker)
        )
        return next(partial, None)

    def _tell_lost(self, member: Member, worker: int) -> None:
        reported = member.reported[worker]
        if self._is_ahead(member, worker):
            message = (
                f"worker {worker} has reported of {self._run.named(reported.round)}, which this server has "
                "yet to open: its state is an older one; the worker continues from there, with the residual "
                "that it has"
            )
            ahead = log_events.WorkerAhead(worker=worker, round=reported.round)
            self._run.log_of_worker("WARNING", worker, message, ahead)
        else:
            what = "a zero residual" if reported == NOWHERE else "an older one"
            message = f"worker {worker} came back without its uplink residual; it continues with {what}"
            self._run.log_of_worker("WARNING", worker, message, log_events.LostResidual(worker=worker))

    def _lost_residuals(self, member: Member) -> list[int]:
        """Workers whose residual is not the one after their last report that the server has."""
        engine = self._run.engine
        if not engine.algorithm.keeps_residuals:
            return []
        return [
            worker
            for worker in self._members.newcomers(member)
            if member.reported[worker].round < engine.trained(worker) or self._is_ahead(member, worker)
        ]

    def _residual_refusal(self, member: Member, event: Ready) -> str:
        if self._run.config.faults.lost_residual != "refuse":
            return ""
        lost = self._lost_residuals(member)
        if lost:
            what = (
                "ahead of this server" if self._is_ahead(member, lost[0]) else "without its uplink residual"
            )
            return f"worker {lost[0]} comes back {what}, and faults.lost_residual is refuse"
        keys = self._run.keys
        if keys is not None and keys.ends_epoch(event.keys) and self._with_residuals():
            return (
                f"{member.label} comes with other keys, under which all workers would begin without their "
                "residuals, and faults.lost_residual is refuse"
            )
        return ""

    def _with_residuals(self) -> list[int]:
        engine = self._run.engine
        keeps = engine.algorithm.keeps_residuals
        return [worker for worker in range(engine.workers) if keeps and engine.trained(worker)]

    def all_begin_anew(self, member: Member) -> None:
        """Count the workers that lose their residuals to a member's other keys, but for its own."""
        self._count_lost([worker for worker in self._with_residuals() if worker not in member.workers])

    def _count_lost(self, lost: list[int]) -> None:
        self._run.count(Incident.LOST_RESIDUAL, lost)
        self._run.counters.lost_residuals += len(lost)

    def _is_ahead(self, member: Member, worker: int) -> bool:
        """Whether the worker has reported of a round that the server, put back to an old state, has yet to
        open."""
        return member.reported[worker] > self._run.engine.step.position

    # Staying.

    def beat(self) -> None:
        """Send heartbeats, and come back."""
        run = self._run
        for member in self._members:
            if State.NEW < member.state < State.ENDED:
                run.out.append(Heartbeat(member.id))
        run.set_timer("heartbeat", run.now + run.config.server.heartbeat)

    def end_silent(self) -> None:
        """End members of which nothing has come for too long."""
        for member in self._members:
            silence = self._run.now - member.last_seen
            is_due = silence > self._run.config.server.peer_timeout
            if is_due and member.state is not State.NEW and member.id not in self._members.paused:
                given_up = log_events.PeerTimeout(peer=member.peer, workers=member.workers, seconds=silence)
                self._run.log("WARNING", f"{member.label} silent for {silence:.0f} s and given up", given_up)
                self.end(member, GoodbyeStatus.TRY_LATER, f"nothing heard for {silence:.0f} s")
                self.leave(member)

    def failed(self, member: Member, event: FailureTold) -> str:
        """A worker could not do a step.

        Returns:
            why the run must end; empty if it need not.

        Raises:
            ProtocolError: if the member does not speak for the worker, or has told as many failures as it has
                workers.
        """
        run = self._run
        if event.worker not in member.workers:
            raise ProtocolError(f"a failure of worker {event.worker}, which is not one of this session's")
        if member.failures == len(member.workers):
            raise ProtocolError(
                f"more than {member.failures} failures in one session: one of each worker is due"
            )
        member.failures += 1
        run.counters.failures += 1
        run.count(Incident.FAILURE, [event.worker])
        round_ = event.position.round
        where = run.place(event.worker, round_)
        what = "\n".join(part for part in (event.message, event.traceback.rstrip()) if part)
        failed = log_events.WorkerFailed(worker=event.worker, round=round_ or None)
        run.log_of_worker("ERROR", event.worker, f"{where} failed: {what}", failed)
        engine = run.engine
        is_skipped = engine.policy.skips_non_finite or event.worker in engine.quarantined
        is_fatal = event.cause == FailureCause.NON_FINITE and not is_skipped
        return f"{where}: {printable(event.message)}" if is_fatal else ""

    # Going.

    def refuse(self, member: Member, reason: str, status: GoodbyeStatus | None = None) -> None:
        """End a member that cannot help the run.

        Args:
            status: unless it is refused for good, or until it has a renewed certificate.
        """
        if status is None:
            status = GoodbyeStatus.TRY_LATER if member.permission.may_return else GoodbyeStatus.REFUSED
        peer, workers = member.peer, member.workers
        self._run.counters.refused += 1
        refused = log_events.Refused(peer=peer, workers=workers, reason=reason, left_out=0)
        text = f"refused {member.label}: {reason}"
        if workers:
            kind = f"of worker {workers[0]}"
        else:
            kind = "stranger" if member.permission.refusal else f"{member.state.name} {status.name}"
        self._run.log_rarely("WARNING", kind, text, refused, wording=f"{workers} {reason}")
        self.end(member, status, reason)

    def cut_off(self, member: Member) -> None:
        """End a member whose peer takes nothing, not even a goodbye."""
        member.state = max(member.state, State.ENDED)
        not_reading = log_events.NotReading(peer=member.peer, workers=member.workers, left_out=0)
        message = f"{member.label} takes nothing of what it is sent and is cut off"
        kind = f"of worker {member.workers[0]}" if member.workers else ""
        self._run.log_rarely("WARNING", kind, message, not_reading, wording=f"{member.workers}")
        self._run.out.append(HangUp(member.id, member.peer))

    def end(self, member: Member, status: GoodbyeStatus, reason: str) -> None:
        """Say goodbye, once."""
        if member.state < State.ENDED:
            self._run.out.append(End(member.id, status, reason))
            member.state = State.ENDED

    def finish(self, status: GoodbyeStatus, reason: str) -> None:
        """The run, or this process's part of it, is over: tell everybody, and whoever comes."""
        self.farewell = (status, reason)
        for member in self._members:
            self.informed.update(member.workers)
            self.end(member, status, reason)

    def leave(self, member: Member) -> None:
        """A member's stream has ended, or is as good as ended: its workers are free; idempotent."""
        run, members = self._run, self._members
        if member.state is State.GONE:
            return
        is_new = member.state is State.NEW
        freed = members.remove(member, run.now)
        if is_new:
            run.set_timer("handshake", None, member.id)
        if self.farewell is None:
            if member.workers:
                gone = log_events.SessionEnded(peer=member.peer, workers=member.workers)
                run.log_of_worker("WARNING", member.workers[0], f"{member.label} gone", gone)
            if freed and not members.owners:
                self.watch_alone()
        for claimant in self._no_longer_asked(member):
            self._claim(claimant)

    def watch_alone(self) -> None:
        """No worker has a stream from now on."""
        if self._run.config.server.give_up_after is not None:
            self._run.set_timer("alone", self._run.now + self._run.config.server.give_up_after)


def _check_process(join: Joined) -> None:
    workers = join.workers
    if len(join.incarnation) > MOST_INCARNATION_BYTES:
        raise ProtocolError(
            f"an incarnation of {len(join.incarnation)} bytes; {MOST_INCARNATION_BYTES} are the most"
        )
    if not workers:
        raise ProtocolError("a Join that names no worker")
    if list(workers) != sorted(set(workers)):
        raise ProtocolError("the workers of a Join must be ascending and each named once")


def _expectation(engine: RoundEngine, worker: int, position: pb.Position) -> pb.Expectation:
    payload, offset = engine.arrived(worker)
    return pb.Expectation(
        worker=worker,
        position=position,
        held=engine.holds(worker),
        payload=payload,
        offset=offset,
        others=engine.begun(worker)[1:],
    )
