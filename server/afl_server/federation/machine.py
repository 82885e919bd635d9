"""The federation as a pure machine: events in, effects out.

:meth:`Federation.handle` takes one event and the time, and returns what is to be done, in order. It awaits
nothing, reads no clock, logs nothing and touches no file, so that any order of events can be played, written
down and played again (:mod:`afl_server.runner.recording`).

What takes several events is a *job* (:mod:`afl_server.federation.rounds`). While one is under way the machine
takes nothing else in hand; what comes meanwhile waits in order, and who sent it is not read.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from afl.core.messages import Encoding, GoodbyeStatus
from afl.core.secrecy.exchange import KeyExchange
from afl.core.secrecy.keys import KeyOffer
from afl.daemon import events as log_events
from afl.errors import ExitCode, NonFiniteError, ProtocolError, RunGoneError, StorageError
from afl.security.identity import WorkerIds
from afl.user_code import described, shortage
from afl.wire.accounting import FrameContent, Traffic
from afl.wire.keys import roster_frame
from afl_server.federation import events
from afl_server.federation.effects import Effect, Job, Read, Release
from afl_server.federation.evaluation_summary import Ranking
from afl_server.federation.members import Member, State
from afl_server.federation.rounds import Rounds
from afl_server.federation.run import Run
from afl_server.federation.snapshot import Connection, OpenStep, Snapshot

JOIN_FIRST = "the first frame of a session must be a Join"

_SHORT = frozenset({Encoding.DENSE, Encoding.SEEDED})
"""A piece of plain values is summed in a fraction of a millisecond, however large the model."""

_OF_THE_STREAM = (events.Left, events.NotReading, events.PermissionChanged)
"""Not said by the peer."""

_OF_REPORTS = (events.ReportBegan, events.Piece)

_ANSWERS = (events.EngineDone, events.Written)


class Federation(Rounds):
    """One run, to its end."""

    def __init__(self, run: Run, ranking: Ranking) -> None:
        super().__init__(run, ranking)
        self._job: Job[None] | None = None
        self._put_off_of: Counter[int] = Counter()
        self._told_faults: set[tuple[str, int | None]] = set()
        """The lines that raised, of faults whose traceback was logged."""
        membership = self._membership
        self.realization_digest = membership.admission.realization_digest
        """Of what this server draws and computes, as :func:`realization_digest` has it."""
        self._member_handlers: dict[type[events.Event], Callable[[Member, Any], Job[None] | None]] = {
            events.FrameCame: self._frame_came,
            events.Joined: membership.join,
            events.Ready: self._ready,
            events.ReportBegan: self._report_began,
            events.Piece: self._piece,
            events.FailureTold: self._failure_told,
            events.GoodbyeSaid: self._goodbye_said,
            events.Malformed: self._malformed,
            events.PermissionChanged: self._permission_changed,
            events.NotReading: lambda member, _: membership.cut_off(member),
            events.Left: self._left,
        }
        self._handlers: dict[type[events.Event], Callable[[Any], Job[None] | None]] = {
            events.Started: self._started,
            events.TimerFired: self._timer_fired,
            events.ModelWritten: self._model_written,
            events.WriteFailed: self._write_failed,
            events.StopAsked: self._stop_asked,
            events.QuarantineChanged: self._quarantine_changed,
            events.Faulted: self._faulted,
            **dict.fromkeys(_ANSWERS, self._unasked),
        }

    # Events.

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """What an event sets in motion.

        Args:
            now: never before the one of the last event.
        """
        run = self._run
        run.now = now
        if self._job is None or isinstance(event, events.Faulted):
            self._take(event)
        elif isinstance(event, _ANSWERS) or _is_failed_answer(event):
            self._answered(event)
        else:
            self._put_off(event)
        while run.waiting and self._job is None:
            waiting = run.waiting.popleft()
            self._take(waiting)
            if isinstance(waiting, events.MemberEvent):
                self._put_off_of[waiting.member] -= 1
                self._read_on(waiting.member)
        if self._job is None:
            if self._members.paused:
                self._relieve()
            if self._pausing is not None and self._waits_in_vain():
                self._begin(self._pause())
        return run.taken_out()

    def _take(self, event: events.Event) -> None:
        """Handle an event; what a member does wrong, or what goes wrong with it, ends that member alone.

        Where it would go wrong with each that comes, it ends the server: if memory runs out, or if a member
        that is ready cannot be brought to where the run is.
        """
        if not isinstance(event, events.MemberEvent):
            try:
                self._begin(self._handlers[type(event)](event))
            except Exception as fault:  # noqa: BLE001  # logged with its traceback
                self._break(fault)
            return
        member = self._members.by_id.get(event.member)
        if member is None:
            if isinstance(event, events.Opened):
                self._membership.open(event)
            return
        if not isinstance(event, _OF_THE_STREAM):
            self._membership.hear(member)
            if member.state >= State.ENDED and not isinstance(event, events.FrameCame):
                return
        try:
            self._begin(self._member_handlers[type(event)](member, event))
        except (ProtocolError, NonFiniteError) as error:
            self._membership.refuse(member, str(error))
        except Exception as error:  # noqa: BLE001  # logged with its traceback
            if isinstance(event, events.Ready) or shortage(error):
                self._break(error)
            else:
                self._member_broke(member, error)
        if isinstance(event, _OF_REPORTS) and self._job is None and self._is_congested(member):
            self._members.paused.add(member.id)
            self._run.out.append(Read(member.id, False))

    def _member_broke(self, member: Member, error: Exception) -> None:
        """A fault of the server that is this member's alone, as far as is known; it may come again."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = (frame.filename, frame.lineno)
        is_new, message = place not in self._told_faults, f"session of {member.label} broke"
        self._told_faults.add(place)
        broke = log_events.SessionBroke(peer=member.peer, workers=member.workers)
        text = message if is_new else f"{message}, as before: {described(error)}"
        if is_new:
            self._run.log("ERROR", text, broke, error)
        else:
            self._run.log_rarely("ERROR", "", text, broke)
        self._membership.end(member, GoodbyeStatus.TRY_LATER, "the server failed; its log has why")

    def _faulted(self, event: events.Faulted) -> None:
        """Nothing answers a job any more, if one is under way."""
        self._job = None
        self._break(event.error or RuntimeError("a fault outside the machine"))

    def _unasked(self, _: events.Event) -> None:
        """An answer to a job that a fault has ended."""
        assert self.ending is not None

    def _put_off(self, event: events.Event) -> None:
        """What comes while a job is under way waits; what touches no engine is done at once."""
        if isinstance(event, events.FrameCame | events.Opened):
            self._take(event)
            return
        if isinstance(event, events.TimerFired) and event.name == "heartbeat":
            self._membership.beat()
            return
        self._run.waiting.append(event)
        if not isinstance(event, events.MemberEvent):
            return
        member = self._members.by_id.get(event.member)
        self._put_off_of[event.member] += 1
        if member is not None and not isinstance(event, _OF_THE_STREAM):
            self._membership.hear(member)
            self._run.out.append(Read(member.id, False))

    def _begin(self, job: Job[None] | None) -> None:
        if job is not None:
            self._job = job
            self._go_on(lambda: job.send(None))

    def _answered(self, event: events.Event) -> None:
        """What the job waits for has come; whatever else fails in it is a fault of the server."""
        job, result, error = self._job, None, None
        assert job is not None
        match event:
            case events.EngineDone():
                result, error = event.result, event.error
            case events.Written():
                result = event.checkpoint_due
            case events.WriteFailed():
                error = event.error or (RunGoneError if event.is_final else StorageError)(event.reason)
        try:
            self._go_on(lambda: job.send(result) if error is None else job.throw(error))
        except Exception as fault:  # noqa: BLE001  # logged with its traceback
            self._break(fault)

    def _go_on(self, step: Callable[[], Effect]) -> None:
        """Let the job go on until it waits again, or has ended."""
        try:
            self._run.out.append(step())
        except StopIteration:
            self._job = None
        except BaseException:
            self._job = None
            raise

    # Whom to read.

    def _read_on(self, member: int) -> None:
        """Read a member again if nothing of it waits."""
        if self._put_off_of[member]:
            return
        del self._put_off_of[member]
        if member not in self._members.paused:
            self._run.out.append(Read(member, True))

    def _is_congested(self, member: Member) -> bool:
        """Whether to stop reading from a member: what it sends must wait, and enough waits already."""
        collector = self.engine.collector
        if member.state is not State.READY:
            return False
        if collector.waiting_bytes <= self._run.config.server.reorder_buffer:
            return False
        pending = [worker for worker in member.workers if self.engine.awaits(worker)]
        return bool(pending) and all(map(collector.would_wait, pending))

    def _relieve(self) -> None:
        """Read on from members whose turn in the sum has come."""
        for id_ in sorted(self._members.paused):
            member = self._members.by_id[id_]
            if not self._is_congested(member):
                self._members.paused.discard(id_)
                member.last_seen = self._run.now
                if not self._put_off_of[id_]:
                    self._run.out.append(Read(id_, True))

    # Members.

    def _frame_came(self, member: Member, event: events.FrameCame) -> None:
        content = event.content
        if content.traffic is not Traffic.CONTROL:
            content = FrameContent(self._traffic, content.values, content.indices, content.scalars)
        self.counters.uplink.add(event.size, content)
        if member.state is State.NEW and not event.has_join:
            raise ProtocolError(JOIN_FIRST)

    def _ready(self, member: Member, event: events.Ready) -> Job[None] | None:
        """A member's workers have their task, data and model."""
        if not self._membership.is_as_ready(member, event):
            return None
        partial = self._membership.take_in(member)
        if partial is not None:
            self._restart_round(partial, "restarted in the middle of its report", member)
        if self._run.keys is not None:
            self._take_keys(self._run.keys, member, event.keys)
            return self._bring_up_all() if self._run.keys.is_complete else None
        return self._bring_up(member)

    def _take_keys(self, keys: KeyExchange, member: Member, offer: KeyOffer) -> None:
        """A member that is ready but for others' keys offers its own."""
        is_first = len(keys.missing()) == self._run.config.workers
        is_void = keys.add(offer)
        member.awaits_keys = offer.epoch == keys.epoch
        if is_void:
            if not is_first:
                event = log_events.KeyEpoch(peer=member.peer, workers=member.workers, epoch=keys.epoch)
                text = (
                    f"{member.label} comes with other keys: key epoch {keys.epoch} begins, and all workers "
                    "begin without their residuals"
                )
                self._run.log_of_worker("WARNING", member.workers[0], text, event)
                self._membership.all_begin_anew(member)
            self._restart_round(member.workers[0], "comes with other keys", member)
        if not member.awaits_keys:
            self._membership.end(member, GoodbyeStatus.TRY_LATER, f"keys of epoch {keys.epoch} are due")

    def _bring_up_all(self) -> Job[None]:
        """Each member that has waited for all keys gets them, and then the step."""
        keys = self._run.keys
        assert keys is not None
        roster = roster_frame(keys.epoch, keys.roster)
        for member in list(self._members):
            if member.awaits_keys and member.state is State.JOINED:
                member.awaits_keys = False
                self._run.send(member.id, roster)
                yield from self._bring_up(member)

    def _bring_up(self, member: Member) -> Job[None]:
        member.state, member.ready_at = State.READY, self._run.now
        if self._deadline_at is None:
            # This process's first step has until then from when its first worker is ready.
            self._start_deadline()
        yield from self._downlink.catch_up(member)
        ready = log_events.WorkerReady(peer=member.peer, workers=member.workers)
        self._run.log_of_worker("INFO", member.workers[0], f"{member.label} ready", ready)

    def _report_began(self, member: Member, event: events.ReportBegan) -> Job[None] | None:
        for worker in event.report.workers:
            self._must_speak_for(member, worker)
        if self.ending is not None:
            return None
        return self._after(member, self.engine.begin_report(event.report))

    def _piece(self, member: Member, event: events.Piece) -> Job[None] | None:
        worker = event.worker
        self._must_speak_for(member, worker)
        header = self.engine.incoming_header(worker)
        if self.ending is not None or header is None:
            return None
        if self._run.is_small or header.encoding in _SHORT:
            ack = self.engine.add_piece(worker, event.payload, event.offset, event.data)
            return self._after(member, ack)
        return self._add_piece(member, event)

    def _add_piece(self, member: Member, event: events.Piece) -> Job[None]:
        add = self.engine.add_piece
        try:
            ack = yield from self._run.compute(
                lambda: add(event.worker, event.payload, event.offset, event.data)
            )
        except (ProtocolError, NonFiniteError) as error:
            self._membership.refuse(member, str(error))
            return
        following = self._after(member, ack)
        if following is not None:
            yield from following

    def _must_speak_for(self, member: Member, worker: int) -> None:
        if member.state is not State.READY:
            is_new = member.state is State.NEW
            raise ProtocolError(JOIN_FIRST if is_new else "a report before the session is ready")
        if self._members.owners.get(worker) is not member:
            raise ProtocolError(
                f"worker {worker} is not one of this session's ({WorkerIds.of(member.workers)})"
            )

    def _failure_told(self, member: Member, event: events.FailureTold) -> Job[None] | None:
        reason = self._membership.failed(member, event)
        return self._abort(ExitCode.DIVERGED, reason) if reason else None

    def _goodbye_said(self, member: Member, event: events.GoodbyeSaid) -> None:
        goodbye = log_events.Goodbye(peer=member.peer, workers=member.workers, reason=event.reason)
        text = f"{member.label} leaves: {event.reason}"
        self._run.log_of_worker("INFO", min(member.workers, default=-1), text, goodbye)

    def _malformed(self, _: Member, event: events.Malformed) -> None:
        if event.size:
            self.counters.uplink.add(event.size, FrameContent(Traffic.CONTROL))
        raise ProtocolError(event.reason)

    def _permission_changed(self, member: Member, event: events.PermissionChanged) -> None:
        """A token or a certificate counts for less, or for nothing any more."""
        member.permission = event.permission
        refusal = event.permission.forbids(member.join.workers if member.join else ())
        if refusal and State.NEW < member.state < State.ENDED:
            self._membership.refuse(member, refusal)
            self._leave(member)

    def _left(self, member: Member, _: events.Left) -> None:
        self._leave(member)
        del self._members.by_id[member.id]

    def _leave(self, member: Member) -> None:
        self._membership.leave(member)
        self._release_if_alone()

    # Time.

    def _timer_fired(self, event: events.TimerFired) -> Job[None] | None:
        server, member = self._run.config.server, self._members.by_id.get(event.member)
        match event.name:
            case "heartbeat":
                self._membership.beat()
                self._membership.end_silent()
                self._release_if_alone()
            case "handshake" if member is not None and member.state is State.NEW:
                self._membership.refuse(member, f"no Join within {server.handshake_timeout:g} s")
            case "probe" if member is not None:
                self._membership.probe_expired(member)
            case "deadline":
                return self._deadline_passed()
            case "grace":
                return self._pause()
            case "start":
                return self._check_start()
            case "alone" if not self._members.owners:
                reason = f"no worker had a session for server.give_up_after ({server.give_up_after})"
                return self._stop_asked(events.StopAsked(reason, ExitCode.LOST_WORKERS))
            case "farewell":
                self._run.out.append(Release())
            case "returning":
                self._release_if_alone()
            case "idle":
                self.engine.catch_up()
        return None

    def _check_start(self) -> Job[None] | None:
        """The time has come by which all workers must have joined."""
        there = {
            worker
            for member in self._members
            if member.state is State.READY or member.awaits_keys
            for worker in member.workers
        }
        missing = sorted(set(range(self._run.config.workers)) - there)
        if not missing or self._last_round is not None:
            return None
        return self._abort(
            ExitCode.ABORTED,
            f"{WorkerIds.of(missing).named} did not join within server.start_timeout "
            f"({self._run.config.server.start_timeout}); start them first, or allow more time",
        )

    # What is shown.

    def snapshot(self) -> Snapshot:
        """The run now; from any thread."""
        engine, members = self.engine, self._members
        connections: dict[int, Connection] = {}
        of_members: dict[Member, Connection] = {}
        for worker, owner in sorted(dict(members.owners).items()):
            if owner not in of_members:
                of_members[owner] = Connection(
                    owner.peer,
                    owner.workers,
                    owner.state is State.READY,
                    owner.permission.certificate_expiry,
                    "" if owner.join is None else owner.join.package_version,
                    owner.ready_at,
                )
            connections[worker] = of_members[owner]
        return Snapshot(
            run=self.description,
            began_at=self._began_at,
            ending=self.ending,
            step=OpenStep(
                kind=engine.step.kind,
                round=engine.open_round,
                synchronization=engine.step.position.round,
                opened_at=self._step_opened_at,
                awaited=engine.missing(),
                waiting_bytes=engine.collector.waiting_bytes,
            ),
            updates_applied=engine.updates_applied,
            last_round=self._last_round,
            round_seconds=self._round_seconds,
            first_closed=self._first_closed,
            step_seconds=self._step_seconds,
            report_seconds=self._report_seconds,
            outcome_seconds=self._outcome_seconds,
            dual_weights=engine.dual_weights,
            evaluation=self._evaluation,
            last=self._ranking.last,
            best=self._ranking.best,
            residual_norm=engine.residual_norm,
            sessions=len(members),
            connections=connections,
            names=dict(self._run.names),
            known=frozenset(list(members.incarnations)),
            lost_at=dict(members.lost_at),
            counters=self.counters.copied(),
            sum_restarts=engine.restarts,
            quarantined=engine.quarantined,
            incidents=self._run.incidents,
        )


def _is_failed_answer(event: events.Event) -> bool:
    return isinstance(event, events.WriteFailed) and event.what in {"outcome", "checkpoint"}
