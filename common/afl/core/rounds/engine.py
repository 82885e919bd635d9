"""The round engine: which step is open, who has reported, what follows. Pure: no clock, no I/O.

The server daemon drives it with what comes from sockets; a simulation drives it with what its workers
return. Both get the same steps and the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import Arrays, Collector, ServerAlgorithm
from afl.core.grid import IntegerRound
from afl.core.messages import (
    BUFFERS_PHASE,
    EVALUATION_PHASE,
    NOWHERE,
    Ack,
    AckStatus,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
    Step,
)
from afl.core.model.buffer_mean import BufferMean
from afl.core.model.metric_sums import MetricSums
from afl.core.model.parameters import ParameterVector
from afl.core.rounds.held_reports import HeldReports, with_stand_ins
from afl.core.rounds.incoming import IncomingReports
from afl.core.rounds.patience import Patience
from afl.core.rounds.policy import AbsencePolicy, LargeUpdate, RankBy
from afl.core.rounds.report_check import ReportCheck
from afl.core.rounds.results import Evaluation, Opening, Outcome, RoundSummary
from afl.core.rounds.site_watch import SiteWatch
from afl.core.rounds.worker_losses import WorkerLosses
from afl.errors import AflError, NonFiniteError, ProtocolError, place

_UPDATE_NORMS = "update_norms"
"""Of an outcome that is not sent: the norms of the updates that counted, ``[m]``, NaN elsewhere."""

_UNDRAWN = "undrawn"
"""Of an outcome that is not sent: the workers that the draw which it led to left out."""

QUARANTINED = "the operator has put the worker in quarantine"

_NOT_TOLD: NDArray[np.float64] = np.zeros(0)


def _ack(report: Report, status: AckStatus, reason: str = "") -> Ack:
    return Ack(report.worker, report.position, status, reason, report.workers[1:])


def _below(prefix: str, arrays: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


class RoundEngine:
    """Drives a server algorithm through its rounds and the evaluations between them.

    A step's position counts synchronization rounds; what is recorded counts update rounds.

    Args:
        evaluate_every: in update rounds; an evaluation follows each synchronization that reaches a
            multiple of it, and the last.
        buffer_mean: where the workers' buffers are averaged before each evaluation.
        policy: which participants a step may close without; by default none. If any, nothing is streamed,
            and whole payloads are kept until the step closes, unless they are integers.
        loss_cap: a loss beyond it, or below its negative, counts as that in the algorithm's dual step; it is
            recorded as it was reported.
        patience: ends the run before its last round.
        rank_by: the metric that says which worker is served worst, for warnings.
        model: whose values are the algorithm's parameters; the workers' copies are compared with it at each
            evaluation. Without it they are not compared.
    """

    def __init__(
        self,
        algorithm: ServerAlgorithm,
        *,
        evaluate_every: int,
        buffer_mean: BufferMean | None = None,
        policy: AbsencePolicy | None = None,
        loss_cap: float = math.inf,
        patience: Patience | None = None,
        rank_by: RankBy | None = None,
        model: ParameterVector | None = None,
    ) -> None:
        self.algorithm = algorithm
        self._model = model
        self.policy = policy or AbsencePolicy()
        self.patience = patience
        self._buffer_mean = buffer_mean
        self._training: Collector = algorithm
        self._averaging: Collector | None = buffer_mean
        hides = algorithm.settings.hides_losses
        self._metric_sums = MetricSums(algorithm.settings.workers) if hides else None
        if self.policy.leaves_out:
            self._training = HeldReports(
                algorithm, algorithm.settings.workers, keeps_all=self.policy.update_norm is not None
            )
            self._averaging = (
                None if buffer_mean is None else HeldReports(buffer_mean, algorithm.settings.workers)
            )
        self.workers = algorithm.settings.workers
        self._bound = self.policy.update_bound(self.workers)
        self.rounds = algorithm.settings.rounds
        self.synchronizations = algorithm.settings.synchronizations
        self.evaluate_every = evaluate_every
        self.step = Step(Position(1, 0), Kind.TRAIN)
        self.dual_weights: NDArray[np.float64] = algorithm.dual_weights.copy()
        self._told: NDArray[np.float64] = algorithm.told_weights.copy()
        self.finished = False
        self.restarts = 0
        """How often an open round's sum had to begin again."""
        self.last_outcome: Outcome | None = None
        self.last_evaluation: Evaluation | None = None
        self.last_round: RoundSummary | None = None
        self.cut_off: tuple[Ack, ...] = ()
        """Answers to the reports that the last close found unfinished: the rest of them is not wanted."""
        self.losses = WorkerLosses(self.workers, loss_cap)
        self._watch = SiteWatch(
            self.workers,
            dual_loss_held_out=algorithm.settings.dual_loss_held_out,
            noisy_losses=algorithm.settings.records is not None,
            has_dual_weights=not algorithm.reports_bring_weights,
            by=rank_by,
        )
        self.quarantined: frozenset[int] = frozenset()
        """Workers that steps are closed without, whatever they report."""
        self.buffers_averaged: Position = NOWHERE
        """Where the workers' buffers were last averaged."""
        self.residual_norm: float | None = None
        """The Euclidean norm of the server's own residual at the last evaluation that this engine closed;
        ``None`` where it keeps none."""
        self._was_quarantined: frozenset[int] = frozenset()
        """Those that were, where this engine goes on from."""
        self._left_out: frozenset[int] = frozenset()
        """Those of them that the open step does not ask."""
        self._counted: NDArray[np.int64] = np.full((self.workers, 2), NOWHERE)
        self._trained: NDArray[np.int64] = np.zeros(self.workers, dtype=np.int64)
        self._absent: tuple[int, ...] = ()
        self._is_expired = False
        self._participants: Sequence[int] = algorithm.participants
        self._told_losses: NDArray[np.float64] = np.full(self.workers, np.nan)
        self._reports: dict[int, Report] = {}
        self._previous: dict[int, Report] = {}
        self._incoming = IncomingReports()

    # What the server asks.

    def opening(self) -> Opening:
        """The open step without a payload: for a worker that already has the model."""
        return self._opening(Step(self.step.position, self.step.kind), ())

    @property
    def model(self) -> ParameterVector:
        """The server's own model after all closed steps."""
        assert self._model is not None
        self.catch_up()
        return self._model

    @property
    def worker_params(self) -> Tensor:
        """What a worker's model holds in the open step, float32 ``[dim]``."""
        self.catch_up()
        return self.algorithm.worker_params

    def catch_up(self) -> None:
        """Move the server's own model now by what the last close made, which else happens when something
        needs it: off the critical path, once the payload is on its way. Nothing depends on it."""
        self.algorithm.settle()

    @property
    def collector(self) -> Collector:
        """What takes the open step's reports."""
        if self.step.kind is Kind.BUFFERS:
            assert self._averaging is not None
            return self._averaging
        if self.step.kind is Kind.EVALUATE and self._metric_sums is not None:
            return self._metric_sums
        return self._training

    @property
    def participants(self) -> Sequence[int]:
        """The workers that answer the open step."""
        return self._participants

    @property
    def open_round(self) -> int:
        """The update round that the open synchronization ends with."""
        return self.algorithm.settings.updates_after(self.step.position.round)

    @property
    def updates_applied(self) -> int:
        """How many update rounds the server's model has behind it."""
        position = self.step.position
        closed = position.round if position.phase > 0 else position.round - 1
        return self.algorithm.settings.updates_after(closed)

    def holds(self, worker: int) -> bool:
        """Whether the worker's report for the open step is complete."""
        return worker in self._reports

    def report(self, worker: int) -> Report:
        """The worker's complete report for the open step."""
        return self._reports[worker]

    def arrived(self, worker: int) -> tuple[int, int]:
        """The payload of the worker's report for the open step, and the byte of it, that come next."""
        incoming = self._incoming.sent_by(worker)
        return (incoming.payload, incoming.received) if incoming else (0, 0)

    def begun(self, worker: int) -> tuple[int, ...]:
        """The workers that the report stands for that :meth:`arrived` tells of; none if none has begun."""
        incoming = self._incoming.sent_by(worker)
        return incoming.report.workers if incoming else ()

    def incoming_header(self, worker: int) -> PayloadHeader | None:
        """The payload that the worker's next chunk belongs to."""
        incoming = self._incoming.sent_by(worker)
        return incoming.header if incoming else None

    def awaits(self, worker: int) -> bool:
        """Whether the open step waits for the worker's report."""
        return worker in self._participants and worker not in self._reports

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has come of any report for the open step."""
        return not self._incoming and self.quarantined.issuperset(self._reports)

    def missing(self) -> list[int]:
        """The workers whose report the open step waits for."""
        return [worker for worker in self._participants if worker not in self._reports]

    def absent(self) -> list[int]:
        """The workers that the open step would be closed without."""
        reports = self._reports
        return [
            worker
            for worker in self._participants
            if (report := reports.get(worker)) is None or report.missing
        ]

    @property
    def complete(self) -> bool:
        """Whether the open step can be closed."""
        asked, answered = len(self._participants), len(self._reports)
        if answered == asked or not self.policy.leaves_out:
            return answered == asked
        needed, without = self._needed(), len(self._non_finite())
        # What can no longer have a quorum is closed too: that ends the run.
        return asked - without < needed or (self._is_expired and answered - without >= needed)

    def expire(self) -> None:
        """The open step's deadline has passed: it is complete as soon as it has a quorum."""
        assert self.policy.skips_late
        self._is_expired = True

    def counted(self, worker: int) -> Position:
        """The position of the worker's last report that counted in a step that is closed."""
        round_, phase = self._counted[worker]
        return Position(int(round_), int(phase))

    def trained(self, worker: int) -> int:
        """The round of the worker's last training report that counted, or that the open step holds."""
        is_held = self.step.kind is Kind.TRAIN and worker in self._reports
        return self.step.position.round if is_held else int(self._trained[worker])

    def late_ack(self, worker: int, position: Position, others: tuple[int, ...] = ()) -> Ack:
        """The answer to a report whose step was closed without it; of a joint one, for all its workers."""
        reason = f"round {position.round}, phase {position.phase} is closed"
        return Ack(worker, position, AckStatus.LATE, reason, others)

    def is_late(self, worker: int, reported: Position) -> bool:
        """Whether a report that the worker has made is for a step that was closed without it."""
        if reported.phase == 0:
            # A later report of another kind may have counted.
            return int(self._trained[worker]) < reported.round and reported < self.step.position
        return self.counted(worker) < reported < self.step.position

    def next_step(self) -> Step | None:
        """The header of the step after the open one, if its payload may be sent before this one closes."""
        header = self.algorithm.streamed_header()
        if self.step.kind is not Kind.TRAIN or header is None or self.policy.leaves_out:
            return None
        return self._following((header,))

    @property
    def completion(self) -> str:
        """That the run is complete, and why before its last round if it is."""
        if self.patience is None or not self.patience.is_over:
            return "the run is complete"
        return f"the run is complete: {self.patience.reason}"

    # What workers say.

    def begin_report(self, report: Report) -> Ack | None:
        """A report's opening; ``None`` if its payload is now awaited in pieces.

        Raises:
            ProtocolError: if the report is not one the algorithm asks for.
            NonFiniteError: if its loss is not finite and the policy does not skip that.
        """
        worker, position = report.worker, report.position
        for named in report.workers:
            if not 0 <= named < self.workers:
                raise ProtocolError(
                    f"a report of worker {named}; the run's workers are 0 to {self.workers - 1}"
                )
        if any(after <= before for before, after in pairwise(report.workers)):
            raise ProtocolError(f"worker {worker}: the workers of a joint report must be ascending")
        if position > self.step.position:
            raise ProtocolError(
                f"worker {worker} reports round {position.round}, phase {position.phase}; "
                f"round {self.step.position.round}, phase {self.step.position.phase} is open"
            )
        if report.missing == QUARANTINED:
            raise ProtocolError(f"{self._where(report)}: a report of nothing, in the server's own words")
        if position < self.step.position or self.finished:
            return self._answer_closed(report)
        if report.others:
            self._let_joined(report)
        if self._is_true_of_all(report, self.holds):
            return self._answer_repeated(report, self._reports[worker])
        try:
            self._report_check().check(report, self._where)
        except NonFiniteError as error:
            return self._refuse_number(report, error)
        if self._goes_on(report):
            return None
        if report.payloads or not (report.missing or self.step.kind is Kind.EVALUATE):
            self.collector.open_report(report)
        if not report.payloads:
            return self._accept(report)
        self._incoming.begin(report)
        return None

    def add_piece(self, worker: int, payload: int, offset: int, data: bytes | memoryview) -> Ack | None:
        """The next piece of the payload that the worker's last report opened; its Ack once complete.

        Raises:
            ProtocolError: if it is not the next piece, or its content is not what its header says.
            NonFiniteError: if a value is not finite and the policy does not skip that.
        """
        incoming = self._incoming.sent_by(worker)
        if incoming is None:
            raise ProtocolError(f"a chunk for worker {worker}, which has no report open")
        incoming.check_piece(payload, offset, len(data))
        try:
            self.collector.add_piece(worker, payload, incoming.header, data)
        except AflError as error:
            self.drop_beginning(worker)
            if isinstance(error, NonFiniteError):
                return self._refuse_number(incoming.report, error)
            raise
        if not incoming.take(len(data)):
            return None
        self._incoming.forget(incoming)
        return self._accept(incoming.report)

    def drop_beginning(self, worker: int) -> bool:
        """The rest of a report that has begun and stands for the worker will never come: forget what has, as
        far as it is not in the sum; whether nothing of it is left."""
        incoming = self._incoming.standing_for(worker)
        if incoming is None:
            return True
        sender, payloads = incoming.report.worker, range(len(incoming.report.payloads))
        self.collector.drop(sender)
        if any(self.collector.received(sender, payload) for payload in payloads):
            return False
        self._incoming.forget(incoming)
        self._leave_quarantined_out()
        return True

    def drop_shared(self, workers: Collection[int]) -> None:
        """A process speaks for these workers: drop what has begun of reports that stand for others too, whose
        rest it cannot send."""
        for incoming in self._incoming.shared(workers):
            self.drop_beginning(incoming.report.worker)
        self._leave_quarantined_out()

    def quarantine(self, workers: Collection[int]) -> None:
        """Close steps without these workers from now on; the open one too, but for a report that is complete,
        and for a joint one: nothing can be taken out of what it brings for others too.

        Who was in quarantine before and is not any more comes back with the next step.
        """
        assert self.policy.leaves_out
        self.quarantined = frozenset(workers)
        self._leave_quarantined_out()

    def quarantine_again(self) -> None:
        """After a resume: whoever was in quarantine is, until the operator says otherwise."""
        if self.policy.leaves_out:
            self.quarantine(self._was_quarantined)

    def _leave_quarantined_out(self) -> None:
        for worker in self.quarantined.intersection(self._participants).difference(self._reports):
            incoming = self._incoming.standing_for(worker)
            is_alone = incoming is None or self.quarantined.issuperset(incoming.report.workers)
            if is_alone and self.drop_beginning(worker):
                self._reports[worker] = Report(worker, self.step.position, 0.0, 0, missing=QUARANTINED)

    def _let_joined(self, report: Report) -> None:
        """A joint report may have been made before one of its workers was put into quarantine."""
        mine = self._in_quarantine().intersection(report.workers)
        if mine.isdisjoint(self._left_out) and not self.quarantined.issuperset(report.workers):
            for worker in mine:
                del self._reports[worker]

    def _in_quarantine(self) -> set[int]:
        return {worker for worker, report in self._reports.items() if report.missing == QUARANTINED}

    def _needed(self) -> int:
        """How many of the open step's participants have to report; one in quarantine is not counted."""
        return self.policy.needed(len(self._participants) - len(self._in_quarantine()))

    def restart_round(self) -> None:
        """Begin the open round's sum again; every worker reports again."""
        self.restarts += 1
        self._incoming.clear()
        self._reports.clear()
        if self._bound is not None:
            self._bound.reset()
        self.collector.reset()
        self._leave_quarantined_out()

    # What follows.

    def judge(self) -> Mapping[int, LargeUpdate]:
        """Leave out of the open step, which is complete, the updates that are too large beside the others'
        (:class:`afl.core.rounds.policy.UpdateBound`); those that have been, by worker."""
        assert self.complete
        if self._bound is None or self.step.kind is not Kind.TRAIN:
            return {}
        found = self._bound.judge(self.dual_weights)
        for worker, update in found.items():
            reason = f"the update's norm is {update.norm:.4g}, beyond {update.limit:.4g} (faults.update_norm)"
            self._reports[worker] = Report(worker, self.step.position, 0.0, 0, missing=reason)
        return found

    def advance(self) -> Opening | None:
        """Close the open step; the next one, or ``None`` at the end of the run.

        The memory of its payloads stays as it is until the next piece of a report comes, or anything here
        that concerns the model is asked for.

        Raises:
            NonFiniteError: if a result leaves float32's range, or too few workers have finite numbers.
        """
        assert self.complete
        assert not self.finished
        self.judge()
        self._require_quorum()
        reports = [
            report
            for worker in self._participants
            if (report := self._reports.get(worker)) is not None and not report.missing
        ]
        losses = np.full(self.workers, np.nan)
        losses[[report.worker for report in reports]] = [report.loss for report in reports]
        if self.step.kind is Kind.EVALUATE:
            outcome = Outcome(self.step, losses, evaluation=self._evaluate(reports))
        else:
            if isinstance(self.collector, HeldReports):
                stand_ins = self.losses.stand_ins(self._participants, losses, self.quarantined)
                self.collector.fold(
                    [replace(report, loss=self.losses.counting(report.loss)) for report in reports],
                    {worker: self.losses.counting(loss) for worker, loss in stand_ins.items()},
                )
            self.algorithm.undrawn = self.quarantined
            payload = self.collector.close()
            unsent = self.collector.unsent()
            if self.quarantined:
                unsent = {**unsent, _UNDRAWN: np.array(sorted(self.quarantined))}
            if self._bound is not None and self.step.kind is Kind.TRAIN:
                norms = np.full(self.workers, np.nan)
                norms[list(self._bound.norms)] = list(self._bound.norms.values())
                unsent = {**unsent, _UPDATE_NORMS: norms}
            outcome = Outcome(self.step, losses, payload, unsent)
        self.cut_off = tuple(self._late(incoming.report) for incoming in self._incoming.all())
        self._incoming.clear()
        self._previous, self._reports = self._reports, {}
        return self._follow(outcome)

    def replay(self, outcome: Outcome) -> Opening | None:
        """Close the open step as it was closed before; the next one, or ``None`` at the end of the run."""
        assert not self.finished
        assert not self._reports
        assert outcome.step.position == self.step.position
        assert outcome.step.kind is self.step.kind
        if outcome.evaluation is not None:
            self._watch.take_evaluation(outcome.evaluation.round, outcome.evaluation.metrics)
        if outcome.payload is not None:
            # Whatever the policy is now: another may have closed the step.
            self.algorithm.undrawn = frozenset(outcome.unsent.get(_UNDRAWN, np.zeros(0)).tolist())
            self._was_quarantined = self.algorithm.undrawn
            losses = with_stand_ins(outcome.losses, outcome.unsent).clip(-self.losses.cap, self.losses.cap)
            self.collector.replay(losses, outcome.payload, outcome.unsent)
        return self._follow(outcome)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """The open step without its reports, as JSON and arrays for :meth:`restore`."""
        self.catch_up()
        values: dict[str, Any] = {
            "position": list(self.step.position),
            "kind": self.step.kind.name,
            "finished": self.finished,
        }
        arrays = {f"algorithm.{name}": array for name, array in self.algorithm.state().items()}
        arrays["losses"] = self._told_losses
        arrays["last_losses"] = self.losses.last.copy()
        arrays["counted"] = self._counted.copy()
        arrays["trained"] = self._trained.copy()
        arrays |= {f"watch.{name}": array for name, array in self._watch.state().items()}
        if self._bound is not None:
            arrays |= {f"bound.{name}": array for name, array in self._bound.state().items()}
        values["buffers_averaged"] = list(self.buffers_averaged)
        values["absent"] = list(self._absent)
        if self.quarantined:
            values["quarantined"] = sorted(self.quarantined)
        values["highest_median"] = self.losses.highest_median
        if self.patience is not None:
            values["patience"] = self.patience.state()
        if self.last_round is not None:
            values["last_round"] = [self.last_round.round, self.last_round.synchronization]
            values["last_round_absent"] = list(self.last_round.absent)
            if self.last_round.mean_loss is not None:
                values["last_round_mean_loss"] = self.last_round.mean_loss
            if self.last_round.integers is not None:
                values["last_round_integers"] = asdict(self.last_round.integers)
            arrays["last_round.losses"] = self.last_round.losses
            arrays["last_round.dual_weights"] = self.last_round.dual_weights
        if self.last_evaluation is not None:
            values["last_evaluation"] = asdict(self.last_evaluation)
        return values, arrays

    def restore(self, values: Mapping[str, Any], arrays: Arrays) -> None:
        """Go on from a :meth:`state`; the algorithm's parameters have been put back."""
        position = Position(*values["position"])
        # Evaluations come behind the algorithm's own phases: it has opened its next round by then.
        is_ahead = position.phase >= BUFFERS_PHASE
        opened = Position(position.round + 1, 0) if is_ahead else position
        self.algorithm.restore(_below("algorithm.", arrays), opened)
        self._told_losses = arrays["losses"].copy()
        self.losses.last = arrays["last_losses"].copy()
        self._counted = arrays["counted"].copy()
        self._trained = arrays["trained"].copy()
        # States of before sites were watched have none.
        if watch := _below("watch.", arrays):
            self._watch.restore(watch)
        if self._bound is not None:
            self._bound.restore(_below("bound.", arrays))
        self._was_quarantined = frozenset(values.get("quarantined", ()))
        self.buffers_averaged = Position(*values["buffers_averaged"])
        self._absent = tuple(values["absent"])
        # States of before it was watched have none.
        self.losses.highest_median = values.get("highest_median", 0.0)
        if "last_round" in values:
            round_, synchronization = values["last_round"]
            self.last_round = RoundSummary(
                round_,
                synchronization,
                arrays["last_round.losses"].copy(),
                arrays["last_round.dual_weights"].copy(),
                tuple(values["last_round_absent"]),
                # States of before there were integers have none.
                IntegerRound(**integers) if (integers := values.get("last_round_integers")) else None,
                values.get("last_round_mean_loss"),
            )
        if "last_evaluation" in values:
            self.last_evaluation = Evaluation.of_values(values["last_evaluation"])
        if self.patience is not None and "patience" in values:
            self.patience.restore(values["patience"])
        self.finished = values["finished"]
        self._open(Step(position, Kind[values["kind"]]))

    def _follow(self, outcome: Outcome) -> Opening | None:
        """Open what comes after the open step, whose outcome this is."""
        self.last_outcome = outcome
        norms = outcome.unsent.get(_UPDATE_NORMS)
        if self._bound is not None and norms is not None:
            self._bound.take(norms, self.dual_weights)
        self._counted[~np.isnan(outcome.losses)] = self.step.position
        if self.step.kind is Kind.TRAIN:
            self._trained[~np.isnan(outcome.losses)] = self.step.position.round
        elif self.step.kind is Kind.BUFFERS:
            self.buffers_averaged = self.step.position
        position = self.step.position
        if outcome.payload is None:
            self.last_evaluation = outcome.evaluation
            if self.patience is not None and outcome.evaluation is not None:
                self.patience.see(outcome.evaluation.round, outcome.evaluation.metrics)
            if position.round == self.synchronizations or (self.patience and self.patience.is_over):
                self.finished = True
                return None
            self._open(Step(Position(position.round + 1, 0), Kind.TRAIN))
            return self.opening()
        payload = outcome.payload
        if self.step.kind is Kind.BUFFERS:
            self._open(Step(Position(position.round, EVALUATION_PHASE), Kind.EVALUATE, (payload.header,)))
            return self._opening(self.step, (payload,))
        told = outcome.losses
        if self.algorithm.settings.hides_losses:
            told = np.full(self.workers, np.nan)
        if position.phase == 0:
            self._told_losses, self._absent = told, ()
        absent = np.isnan(outcome.losses[list(self._participants)])
        if absent.any():
            self._absent = tuple(sorted({*self._absent, *np.array(self._participants)[absent].tolist()}))
        if position.phase == self.algorithm.phases - 1:
            self.losses.take(told)
        algorithm, settings = self.algorithm, self.algorithm.settings
        # A round whose drawn workers were all in quarantine has trained nothing, and nothing is told of it.
        has_trained = settings.hides_losses or not np.isnan(self._told_losses).all()
        if position.phase == algorithm.phases - 1 and has_trained:
            self.last_round = RoundSummary(
                settings.updates_after(position.round),
                position.round,
                self._told_losses,
                algorithm.dual_weights.copy() if algorithm.reports_bring_weights else self.dual_weights,
                self._absent,
                algorithm.integers,
                algorithm.mean_loss,
            )
            self._watch.take_round(self.last_round.dual_weights, self._told_losses)
        self._open(self._following((payload.header,)))
        return self._opening(self.step, (payload,))

    def _opening(self, step: Step, payloads: tuple[Payload, ...]) -> Opening:
        told = _NOT_TOLD if step.kind is Kind.BUFFERS else self._told
        return Opening(step, payloads, told, self._participants, self._left_out)

    def _open(self, step: Step) -> None:
        self.step = step
        self._is_expired = False
        self.dual_weights = self.algorithm.dual_weights.copy()
        self._told = self.algorithm.told_weights.copy()
        is_for_all = step.kind.is_of_evaluation
        self._participants = range(self.workers) if is_for_all else self.algorithm.participants
        self._left_out = self.quarantined
        self._leave_quarantined_out()

    def _following(self, headers: tuple[PayloadHeader, ...]) -> Step:
        """The header of the step after the open training step."""
        round_, phase = self.step.position
        if phase + 1 < self.algorithm.phases:
            return Step(Position(round_, phase + 1), Kind.LOSS, headers)
        settings, every = self.algorithm.settings, self.evaluate_every
        before, after = settings.updates_after(round_ - 1), settings.updates_after(round_)
        if before // every != after // every or round_ == self.synchronizations:
            if self._buffer_mean is not None:
                return Step(Position(round_, BUFFERS_PHASE), Kind.BUFFERS, headers)
            return Step(Position(round_, EVALUATION_PHASE), Kind.EVALUATE, headers)
        return Step(Position(round_ + 1, 0), Kind.TRAIN, headers)

    def _where(self, report: Report) -> str:
        return place(report.worker, self.algorithm.settings.named(report.position.round))

    def _is_true_of_all(self, report: Report, has_come: Callable[[int], bool]) -> bool:
        """Whether the reports of all workers that a report stands for have come, or of none."""
        first, *others = (has_come(worker) for worker in report.workers)
        if any(other != first for other in others):
            raise ProtocolError(
                f"{self._where(report)}: a joint report, where the reports of some of its workers have come"
            )
        return first

    def _goes_on(self, report: Report) -> bool:
        """Whether the beginning of this report has come: a worker that was cut off goes on where it was. What
        has come of a report that stands for other workers, and for some of this one's, is dropped."""
        for worker in report.workers:
            incoming = self._incoming.standing_for(worker)
            if incoming is None:
                continue
            if incoming.report == report:
                return True
            if incoming.report.workers == report.workers:
                raise ProtocolError(
                    f"{self._where(report)}: another report than the one whose beginning has come"
                )
            self.drop_beginning(worker)
        return False

    def _report_check(self) -> ReportCheck:
        kind = self.step.kind
        expected: Sequence[PayloadHeader] = ()
        tensors: int | None = 0
        if kind is not Kind.EVALUATE or self._metric_sums is not None:
            expected = self.collector.expected_payloads(self.step.position)
        if kind is Kind.EVALUATE and self.algorithm.grid is not None:
            # Without a model nobody asks what they are.
            tensors = None if self._model is None else len(self._model.tensors)
        return ReportCheck(kind, self._participants, expected, self.policy.skips_non_finite, tensors)

    def _accept(self, report: Report) -> Ack:
        if self._bound is not None and self.step.kind is Kind.TRAIN and report.payloads:
            self._measure(report)
        for own in report.of_each():
            self._reports[own.worker] = own
            if self.step.kind is not Kind.EVALUATE and not report.missing:
                self.collector.add_loss(own.worker, self.losses.counting(own.loss))
        return _ack(report, AckStatus.ACCEPTED)

    def _measure(self, report: Report) -> None:
        """The norm of an update, which is each worker's in shares of their weights if it is a joint one."""
        assert self._bound is not None
        assert isinstance(self._training, HeldReports)
        data = self._training.payloads(report.worker)[0]
        norm, workers = self.algorithm.update_norm(report.payloads[0], data), list(report.workers)
        shares = np.maximum(self.dual_weights[workers], 1e-12)
        self._bound.add(dict(zip(workers, (norm * shares / shares.sum()).tolist(), strict=True)))

    def _answer_closed(self, report: Report) -> Ack:
        def is_known(worker: int) -> bool:
            known = self._previous.get(worker)
            if known is None or known.position != report.position:
                return False
            return not (report.others and known.missing == QUARANTINED)

        if self._is_true_of_all(report, is_known):
            return self._answer_repeated(report, self._previous[report.worker])
        if self._is_true_of_all(report, lambda worker: report.position == self.counted(worker)):
            return _ack(report, AckStatus.DUPLICATE, "already counted")
        return self._late(report)

    def _late(self, report: Report) -> Ack:
        """Its step is closed; its losses are still the newest that there are of its workers."""
        is_of_losses = not report.missing and report.position.phase == self.algorithm.phases - 1
        for own in report.of_each() if is_of_losses else ():
            if self.counted(own.worker) < report.position and math.isfinite(own.loss):
                self.losses.last[own.worker] = own.loss
        return self.late_ack(report.worker, report.position, report.workers[1:])

    # Absent workers.

    def _non_finite(self) -> list[Report]:
        """The open step's reports that there is nothing finite to report, ascending by worker."""
        return [self._reports[worker] for worker in sorted(self._reports) if self._reports[worker].missing]

    def _refuse_number(self, report: Report, error: NonFiniteError) -> Ack:
        """A number came that is not finite: raise, or take the report for a missing one."""
        if not self.policy.skips_non_finite:
            raise error
        for worker in report.workers:
            self.drop_beginning(worker)
            self._reports[worker] = Report(worker, report.position, 0.0, 0, missing=str(error))
        return _ack(report, AckStatus.REFUSED, str(error))

    def _require_quorum(self) -> None:
        non_finite, asked = self._non_finite(), len(self._participants)
        needed = self._needed()
        if not non_finite or asked - len(non_finite) >= needed:
            return
        raise NonFiniteError(
            f"round {self.open_round}: {len(non_finite)} of {asked} workers have nothing "
            f"{'finite' if self._bound is None else 'that counts'} to report; "
            f"the quorum is {needed}: "
            + "; ".join(f"worker {report.worker}: {report.missing}" for report in non_finite)
        )

    @staticmethod
    def _answer_repeated(report: Report, counted: Report) -> Ack:
        if report == counted:
            return _ack(report, AckStatus.DUPLICATE, "already counted")
        if counted.missing == QUARANTINED:
            return _ack(report, AckStatus.REFUSED, QUARANTINED)
        return _ack(
            report,
            AckStatus.REFUSED,
            f"a report of worker {report.worker} for round {report.position.round}, phase "
            f"{report.position.phase} with other content is already counted",
        )

    def _evaluate(self, reports: Sequence[Report]) -> Evaluation:
        right = b""
        if self._model is not None:
            # Its update comes first: the companions move with the model.
            model = self.model
            right = model.digest(*(beside.content() for beside in self.algorithm.companions.values()))
        self.residual_norm = None if self._model is None else self.algorithm.residual_norm
        present = {report.worker: report for report in reports}
        nothing = Report(0, self.step.position, 0.0, 0)
        by_worker = [present.get(worker, nothing) for worker in range(self.workers)]
        is_secure = self.algorithm.settings.secure_aggregation
        means, smooth_worst = None, None
        if self._metric_sums is not None:
            means, smooth_worst = self._metric_sums.means_of(reports)
        metrics = tuple({} if means else dict(report.metrics) for report in by_worker)
        round_ = self.algorithm.settings.updates_after(self.step.position.round)
        return Evaluation(
            round=round_,
            synchronization=self.step.position.round,
            metrics=metrics,
            examples=() if means else tuple(report.examples for report in by_worker),
            diverged=tuple(report.worker for report in reports if right and report.model_digest != right),
            absent=tuple(worker for worker in range(self.workers) if worker not in present),
            non_finite=tuple(
                report.worker for report in self._non_finite() if report.worker not in self.quarantined
            ),
            residual_norms=() if is_secure else tuple(report.residual_norm for report in by_worker),
            means=means,
            smooth_worst=smooth_worst,
            tensor_residual_norms=self._largest_norms(reports),
            warnings=self._watch.take_evaluation(round_, metrics),
        )

    def _largest_norms(self, reports: Sequence[Report]) -> dict[str, float]:
        told = [report.tensor_residual_norms for report in reports if report.tensor_residual_norms]
        if self._model is None or not told:
            return {}
        return dict(zip(self._model.names, map(max, *told, told[0]), strict=True))
