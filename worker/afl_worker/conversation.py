"""A worker process's side of the conversation: what the server says in, frames out.

The decisions are here; sockets, threads and the clock are in :mod:`afl_worker.runtime`.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import traceback
from collections.abc import Hashable, Iterable, Iterator

import torch

from afl._version import __version__
from afl.core.aggregation import joint_reports
from afl.core.messages import NOWHERE, Ack, AckStatus, CommittedStep, FailureCause, Kind, Position, Report
from afl.core.participant import Answer
from afl.core.randomness import SEED_BYTES
from afl.core.secrecy.hidden_weights import LARGEST_TOTAL
from afl.daemon import events
from afl.daemon.fault_points import reached
from afl.daemon.logs import add_to_every_line
from afl.errors import (
    ADVICE_NON_FINITE,
    STOPS,
    AflError,
    BudgetError,
    ConfigError,
    HelperKilledError,
    InternalError,
    NonFiniteError,
    OutOfMemoryError,
    PeerError,
    PolicyError,
    ProtocolError,
    place,
    placed,
)
from afl.user_code import as_failure, is_all_ours, worth_tracing
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import StepAssembler
from afl.wire.frames import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Frame,
    number,
    position_message,
    position_of,
    report_frames,
)
from afl.wire.keys import key_offer_message, key_offer_of
from afl.wire.settings import RunSettings
from afl_worker.departures import Departures
from afl_worker.journal import remove_left_behind
from afl_worker.keys import Standing
from afl_worker.options import WorkerOptions
from afl_worker.training.setup import Training, set_up
from afl_worker.training.timings import Spent

LOG = logging.getLogger("afl.worker")

_CAUSES = {
    NonFiniteError: FailureCause.NON_FINITE,
    OutOfMemoryError: FailureCause.OUT_OF_MEMORY,
    HelperKilledError: FailureCause.HELPER_KILLED,
    InternalError: FailureCause.INTERNAL,
}

MOST_TOLD = 32 * 1024
"""Characters of a failure that the server is told: the server takes no message over its limit."""

_NOT_TOLD = "a loss, a metric or a gradient is not finite or too large; the worker's own log has which"

_NOT_TOLD_OF_RECORDS = "what failed is not told, with privacy.records; the worker's own log has it"

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A run id that may come over the wire: it names a folder here, so it must not lead out of another."""


class CannotGoOnError(Exception):
    """This process cannot do what the server asks: what the server is told, and what the process ends on."""

    def __init__(self, told: pb.Failure, error: AflError) -> None:
        super().__init__(str(error))
        self.told = told
        self.error = error


class Conversation:
    """It lasts as long as the process, over any number of connections; ``spent`` is added the time in the
    task's code.

    Raises:
        StorageError: if the site's audit log cannot be used.
    """

    def __init__(self, options: WorkerOptions, device: torch.device, spent: Spent) -> None:
        self._options = options
        self._device = device
        self._spent = spent
        self._departures = Departures(options)
        self._incarnation = os.urandom(16)
        self.run_id = ""
        """Empty before the first Welcome."""
        self.residual_norms: dict[int, float] = {}
        """By worker, at the last evaluation; replaced, never changed: other threads read it."""
        self._settings: RunSettings  # since the first Welcome
        self._training: Training | None = None
        self._assembler: StepAssembler | None = None

    @property
    def assembler(self) -> StepAssembler:
        """What collects the steps of this model, also those whose session is cut."""
        if self._assembler is None:
            vector = self._trained.participant.vector
            largest = 8 * vector.dim + vector.frozen_length + 4 * vector.buffers.size + vector.dim // 8 + 1024
            largest += sum(companion.nbytes for companion in self._trained.participant.companions)
            hides = self._settings.parameters.hides_losses
            # Then it is the sum that each worker divides its own weight by.
            weight = LARGEST_TOTAL if hides else 1.0
            self._assembler = StepAssembler(self._options.workers, largest, weight)
        return self._assembler

    @property
    def round(self) -> int:
        """The synchronization round of the last step; 0 before the first."""
        return 0 if self._training is None else self._training.participant.applied.round

    @property
    def rounds(self) -> int | None:
        """The synchronization rounds of the run; ``None`` before the first session."""
        return None if self._training is None else self._settings.parameters.synchronizations

    @property
    def policy_rounds_left(self) -> int | None:
        """As :meth:`Departures.rounds_left`; ``None`` before the first session too."""
        return None if self._training is None else self._departures.rounds_left()

    def check_server(self) -> None:
        """Raise PolicyError if the server may not be connected to."""
        self._departures.check_server()

    def received(self) -> tuple[Hashable, bool]:
        """How far the steps have come that the server sends, and whether one has come in part."""
        if self._training is None:
            return None, True
        applied, part = self._training.participant.applied, self.assembler.arrived
        return (applied, part), applied == NOWHERE or part > 0

    def join(self) -> pb.Join:
        """The message that opens a connection: this process, its workers, and the run that it knows."""
        participant = self._training.participant if self._training else None
        return pb.Join(
            protocol=PROTOCOL,
            oldest_protocol=OLDEST_PROTOCOL,
            package_version=__version__,
            incarnation=self._incarnation,
            run_id=self.run_id,
            task=self._options.task or "",
            layout_hash=participant.vector.layout_hash() if participant else b"",
            applied=position_message(participant.applied if participant else NOWHERE),
            workers=self._options.workers,
            sites=self._options.sites,
        )

    @property
    def awaits_roster(self) -> bool:
        """Whether nothing may be sent before the server has sent all workers' keys."""
        return self._trained.masking is not None

    def welcome(self, welcome: pb.Welcome, settings: RunSettings) -> pb.Ready:
        """Get ready: build what the run needs, once in the process's life; later sessions use it again.

        Raises:
            ProtocolError: if the Welcome cannot be meant for this version.
            PolicyError: if the site's policy does not allow the run.
            CannotGoOnError: if the task cannot be built, or the run's settings are not those that this
                process was built for.
        """
        self._departures.check(welcome.run_id, settings)
        if self._training is None:
            self._begin(welcome, settings)
        else:
            different = self._settings.differences(settings)
            if welcome.run_id != self.run_id:
                different.append(f"run_id is {self.run_id!r} here and {welcome.run_id[:100]!r} at the server")
            if different:
                error = ConfigError(
                    "the server's settings are not those that this worker began with: "
                    f"{'; '.join(different)}; give the server the run's own configuration, or start this "
                    "worker again to take part by the server's"
                )
                raise self._failure(self._options.workers[0], NOWHERE, error)
            self._settings = settings
            position = position_of(welcome.workers[0].position) if welcome.workers else NOWHERE
            kept = self.assembler.arrived + sum(entry.offset for entry in welcome.workers)
            event = events.JoinedAgain(run_id=welcome.run_id, round=position.round, kept=kept)
            LOG.info("joined again: run %s, %s", welcome.run_id, self._named(position), extra=event.extra)
        self.run_id = welcome.run_id
        participant, keys = self._trained.participant, self._keys(welcome)
        return pb.Ready(
            layout_hash=participant.vector.layout_hash(),
            dim=participant.vector.dim,
            realization_digest=self._trained.digest,
            workers=[
                pb.Standing(worker=worker, reported=position_message(participant.reported(worker)))
                for worker in self._options.workers
            ],
            partial=self.assembler.partial(),
            keys=keys,
            frozen_digest=participant.vector.frozen_digest,
        )

    def _keys(self, welcome: pb.Welcome) -> pb.KeyOffer | None:
        trained = self._trained
        if trained.masking is None:
            return None
        standings = {
            entry.worker: Standing(position_of(entry.position), entry.held) for entry in welcome.workers
        }
        held = [
            worker
            for worker, standing in standings.items()
            if trained.participant.held(worker, standing.open) is not None
        ]
        try:
            offer = trained.masking.offer(welcome.key_epoch, standings, held)
        except AflError as error:
            raise self._failure(self._options.workers[0], NOWHERE, error) from error
        for worker in trained.participant.keep_to(offer.epoch):
            event = events.BegunAnew(worker=worker, epoch=offer.epoch)
            text = "worker %d begins anew under other keys (key epoch %d); what it had yet to send is lost"
            LOG.warning(text, worker, offer.epoch, extra=event.extra)
        return key_offer_message(offer)

    def roster(self, roster: pb.Roster) -> None:
        """Mask what is sent from here on by these keys.

        Raises:
            CannotGoOnError: if they cannot be believed.
        """
        masking = self._trained.masking
        if masking is None:
            raise ProtocolError("a roster of keys in a run without secure aggregation")
        try:
            masking.take(roster.epoch, map(key_offer_of, roster.offers))
        except ProtocolError:
            raise
        except AflError as error:
            raise self._failure(self._options.workers[0], NOWHERE, error) from error
        event = events.KeysAgreed(epoch=roster.epoch)
        LOG.info("the keys of all workers are right (key epoch %d)", roster.epoch, extra=event.extra)

    def sent_again(self, welcome: pb.Welcome) -> Iterator[Iterable[Frame]]:
        """Reports for the open step that were made before a cut and that the server does not hold."""
        expected = {entry.worker: entry for entry in welcome.workers if not entry.held}
        made = (
            self._trained.participant.held(worker, position_of(entry.position))
            for worker, entry in expected.items()
        )
        for answer in self._sent(held for held in made if held is not None):
            _, (report, _) = answer
            entry = expected[report.worker]
            goes_on = tuple(entry.others) == report.workers[1:]
            yield self._frames(answer, (entry.payload, entry.offset) if goes_on else (0, 0))

    def broken(self, error: Exception) -> CannotGoOnError:
        """What an error outside a step ends on, once welcome: while frames were made, sent or received."""
        return self._failure(self._options.workers[0], self._trained.participant.applied, error)

    def step(self, committed: CommittedStep) -> Iterator[Iterable[Frame]]:
        """Take a step: the reports of the workers that are asked, their frames to be made as they are sent.

        Raises ProtocolError if the step does not follow from where the model is, PolicyError if it is one too
        many, and CannotGoOnError if the task's code fails or a number is not finite.
        """
        present = committed.participants
        asked = [worker for worker in self._options.workers if present is None or worker in present]
        answered = 0

        def answers() -> Iterator[tuple[Kind, Answer]]:
            nonlocal answered
            for answer in self._trained.participant.take(committed):
                yield answer
                answered += 1

        reached("worker.before-apply")
        try:
            for answer in self._sent(answers()):
                yield self._frames(answer)
        except (PolicyError, ProtocolError, *STOPS):
            raise
        except BaseException as error:  # whatever a task's code raises, the server must hear of it
            worker = asked[min(answered, len(asked) - 1)]
            raise self._failure(worker, committed.step.position, error) from error

    def prepare(self, round_: int) -> None:
        """Draw a coming round's randomness."""
        self._trained.participant.prepare(round_)

    def answered(self, ack: Ack) -> None:
        """A report that counted is not kept; what a late one carried is part of a later one, or a
        CannotGoOnError where it makes a number that is not finite."""
        for worker in ack.workers:
            self._answered(worker, ack)

    def _answered(self, worker: int, ack: Ack) -> None:
        participant = self._trained.participant
        if ack.status is AckStatus.ACCEPTED:
            participant.counted(worker, ack.position)
            return
        if ack.status is AckStatus.LATE and self._trained.masking is not None:
            # Put back, it would be sent again in a sum that could be of this worker alone.
            late = PeerError("the server calls a masked report late; no run with masks leaves one out")
            raise self._failure(worker, ack.position, late)
        round_, named = ack.position.round, self._named(ack.position)
        event = events.ReportAnswered(worker=worker, round=round_, status=ack.status.name.lower())
        LOG.warning("the server answers worker %d, %s: %s", worker, named, ack.reason, extra=event.extra)
        try:
            was_put_back = ack.status is AckStatus.LATE and participant.late(worker, ack.position)
        except NonFiniteError as error:
            raise self._failure(worker, ack.position, error) from error
        if was_put_back:
            put_back = events.PutBack(worker=worker, round=round_)
            text = "worker %d: its report for %s was late; what it carried is sent later"
            LOG.info(text, worker, named, extra=put_back.extra)

    def finished(self, run_id: str) -> None:
        """The run is complete: nothing will go on from a journal."""
        if self._training is not None:
            if self._training.journals is not None:
                self._training.journals.remove()
        elif RUN_ID.fullmatch(run_id):
            # A process of these workers before this one may have been killed as the run ended.
            remove_left_behind(self._options.journal, run_id, self._options.workers)

    def forget(self, *, is_complete: bool) -> None:
        """The run is over, and another may follow: as if the process had just begun.

        Args:
            is_complete: whether :meth:`finished` has removed what would have gone on.
        """
        if not is_complete and self._training is not None and self._training.journals is not None:
            self._training.journals.close()
        self._incarnation, self.run_id = os.urandom(16), ""
        self._training = self._assembler = None
        # What the run has left is in what the collector was told not to look at.
        gc.unfreeze()
        gc.collect()

    @property
    def _trained(self) -> Training:
        if self._training is None:
            raise ProtocolError("a message that can only follow a Welcome")
        return self._training

    def _sent(self, answers: Iterable[tuple[Kind, Answer]]) -> Iterable[tuple[Kind, Answer]]:
        if self._trained.masking is not None:
            answers = self._trained.masking.sent(answers)
        elif len(self._options.workers) > 1 and not self._settings.single_reports:
            answers = joint_reports(answers)
        for kind, answer in answers:
            report = answer[0]
            if report.residual_norm:
                self.residual_norms = {**self.residual_norms, report.worker: report.residual_norm}
            if kind is Kind.EVALUATE:
                self._tell_spent(report)
            self._departures.reported(kind, *answer)
            yield kind, answer

    @property
    def epsilons(self) -> dict[int, float]:
        """What each hosted worker's steps have cost its records, where that is accounted for."""
        accounts = {} if self._training is None else self._training.participant.accounts
        return {worker: account.epsilon for worker, account in accounts.items()}

    def _tell_spent(self, report: Report) -> None:
        for worker, epsilon in self.epsilons.items():
            if worker in report.workers:
                event = events.PrivacySpent(worker=worker, round=report.position.round, epsilon=epsilon)
                text = "worker %d has spent an epsilon of %.4g on each of its records"
                LOG.info(text, worker, epsilon, extra=event.extra)

    def _frames(self, answer: tuple[Kind, Answer], first: tuple[int, int] = (0, 0)) -> Iterable[Frame]:
        kind, (report, payloads) = answer
        return report_frames(report, kind, payloads, self._settings.chunk_bytes, first)

    def _named(self, position: Position) -> str:
        return self._settings.parameters.named(position.round)

    def _begin(self, welcome: pb.Welcome, settings: RunSettings) -> None:
        if len(welcome.seed) != SEED_BYTES:
            raise ProtocolError(f"a seed of {len(welcome.seed)} bytes; it has {SEED_BYTES}")
        if not RUN_ID.fullmatch(welcome.run_id):
            raise ProtocolError(f"the run id {welcome.run_id[:80]!r}, which cannot name a folder of journals")
        add_to_every_line(run_id=welcome.run_id)
        self._settings = settings
        try:
            self._training = set_up(self._options, self._device, welcome, settings, self._spent)
        except (PolicyError, *STOPS):
            raise
        except BaseException as error:  # a task's data and model may be anything
            raise self._failure(self._options.workers[0], NOWHERE, error) from error
        self._departures.accounts = self._training.participant.accounts
        self._departures.joined(settings)

    def _failure(self, worker: int, position: Position, error: BaseException) -> CannotGoOnError:
        if isinstance(error, NonFiniteError):
            error = NonFiniteError(f"{error}; {ADVICE_NON_FINITE}")
        failure = as_failure(error)
        raised = worth_tracing(failure)
        told = pb.Failure(
            worker=worker,
            position=position_message(position),
            cause=number(_CAUSES.get(type(failure), FailureCause.TASK)),
            message=_told(str(failure)),
            traceback="" if raised is None else _told("".join(traceback.format_exception(raised))),
        )
        if isinstance(error, NonFiniteError) and self._settings.parameters.hides_losses:
            # It says what the number is.
            told.message, told.traceback = _NOT_TOLD, ""
        is_of_settings = isinstance(error, BudgetError | ConfigError) and is_all_ours(error)
        if self._settings.parameters.records is not None and not is_of_settings:
            # It may quote a record.
            told.message, told.traceback = _NOT_TOLD_OF_RECORDS, ""
        self._departures.failed(told)
        final = placed(place(worker, self._named(position)), failure)
        final.__cause__ = failure
        return CannotGoOnError(told, final)


def _told(text: str) -> str:
    """The text as a message can hold it: the name of a file, which an error quotes, may be no UTF-8, and what
    a library raises may quote a whole array."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= MOST_TOLD:
        return text
    left_out = len(text) - MOST_TOLD
    return f"{text[: MOST_TOLD // 2]}\n... {left_out} characters left out ...\n{text[-MOST_TOLD // 2 :]}"
