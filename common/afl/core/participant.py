"""A worker process's half of the conversation: committed steps in, reports out. Pure: no clock, no I/O."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import Companion, LocalModel, LocalSteps, LocalUpdate, WorkerSide
from afl.core.algorithms.local_sgd import model_payload, step_by_step
from afl.core.codecs.payload import check_header
from afl.core.codecs.plain import values_of
from afl.core.messages import EVALUATION_PHASE, NOWHERE, CommittedStep, Kind, Payload, Position, Report, Role
from afl.core.model.buffer_mean import buffers_header
from afl.core.model.parameters import ParameterVector
from afl.core.record_privacy import Account
from afl.core.secrecy.fixed_point import metrics_payload
from afl.core.vectors import Weighted, norm
from afl.errors import NonFiniteError, ProtocolError


class Oracle(Protocol):
    """What a participant asks of the task and its data, at the model as it now is."""

    def announce(self, workers: Sequence[int]) -> None:  # noqa: ARG002
        """The step is asked of these workers, in this order, and of no other: their answers may be computed
        together."""
        return

    def train_examples(self, worker: int) -> int:
        """How many training examples the worker has."""
        ...

    def gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Tensor]:
        """The minibatch loss, the minibatch size, and ``scale`` times the gradient.

        The factor is rounded to float32, then each product: float32 ``[dim]``, free to change, and valid
        until the next call.
        """
        ...

    def weighted_gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        """The same, as autograd leaves it, valid until the next call or change of the model."""
        ...

    def local_steps(self, worker: int, model: LocalModel, steps: LocalSteps) -> LocalUpdate:  # noqa: ARG002
        """As :meth:`LocalModel.local_steps`, of which ``model`` is the worker's."""
        return step_by_step(model, steps)

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        """The loss on a minibatch of its own, and the minibatch size."""
        ...

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        """Means over the worker's test data, by name with ``loss`` among them, and how many examples."""
        ...


class _WorkerModel:
    """One worker's view of the process's model: an :class:`afl.core.algorithms.base.LocalModel`."""

    def __init__(self, worker: int, vector: ParameterVector, oracle: Oracle) -> None:
        self._worker = worker
        self._vector = vector
        self._oracle = oracle

    @property
    def params(self) -> Tensor:
        return self._vector.values

    @property
    def train_examples(self) -> int:
        return self._oracle.train_examples(self._worker)

    def publish(self) -> None:
        self._vector.publish()

    def gradient(self, update: int, scale: float) -> tuple[float, int, Tensor]:
        return self._oracle.gradient(self._worker, update, scale)

    def weighted_gradient(self, update: int, scale: float) -> tuple[float, int, Weighted]:
        return self._oracle.weighted_gradient(self._worker, update, scale)

    def local_steps(self, steps: LocalSteps) -> LocalUpdate:
        return self._oracle.local_steps(self._worker, self, steps)

    def loss(self, synchronization: int) -> tuple[float, int]:
        return self._oracle.loss(self._worker, synchronization)


@dataclass(frozen=True)
class Kept:
    """A training report, and all that its worker knows after it: enough for another process to go on.

    Attributes:
        state: the algorithm's own, as :meth:`afl.core.algorithms.base.WorkerAlgorithm.state` has it.
        buffers: as :meth:`afl.core.model.buffers.ModuleBuffers.contents` has them.
        private_steps: that have been taken from the worker's records, where they are accounted for.
        private_terms: what each of them cost by.
    """

    kind: Kind
    report: Report
    payloads: tuple[Payload, ...]
    state: Mapping[str, NDArray[Any]]
    buffers: Mapping[str, NDArray[np.uint8]]
    private_steps: int = 0
    private_terms: Mapping[str, float] = field(default_factory=dict)


class ReportJournal(Protocol):
    """Keeps what :class:`Participant` must not lose."""

    def write(self, kept: Kept) -> None:
        """Make a report, its payloads and the residual durable, before the report is sent."""
        ...


EPOCH_BYTES = 8

NO_HISTORY = bytes(EPOCH_BYTES)
"""Of a report that was made without masks, or by a version that kept none: that of no epoch."""


def epoch_of(history: bytes) -> int:
    """The epoch of keys that a report's history is of; 0 if it has none."""
    return int.from_bytes(history[:EPOCH_BYTES], "big")


_TRAINED = frozenset({Role.UPDATE, Role.ITERATE, Role.SNAPSHOT})

Answer = tuple[Report, list[Payload]]


class Participant:
    """One process's workers, over one copy of the model.

    Attributes:
        applied: the position of the last step applied to the model.

    Args:
        journal: keeps each training report before it is yielded.
        accounts: of the workers' records, where their privacy is accounted for.
        run: what the run is, as this process was told it, in a digest that is part of masked reports'
            histories; empty where nothing is masked.
        skips_non_finite: answer a step that gives a number that is not finite with a report that says so,
            rather than to raise; the worker's residual and the model are as before it.
    """

    def __init__(
        self,
        vector: ParameterVector,
        side: WorkerSide,
        oracle: Oracle,
        workers: Sequence[int],
        *,
        journal: ReportJournal | None = None,
        accounts: Mapping[int, Account] | None = None,
        run: bytes = b"",
        skips_non_finite: bool = False,
    ) -> None:
        self.vector = vector
        self.accounts = accounts or {}
        self._journal = journal
        self._resumed: Mapping[int, Kept] = {}
        """What another process left, by worker, until the next training step is answered."""
        self._buffers_averaged: Position = NOWHERE
        self.workers = tuple(workers)
        self.applied: Position = NOWHERE
        self._side = side
        self._oracle = oracle
        self._models = {worker: _WorkerModel(worker, vector, oracle) for worker in workers}
        self._run = run
        self._histories: dict[int, bytes] = {}
        self._skips_non_finite = skips_non_finite
        self._held: dict[int, tuple[Kind, Answer]] = {}

    def reported(self, worker: int) -> Position:
        """The last position the worker has made a report for."""
        held = self._held.get(worker)
        return held[1][0].position if held else NOWHERE

    def held(self, worker: int, position: Position) -> tuple[Kind, Answer] | None:
        """The worker's report for ``position``, if it has made one: it is sent again as it is."""
        return self._held[worker] if self.reported(worker) == position else None

    def take(self, committed: CommittedStep) -> Iterator[tuple[Kind, Answer]]:
        """Apply a committed step, then answer it for each worker in ascending order.

        A step that was applied before (it came again after a cut) moves nothing; a report that was made
        before is yielded again, not made anew.

        Raises:
            ProtocolError: if the step does not follow from where the model is.
            NonFiniteError: if a loss or gradient is not finite and that is not skipped; nothing of it was
                sent or kept.
        """
        step = committed.step
        if step.kind is Kind.MODEL:
            self._install(committed)
            return
        if step.position > self.applied:
            self._apply(committed)
        elif step.position < self.applied:
            raise ProtocolError(
                f"the server sent round {step.position.round}, phase {step.position.phase} after "
                f"round {self.applied.round}, phase {self.applied.phase}"
            )
        is_bound = step.kind is Kind.EVALUATE or (step.kind is Kind.TRAIN and self._run)
        digest = self._digest() if is_bound else b""
        asked = frozenset(self.workers) if committed.participants is None else committed.participants
        for worker in self.workers:
            if worker not in asked and self.reported(worker) < step.position:
                # A process that owes a report is sent no other step: that one was closed with it.
                self.forget(worker)
        # Also those that have reported: what is computed together has other bits among fewer.
        self._oracle.announce(
            [worker for worker in self.workers if worker in asked or self.reported(worker) == step.position]
        )
        for worker in self.workers:
            if worker not in asked:
                continue
            if self.reported(worker) != step.position:
                answer = self._finite_answer(worker, committed, digest)
                if self._run:
                    answer = self._bound(answer, committed, digest)
                    self._histories[worker] = answer[0].history
                self._keep(worker, step.kind, answer)
                self._held[worker] = (step.kind, answer)
            yield self._held[worker]
        if step.kind is Kind.TRAIN:
            # One call for all workers' gradients has moved also the buffers of those that had reported.
            self._restore_buffers(lambda reported: reported == step.position)
            self._resumed = {}

    def keep_to(self, epoch: int) -> list[int]:
        """Under masks: forget what steps under other keys have left, since a server could have shown each
        worker something else in them; the workers that have forgotten something."""
        name = epoch.to_bytes(EPOCH_BYTES, "big")
        lost = [worker for worker, history in self._histories.items() if not history.startswith(name)]
        for worker in lost:
            self._side.halves[worker].begin_anew()
            self.vector.buffers.begin_anew(worker)
            self.forget(worker)
            del self._histories[worker]
        self._resumed = {worker: entry for worker, entry in self._resumed.items() if worker not in lost}
        self._histories = dict.fromkeys(self.workers, name) | self._histories
        return lost

    @property
    def companions(self) -> Sequence[Companion]:
        """What goes with the model."""
        return tuple(self._side.companions.values())

    def _digest(self) -> bytes:
        return self.vector.digest(*(companion.content() for companion in self.companions))

    def resume(self, kept: Mapping[int, Kept], buffers_averaged: Position) -> None:
        """Go on where another process of these workers was; before the first step.

        Args:
            kept: by worker.
            buffers_averaged: where the workers' buffers were last replaced by their mean.
        """
        assert self.applied == NOWHERE
        self._resumed, self._buffers_averaged = kept, buffers_averaged
        for worker, entry in kept.items():
            self._histories[worker] = entry.report.history or NO_HISTORY
            self._held[worker] = (entry.kind, (entry.report, list(entry.payloads)))
            self._side.halves[worker].restore(entry.state)
            if worker in self.accounts:
                self.accounts[worker].resume(entry.private_steps, entry.private_terms)

    def _restore_buffers(self, of: Callable[[Position], bool]) -> None:
        for worker, entry in self._resumed.items():
            if of(entry.report.position):
                self.vector.buffers.restore(worker, entry.buffers)

    def _keep(self, worker: int, kind: Kind, answer: Answer) -> None:
        report, payloads = answer
        account = self.accounts.get(worker)
        # What was sent under a mask, or with noise, must be sent again as it was, also of an evaluation.
        is_noised = account is not None and account.privacy.metric_noise is not None
        if self._journal is None or not (
            kind is Kind.TRAIN or (kind is Kind.EVALUATE and (payloads or is_noised))
        ):
            return
        self._journal.write(
            Kept(
                kind,
                report,
                tuple(payloads),
                self._side.halves[worker].state(),
                self.vector.buffers.contents(worker),
                *((account.steps, account.kept_terms) if account else ()),
            )
        )

    def late(self, worker: int, position: Position) -> bool:
        """The worker's report for ``position`` came too late to count: what it carried goes back into the
        residual, once; whether there was such a report.

        Raises:
            NonFiniteError: if the residual leaves float32's range; it is as before.
        """
        held = self.held(worker, position)
        if held is None:
            return False
        kind, (report, payloads) = held
        if not kind.is_of_evaluation:
            self._side.halves[worker].put_back(report, payloads)
        self.forget(worker)
        return True

    def counted(self, worker: int, position: Position) -> None:
        """The worker's report for ``position`` is in a step that is closed for good."""
        if self.held(worker, position) is not None:
            self.forget(worker)

    def forget(self, worker: int) -> None:
        """The worker's last report will not be asked for again: free its memory."""
        self._held.pop(worker, None)

    def prepare(self, synchronization: int) -> None:
        """Draw a coming round's randomness, off the critical path."""
        self._side.prepare(synchronization)

    def _install(self, committed: CommittedStep) -> None:
        lengths = {
            Role.MODEL: 4 * self.vector.dim,
            Role.FROZEN: self.vector.frozen_length,
            Role.BUFFERS: 4 * self.vector.buffers.size,
            **{role: companion.nbytes for role, companion in self._side.companions.items()},
        }
        payloads = {
            header.role: data
            for header, data in zip(committed.step.payloads, committed.payloads, strict=True)
        }
        wrong = [role for role, data in payloads.items() if len(data) != lengths.get(role)]
        needed = {Role.MODEL, *self._side.companions}
        if wrong or not needed <= payloads.keys():
            raise ProtocolError(
                f"a model of {', '.join(f'{len(data)} bytes' for data in payloads.values())}; this one has "
                f"{lengths[Role.MODEL]} bytes, {lengths[Role.FROZEN]} of frozen parameters and "
                f"{lengths[Role.BUFFERS]} of buffers"
            )
        self.vector.load(np.frombuffer(payloads[Role.MODEL], dtype="<f4").astype(np.float32, copy=False))
        for role, companion in self._side.companions.items():
            companion.load(payloads[role])
        if Role.FROZEN in payloads:
            self.vector.load_frozen(bytes(payloads[Role.FROZEN]))
        # A process that has trained since the last mean keeps the statistics that it has gathered.
        is_first = self.applied == NOWHERE
        is_at_mean = is_first or self.applied.phase == EVALUATION_PHASE
        if is_first:
            # The mean that comes over them leaves what no mean is taken of, such as counts.
            self._restore_buffers(lambda reported: reported <= self._buffers_averaged)
        if Role.BUFFERS in payloads and is_at_mean:
            self.vector.buffers.load(values_of(payloads[Role.BUFFERS]))
        if is_first:
            self._restore_buffers(lambda reported: reported > self._buffers_averaged)
        position = committed.step.position
        for worker in self.workers:
            if self.reported(worker) > position:
                # The server was put back to an older state: that report is not one of this run any more.
                self.forget(worker)
        # The model of a position holds its update already: the step itself, when it comes, moves nothing.
        self.applied = committed.step.position

    def _apply(self, committed: CommittedStep) -> None:
        step = committed.step
        for header, data in zip(step.payloads, committed.payloads, strict=True):
            if header.role is Role.BUFFERS and step.kind is Kind.EVALUATE:
                check_header(header, buffers_header(self.vector.buffers.size))
                self.vector.buffers.load(values_of(data))
                continue
            if header.role not in _TRAINED:
                raise ProtocolError(f"a {step.kind.name} step with a {header.role.name} payload")
            self._side.replica.apply(step.position, self.vector.values, header, data)
        if step.payloads:
            self.vector.publish()
        self.applied = step.position

    def _norms_by_tensor(self, residual: Tensor | None) -> tuple[float, ...]:
        """Where messages are integers: on a grid that is too coarse for a tensor, its part alone grows."""
        if residual is None or self._side.grid is None:
            return ()
        return tuple(map(norm, torch.split(residual, list(self.vector.tensors))))

    def _finite_answer(self, worker: int, committed: CommittedStep, digest: bytes) -> Answer:
        try:
            return self._answer(worker, committed, digest)
        except NonFiniteError as error:
            if not self._skips_non_finite:
                raise
            return Report(worker, committed.step.position, 0.0, 0, missing=str(error)), []

    def _answer(self, worker: int, committed: CommittedStep, digest: bytes) -> Answer:
        position = committed.step.position
        if committed.step.kind is Kind.EVALUATE:
            metrics, examples = self._oracle.evaluate(worker)
            for name, value in metrics.items():
                if not np.isfinite(value):
                    raise NonFiniteError(f"the metric {name} is {value} on the test data")
            if self._side.hides_losses:
                payload = metrics_payload(metrics)
                names = dict.fromkeys(metrics, 0.0)
                told = Report(worker, position, 0.0, 1, (payload.header,), names, model_digest=digest)
                return told, [payload]
            residual = self._side.halves[worker].residual
            report = Report(
                worker,
                position,
                metrics["loss"],
                examples,
                metrics=metrics,
                model_digest=digest,
                residual_norm=0.0 if residual is None or self._side.hides_norms else norm(residual),
                tensor_residual_norms=() if self._side.hides_norms else self._norms_by_tensor(residual),
            )
            return report, []
        if committed.step.kind is Kind.BUFFERS:
            payload = model_payload(self.vector.buffers.finite_values(worker), Role.BUFFERS)
            return Report(worker, position, 0.0, 0, (payload.header,)), [payload]
        half, model = self._side.halves[worker], self._models[worker]
        if committed.step.kind is Kind.LOSS:
            return half.measure(position, model)
        weight = committed.dual_weights.get(worker) if half.takes_weight else 1.0
        if weight is None:
            raise ProtocolError(f"a training step without a dual weight for worker {worker}")
        return half.train(position, weight, model)

    def _bound(self, answer: Answer, committed: CommittedStep, digest: bytes) -> Answer:
        report, payloads = answer
        history = self._histories[report.worker]
        if not payloads:
            return replace(report, history=history), payloads
        # With losses hidden, what all workers divide their own weights by.
        total = committed.dual_weights.get(report.worker, 0.0) if self._side.hides_losses else 0.0
        step = struct.pack("<QBBd", *report.position, committed.step.kind, total)
        content = hashlib.sha256(history + self._run + step + digest).digest()
        return replace(report, history=history[:EPOCH_BYTES] + content), payloads
