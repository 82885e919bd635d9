"""The steps of a federation and its ends: what is closed, made durable, told, recorded and saved.

A *job* is a generator that yields the effect whose answer it waits for, such as a long calculation or the
writing of an outcome. That an outcome is durable before anybody hears of it is the order of the lines in
:meth:`Rounds._close_step`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from afl.config import dump_config
from afl.core.messages import NOWHERE, Ack, AckStatus, GoodbyeStatus, Kind, Position, Report, Step
from afl.core.randomness import Purpose
from afl.core.rounds.engine import QUARANTINED
from afl.core.rounds.results import Evaluation, Opening, Outcome
from afl.daemon import events as log_events
from afl.errors import DivergedError, ExitCode, NonFiniteError, RunGoneError, StorageError
from afl.security.identity import WorkerIds
from afl.user_code import shortage
from afl.wire.frames import ack_frame, traffic_of_kind
from afl_server.federation import effects, events
from afl_server.federation.broadcast import ModelCopy
from afl_server.federation.counters import Incident, Moment
from afl_server.federation.downlink import Downlink
from afl_server.federation.effects import ENGINE_PREFIX, Effect, Job
from afl_server.federation.evaluation_summary import Ranking
from afl_server.federation.members import Member, State
from afl_server.federation.membership import Membership
from afl_server.federation.run import Run
from afl_server.federation.snapshot import ClosedStep, Ending

QUARANTINE_FILE = "quarantine"
"""In the run directory: ids of workers that the operator wants left out, such as ``3,7-9``."""

CLOCK_S = 0.001
"""How much before its time a timer may fire."""

FAREWELL_TIMEOUT_S = 10.0
"""How long the end of the run waits for workers to have read their goodbye."""


class Rounds:
    """The part of a federation that goes from step to step; :class:`afl_server.federation.machine.Federation`
    is the whole.

    Attributes:
        description: what does not change while the run lasts.
        engine: which step is open, and who has reported.
        names: of sites, by worker; more as workers join that call themselves something.
        counters: of the whole run; what is sent is counted by whoever sends it.
        has_begun: whether all that the run begins with is durable.
        ending: how the run, or this process's part of it, has ended; ``None`` while it goes on.

    Args:
        ranking: of the evaluations so far.
    """

    def __init__(self, run: Run, ranking: Ranking) -> None:
        engine, now = run.engine, run.now
        self.description = run.description
        self.engine = engine
        self.counters = run.counters
        self.names = run.names
        self.has_begun = False
        self.ending: Ending | None = None
        self.closed_step: ClosedStep | None = None
        self._run = run
        self._members = run.members
        self._ranking = ranking
        stream = run.randomness.stream(Purpose.RANDOM_OUTPUT)
        self._random_position = Position(stream.integer(engine.synchronizations) + 1, 0)
        self._membership = Membership(run)
        self._downlink = Downlink(run)
        self._traffic = traffic_of_kind(engine.step.kind)
        """What the open step is for; kept apart from the engine, which a thread may be changing."""
        self._made_at = self._began_at = self._round_began_at = self._step_opened_at = now
        self._step_seconds: dict[Kind, float] = {}
        self._report_seconds = [math.nan] * run.config.workers
        self._outcome_seconds = self._round_seconds = 0.0
        self._first_closed: tuple[float, int] | None = None
        self._last_round = engine.last_round
        self._evaluation = engine.last_evaluation
        self._deadline_at: float | None = None
        self._absent: list[int] = []
        """The workers that the last step was closed without."""
        self._far_above: tuple[int, ...] = ()
        """The workers whose loss of the last round was far above the others'."""
        self._pausing: tuple[ExitCode, str] | None = None
        """How this process ends after the open step, if it is to."""

    # The run.

    @property
    def seconds(self) -> float:
        """How long the run has run, in all its processes, at the last event."""
        return self._run.now - self._began_at

    def resume(
        self, moment: Moment, since: Iterable[tuple[float, Outcome, Moment]]
    ) -> Iterator[list[Effect]]:
        """Go on, before any event, from a checkpoint to which the engine has been put back.

        Args:
            moment: when the checkpoint was made.
            since: the outcomes since: the time now, what closed the step, and when it did.

        Yields:
            what each outcome, and at last the resumed run, sets in motion.
        """
        run, engine = self._run, self.engine
        self._stand_at(moment)
        self._last_round, self._evaluation = engine.last_round, engine.last_evaluation
        opening: Opening | None = engine.opening()
        base, replayed = NOWHERE, 0
        for now, outcome, closed_at in since:
            run.now = now
            closed = engine.step
            opening, base = engine.replay(outcome), closed.position
            self._stand_at(closed_at)
            for name in self._outputs(self._record(closed, closed_at), opening):
                run.out.append(effects.SaveModel(name, ModelCopy(engine.model), engine.updates_applied))
            replayed += 1
            yield run.taken_out()
        engine.quarantine_again()
        # Each outcome brings the counters of its time.
        self.counters.replayed_steps += replayed
        if opening is not None and not engine.finished:
            self._downlink.begin_with(opening, base)
        self._traffic = traffic_of_kind(engine.step.kind)
        resumed = log_events.Resumed(run_id=self.description.run_id, round=engine.step.position.round)
        run.log("WARNING", f"the run resumes with {run.open_rounds}", resumed)
        yield run.taken_out()

    def _stand_at(self, moment: Moment) -> None:
        self._began_at = self._made_at - moment.seconds
        self.counters.set(moment.counters)

    def _started(self, _: events.Started) -> Job[None]:
        """Make the run's beginning, or what it resumes from, durable."""
        run, server = self._run, self._run.config.server
        self.counters.starts += 1
        run.set_timer("heartbeat", run.now + server.heartbeat)
        self._membership.watch_alone()
        if server.start_timeout is not None:
            run.set_timer("start", run.now + server.start_timeout)
        try:
            yield from self._save(*self._outputs(False, self.engine.opening()))
            if run.is_durable:
                yield from self._checkpoint(waits=True)
            if self.engine.finished:
                yield from self._save("final")
        except StorageError as error:
            is_final = isinstance(error, RunGoneError)
            self._finish(ExitCode.STORAGE, str(error), self._goodbye(is_final=is_final))
        self.has_begun = True

    # Reports.

    def _after(self, member: Member, ack: Ack | None) -> Job[None] | None:
        """What a piece or a report sets in motion."""
        if ack is None:
            self._stream()
            return None
        if ack.reason:
            # What counts is acknowledged by the next commit.
            self.counters.refused_reports += len(ack.workers)
            self._run.send(member.id, ack_frame(ack, Kind.TRAIN))
            if ack.status is AckStatus.LATE:
                return self._late(member, ack.workers)
            is_taken_as_missing = (
                ack.status is AckStatus.REFUSED
                and self.engine.holds(ack.worker)
                and self.engine.report(ack.worker).missing == ack.reason
            )
            if not is_taken_as_missing:
                return None
        self._stream()
        for worker in ack.workers:
            self._note(worker)
        return self._close() if self.engine.complete else None

    def _stream(self) -> None:
        if not self._run.is_small:
            self._downlink.stream()

    def _note(self, worker: int) -> None:
        """Take note of a report that the open step now has."""
        report = self.engine.report(worker)
        if report.missing == QUARANTINED:
            return
        self._report_seconds[worker] = self._run.now - self._step_opened_at
        if report.missing:
            self._run.count(Incident.NON_FINITE, [worker])
            where = self._run.place(worker, report.position.round)
            message = f"{where}: left out, since it is not finite: {report.missing}"
            left_out = log_events.NonFinite(worker=worker, round=report.position.round)
            self._run.log("WARNING", message, left_out)
        elif not self.engine.step.kind.is_of_evaluation:
            self.counters.charge_report(report)
            if self.engine.losses.counting(report.loss) != report.loss:
                self._note_cap(worker, report)

    def _note_cap(self, worker: int, report: Report) -> None:
        """A loss counts as ``faults.loss_cap``, or its negative."""
        is_first = not self._run.incidents[Incident.CAPPED_LOSS][worker]
        self._run.count(Incident.CAPPED_LOSS, [worker])
        if is_first:
            where = self._run.place(worker, report.position.round)
            counts = self.engine.losses.counting(report.loss)
            message = f"{where}: the loss is {report.loss:g}, and counts as {counts:g} (faults.loss_cap)"
            event = log_events.LossCapped(worker=worker, round=report.position.round, loss=report.loss)
            self._run.log("WARNING", message, event)

    def _note_far_above(self, synchronization: int) -> None:
        """Tell which workers' losses are far above the others', whenever that has changed."""
        far_above = self.engine.losses.far_above
        self._run.count(Incident.HIGH_LOSS, far_above)
        if far_above != self._far_above:
            message = "no training loss is far above the others' any more"
            if far_above:
                message = f"the training loss of {WorkerIds.of(far_above).named} is far above the others'"
            event = log_events.LossFarAbove(workers=far_above, round=synchronization)
            self._run.log("WARNING", message, event)
        self._far_above = far_above

    def _note_sites(self, evaluation: Evaluation, before: Sequence[str]) -> None:
        """Tell of a warning about a site whenever it is of a kind, or of a worker, that the last was not."""
        known = {_kind_of(warning) for warning in before}
        fresh = [warning for warning in evaluation.warnings if _kind_of(warning) not in known]
        for warning in fresh:
            event = log_events.SiteWarning(round=evaluation.round)
            self._run.log("WARNING", warning, event)

    def _late(self, member: Member, workers: Sequence[int]) -> Job[None] | None:
        """A late report has been answered: the member may go on, if it owes no other."""
        self.counters.late_reports += len(workers)
        if member.owes.isdisjoint(workers):
            return None
        member.owes.difference_update(workers)
        return None if member.owes else self._downlink.go_on_with(member)

    def _restart_round(self, worker: int, what: str, newcomer: Member) -> None:
        """What has come of reports can never become a sum: begin it again.

        Args:
            what: the worker has done.

        Every other member is cut, also one that was welcomed and told that its report is held; each comes
        back by itself and sends its report again.
        """
        if not self.engine.is_untouched:
            message = f"worker {worker} {what}: the sum of {self._run.open_rounds} begins again"
            self._run.log_of_worker("WARNING", worker, message, log_events.RoundRestarted(worker=worker))
            self.engine.restart_round()
        self._downlink.abandon()
        for member in self._members:
            if member is not newcomer and member.state in {State.JOINED, State.READY}:
                self._membership.end(member, GoodbyeStatus.TRY_LATER, "the round's sum begins again")

    # Closing a step.

    def _close(self) -> Job[None]:
        """Close the open step; whatever fails in that ends the run."""
        try:
            yield from self._close_step()
            self._ranking.require_convergence()
        except (NonFiniteError, DivergedError) as error:
            yield from self._abort(ExitCode.DIVERGED, str(error))
        except StorageError as error:
            is_final = isinstance(error, RunGoneError)
            yield from self._abort(ExitCode.STORAGE, str(error), self._goodbye(is_final=is_final))
        except Exception as fault:  # noqa: BLE001  # logged with its traceback
            self._break(fault)

    def _close_step(self) -> Job[None]:
        """All workers have reported: close the step and broadcast the next."""
        run, engine, closed = self._run, self.engine, self.engine.step
        self._judge()
        absent, unanswered = engine.absent(), engine.missing()
        counted = [worker for worker in engine.participants if worker not in absent]
        opening = yield from run.compute(engine.advance)
        self._traffic = traffic_of_kind(engine.step.kind)
        self.counters.absent_reports += len(absent)
        run.count(Incident.ABSENT, absent)
        late = self._late_at_close(absent, unanswered)
        evaluation = engine.last_evaluation if closed.kind is Kind.EVALUATE else None
        if evaluation is not None:
            self._downlink.tell_diverged(evaluation, is_last=opening is None)
        moment = Moment(run.now - self._round_began_at, self.seconds, self.counters.copied())
        is_due = False
        if run.is_durable:
            # Before anyone hears of it: what was heard must never be undone.
            since = run.now
            assert engine.last_outcome is not None
            is_due = yield effects.Append(engine.last_outcome, moment, engine.step.position.round)
            self._outcome_seconds = run.now - since
        run.out += late
        self._step_seconds = {**self._step_seconds, closed.kind: run.now - self._step_opened_at}
        self.closed_step = ClosedStep(closed, self._step_opened_at, run.now, self._outcome_seconds)
        self._step_opened_at = run.now
        self._start_deadline()
        self._downlink.model_moved()
        is_last_here = self._pausing is not None and opening is not None
        if opening is not None:
            if evaluation is not None:
                yield from self._downlink.heal(evaluation)
            if not is_last_here:
                yield from self._downlink.open(opening, closed)
                self._downlink.acknowledge(closed, counted)
        outputs = self._outputs(self._record(closed, moment), opening)
        yield from self._save(*outputs, *(["final"] if opening is None else []))
        if is_last_here:
            yield from self._pause()
        elif run.is_durable and (opening is None or is_due):
            yield from self._checkpoint(waits=False)
        elif run.is_small:
            # Once what was to be sent is on its way.
            run.set_timer("idle", run.now)
        else:
            yield from run.compute(engine.catch_up)

    def _judge(self) -> None:
        """Leave out the updates that are too large, and answer who has sent them."""
        run, round_ = self._run, self.engine.step.position.round
        for worker, update in self.engine.judge().items():
            run.count(Incident.LARGE_UPDATE, [worker])
            self.counters.refused_reports += 1
            reason = self.engine.report(worker).missing
            event = log_events.UpdateTooLarge(
                worker=worker, round=round_, norm=update.norm, limit=update.limit
            )
            run.log("WARNING", f"{run.place(worker, round_)}: left out: {reason}", event)
            owner = self._members.owners.get(worker)
            if owner is not None:
                ack = Ack(worker, self.engine.step.position, AckStatus.REFUSED, reason)
                run.send(owner.id, ack_frame(ack, Kind.TRAIN))

    def _quarantine_changed(self, event: events.QuarantineChanged) -> Job[None] | None:
        """The operator wants other workers left out than before."""
        if self.ending is not None or self.engine.finished:
            return None
        try:
            workers = self._quarantine_of(event.text)
        except ValueError as error:
            unusable = log_events.QuarantineUnusable(reason=str(error))
            self._run.log("ERROR", f"the file {QUARANTINE_FILE} cannot be followed: {error}", unusable)
            return None
        if workers == self.engine.quarantined:
            return None
        self.engine.quarantine(workers)
        ids = sorted(workers)
        message = f"{WorkerIds.of(ids).named} in quarantine" if ids else "nobody is in quarantine any more"
        self._run.log("WARNING", message, log_events.Quarantined(workers=ids))
        return self._close() if self.engine.complete else None

    def _quarantine_of(self, text: str | None) -> frozenset[int]:
        """The ids in the file's text; ValueError where they cannot be left out."""
        policy, count = self.engine.policy, self._run.config.workers
        if text is None:
            raise ValueError("it cannot be read, is no plain file, or is far longer than ids are")
        # An id in a line of its own is one, and no digit of the next.
        written = "".join(re.sub(r"(?<=[0-9])\s+(?=[0-9])", ",", text).split())
        ids = WorkerIds.parse(written) if written else WorkerIds()
        if ids.ranges and ids.ranges[-1][1] >= count:
            raise ValueError(f"the run's workers are 0 to {count - 1}")
        workers = frozenset(worker for first, last in ids.ranges for worker in range(first, last + 1))
        if not policy.leaves_out and workers:
            raise ValueError(
                "every step waits for all workers: set faults.stragglers.policy or faults.non_finite to "
                "skip, or faults.update_norm"
            )
        if count - len(workers) < policy.needed(count):
            raise ValueError(f"fewer workers than the quorum ({policy.needed(count)}) would be left")
        return workers

    def _start_deadline(self) -> None:
        """A step has been opened; a timer closes it without the late, not the next message."""
        after = self._run.config.faults.stragglers.deadline
        if after is not None:
            self._deadline_at = self._run.now + after
            self._run.set_timer("deadline", self._deadline_at)

    def _deadline_passed(self) -> Job[None] | None:
        """Close the open step without the late, as soon as it has a quorum."""
        # One that has had to wait may be that of a step which is closed.
        if (
            self.ending is not None
            or self._deadline_at is None
            or self._run.now < self._deadline_at - CLOCK_S
        ):
            return None
        self.engine.expire()
        return self._close() if self.engine.complete else None

    def _late_at_close(self, absent: list[int], unanswered: Sequence[int]) -> list[effects.Send]:
        """The step has just been closed without some workers.

        Returns:
            the answers to unfinished reports, for when the step is durable.
        """
        if absent != self._absent:
            message = "steps are closed with all workers again"
            if absent:
                message = f"steps are closed without {WorkerIds.of(absent).named}"
            self._run.log("WARNING", message, log_events.Absent(workers=absent))
        self._absent = absent
        for member in self._members.ready():
            if not member.owes:
                member.owes.update(worker for worker in member.workers if worker in unanswered)
        answers: list[effects.Send] = []
        for ack in self.engine.cut_off:
            owner = self._members.owners.get(ack.worker)
            if owner is not None and ack.worker in owner.owes:
                self.counters.late_reports += len(ack.workers)
                owner.owes.difference_update(ack.workers)
                answers.append(effects.Send(owner.id, ack_frame(ack, Kind.TRAIN)))
        return answers

    def _outputs(self, is_best: bool, opening: Opening | None) -> list[str]:
        """Which of the run's models the model as it now is is."""
        # w_r is what its round begins with.
        is_random = opening is not None and opening.step.position == self._random_position
        return ["best"] * is_best + ["random"] * is_random

    def _record(self, closed: Step, moment: Moment) -> bool:
        """Write the metrics of a closed step; whether its evaluation is the best so far."""
        if closed.kind is Kind.EVALUATE:
            before, evaluation = self._evaluation, self.engine.last_evaluation
            assert evaluation is not None
            self._evaluation = evaluation
            self._note_sites(evaluation, () if before is None else before.warnings)
            self._round_began_at = self._run.now
            self._run.out.append(effects.Record(evaluation, moment))
            return self._ranking.see(evaluation)
        summary = self.engine.last_round
        if summary is not None and summary is not self._last_round:
            self._last_round = summary
            self._note_far_above(summary.synchronization)
            self._round_began_at = self._run.now
            self._round_seconds = moment.round_seconds
            self._run.out.append(effects.Record(summary, moment))
            if self._first_closed is None:
                self._first_closed = (self._run.now, summary.round)
        return False

    def _save(self, *names: str, is_salvage: bool = False) -> Job[None]:
        """Write a copy of the model by each of these names; the run does not wait for the disk."""
        if names:
            model = yield from self._run.compute(lambda: ModelCopy(self.engine.model))
            applied = self.engine.updates_applied
            self._run.out += [effects.SaveModel(name, model, applied, is_salvage) for name in names]

    def _checkpoint(self, *, waits: bool) -> Job[None]:
        values, arrays = yield from self._run.compute(self.engine.state)
        model = self.engine.model
        described = {
            "config": dump_config(self._run.config),
            "layout": model.layout_hash().hex(),
            "initial_model": model.initial_digest,
            "frozen": model.frozen_digest,
            "engine": values,
            "moment": Moment(0.0, self.seconds, self.counters.copied()).values(),
        }
        everything = {
            "params": model.numpy(),
            "buffers": model.buffers.values(),
            **{ENGINE_PREFIX + name: array for name, array in arrays.items()},
        }
        yield effects.Checkpoint(described, everything, self.engine.step.position.round, waits)

    # Ends.

    def _model_written(self, event: events.ModelWritten) -> None:
        if event.name == "final" and self.engine.finished:
            # Safe before anyone is told that the run is complete.
            self._finish(ExitCode.OK, self.engine.completion, GoodbyeStatus.FINISHED)

    def _write_failed(self, event: events.WriteFailed) -> Job[None] | None:
        """What the run does not wait for could not be written."""
        if event.what == "metrics":
            return self._abort(event.code, event.reason, self._goodbye(is_final=event.is_final))
        if event.error is not None and shortage(event.error):
            self._break(event.error)
            return None
        # Whatever it is, the run must not wait for a file that never comes.
        self._run.log("ERROR", event.reason, log_events.DiskFailed(), event.error)
        is_final = event.is_final or event.code is not ExitCode.STORAGE
        self._finish(event.code, event.reason, self._goodbye(is_final=is_final))
        return None

    def _stop_asked(self, event: events.StopAsked) -> Job[None] | None:
        """Stop after the open step, or after ``server.grace``, so that the run can be resumed; a run without
        durable state ends for good."""
        if event.is_final or not self._run.is_durable:
            return self._abort(event.code, event.reason)
        if self.ending is None:
            stopping = log_events.Stopping(reason=event.reason)
            self._run.log("WARNING", f"{event.reason}; the open step is waited for", stopping)
            self._pausing = (event.code, event.reason)
            self._run.set_timer("grace", self._run.now + self._run.config.server.grace)
        return None

    def _waits_in_vain(self) -> bool:
        """Whether the process is to end, and the open step waits for someone who is not there."""
        if self._pausing is None or self.ending is not None or self.engine.finished:
            return False
        return not all(map(self._members.owners.get, self.engine.missing()))

    def _pause(self) -> Job[None]:
        """End this process's part of the run."""
        if self.ending is not None or self._pausing is None:
            return
        code, reason = self._pausing
        try:
            yield from self._checkpoint(waits=True)
        except StorageError as error:
            # The log has all that was closed.
            self._run.log("ERROR", str(error), log_events.DiskFailed())
        yield from self._save("final")
        self._finish(code, reason, GoodbyeStatus.LEAVING)

    def _goodbye(self, *, is_final: bool) -> GoodbyeStatus:
        """What workers are told of a failure of this process: to wait for the next, if there can be one."""
        return GoodbyeStatus.LEAVING if self._run.is_durable and not is_final else GoodbyeStatus.ABORTED

    def _abort(self, code: ExitCode, reason: str, status: GoodbyeStatus = GoodbyeStatus.ABORTED) -> Job[None]:
        """End this process's part of the run before the last round; the model as it is becomes the
        final one, if it has been trained."""
        if self.ending is not None:
            return
        aborted = log_events.RunAborted(code=int(code), reason=reason)
        self._run.log("ERROR", f"the run stops: {reason}", aborted)
        self._finish(code, reason, status)
        if self.engine.updates_applied:
            yield from self._save("final", is_salvage=True)

    def _break(self, fault: Exception) -> None:
        """A fault of the server, not of the member whose report happened to be the last.

        One for lack of memory leaves what was written as it was: the run can be resumed.
        """
        failed = log_events.StepFailed(round=self.engine.step.position.round)
        lack = shortage(fault)
        if lack is None:
            self._run.log("ERROR", f"{self._run.open_rounds} cannot be closed", failed, fault)
            self._finish(ExitCode.INTERNAL, "the server failed; its log has why", GoodbyeStatus.ABORTED)
            return
        reason = f"the server ran {lack}"
        self._run.log("ERROR", f"{self._run.open_rounds} cannot go on: {reason}", failed)
        self._finish(lack.exit_code, reason, self._goodbye(is_final=False))

    def _finish(self, code: ExitCode, reason: str, status: GoodbyeStatus) -> None:
        if self.ending is not None:
            return
        self.ending = Ending(code, reason, status is GoodbyeStatus.LEAVING)
        self._downlink.abandon()
        self._membership.finish(status, reason)
        for name in ("deadline", "start", "alone", "grace"):
            self._run.set_timer(name, None)
        self._run.set_timer("farewell", self._run.now + FAREWELL_TIMEOUT_S)
        self._run.out.append(effects.Finish(code, reason))
        self._release_if_alone()

    def _release_if_alone(self) -> None:
        """Release the server once every member has read its goodbye; at the end of the run also workers that
        have been away for so short a time that they may come back are waited for."""
        if self.ending is None or len(self._members):
            return
        returning = self._members.returning(self._run.now) if self.ending.code is ExitCode.OK else {}
        expected = [until for worker, until in returning.items() if worker not in self._membership.informed]
        if expected:
            self._run.set_timer("returning", max(expected))
        else:
            self._run.out.append(effects.Release())


def _kind_of(warning: str) -> tuple[str, ...]:
    """Which worker a warning about a site is of, and what: its first words, without its numbers."""
    return tuple(warning.split()[:4])
