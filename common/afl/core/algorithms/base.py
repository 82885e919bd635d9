"""What every algorithm gives the round engine (server) and the participant (worker): pure state machines."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.payload import unpack
from afl.core.grid import Grid, IntegerRound
from afl.core.messages import Payload, PayloadHeader, Position, Report, Role
from afl.core.sums import Sum
from afl.core.vectors import Weighted, is_finite
from afl.errors import NonFiniteError

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Arrays by name, of a state that is written down."""


class Companion(Protocol):
    """What goes with the parameters wherever they are sent, since the rounds to come depend on it too."""

    @property
    def nbytes(self) -> int:
        """The length of :meth:`content`."""
        ...

    def content(self) -> bytes:
        """It as it travels."""
        ...

    def load(self, content: bytes | memoryview) -> None:
        """Go on from a :meth:`content` of :attr:`nbytes`.

        Raises:
            ProtocolError: if it cannot be one.
        """
        ...


class Collector(abc.ABC):
    """What takes the reports of one open step. One call at a time; no call blocks but on arithmetic."""

    @abc.abstractmethod
    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:
        """What a worker's report at ``position`` carries. Index sections are bounded, not fixed:
        ``index_bytes`` is then the most that is accepted."""

    def open_report(self, report: Report) -> None:  # noqa: B027  # most need nothing of it
        """A worker's report has begun; its payloads follow.

        Raises:
            ProtocolError: if its header is not one that can be used.
        """

    @abc.abstractmethod
    def add_loss(self, worker: int, loss: float) -> None:
        """The finite loss of a worker whose report is complete."""

    @abc.abstractmethod
    def received(self, worker: int, payload: int) -> int:
        """Bytes of a worker's payload that are already in the sum and cannot be taken back."""

    @abc.abstractmethod
    def add_piece(self, worker: int, payload: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """The next bytes of a worker's payload, in order, without gaps.

        Raises:
            NonFiniteError: if a value is not finite; nothing of this piece was taken.
            ProtocolError: if the bytes are not what the header says.
        """

    @abc.abstractmethod
    def drop(self, worker: int) -> None:
        """Forget what has come of an unfinished report, as far as it is not in the sum."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget the open phase's sums and losses; all its workers report again."""

    @abc.abstractmethod
    def leave_out(self, absent: Sequence[int]) -> None:
        """Some participants, ascending and not all, have no part in the open phase's sum or mean; called
        before any piece of the phase. A loss that stands for theirs comes by :meth:`add_loss`."""

    @property
    @abc.abstractmethod
    def waiting_bytes(self) -> int:
        """Bytes held for workers whose turn in the sum has not come."""

    @abc.abstractmethod
    def would_wait(self, worker: int) -> bool:
        """Whether a piece of ``worker`` that came now would be held rather than summed."""

    @property
    def is_order_free(self) -> bool:
        """Whether a report that has not come to its end can be left out of what has been added."""
        return False

    @abc.abstractmethod
    def close(self) -> Payload:
        """All participants but those left out have reported: end the phase and make what the next step
        carries.

        The payload's memory stays as it is until the next step's reports come; an algorithm's until
        :meth:`ServerAlgorithm.settle`.

        Raises:
            NonFiniteError: if a result leaves float32's range.
        """

    def unsent(self) -> Arrays:
        """What the last :meth:`close` made that its payload does not show; it may share the collector's
        memory, until the next reports come."""
        return {}

    @abc.abstractmethod
    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:
        """Do what :meth:`close` did, without the reports: from the losses they brought (``[m]``, NaN for a
        worker that was not asked), the payload it returned and what it left :meth:`unsent`."""


class SumCollector(Collector):
    """Adds each payload of a report up, as it comes, in a sum of its own."""

    _pending: Any = None
    """What :meth:`close` made that lies in the sums' memory and that :meth:`settle` has not taken yet."""

    @property
    @abc.abstractmethod
    def sums(self) -> Sequence[Sum]:
        """One for each payload of the open phase's reports."""

    def settle(self) -> None:
        """Take what :meth:`close` made out of the sums' memory, which is then free for the next reports."""

    def add_loss(self, worker: int, loss: float) -> None:
        """Ignore the loss: most algorithms use it only when they close the phase."""

    def received(self, worker: int, payload: int) -> int:
        """Bytes already summed, or held for the sum."""
        return 0 if self._pending is not None else self.sums[payload].received(worker)

    def add_piece(self, worker: int, payload: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """Fold the next bytes."""
        self.settle()
        self.sums[payload].add(worker, header, data)

    def drop(self, worker: int) -> None:
        """Forget an unfinished report, as far as it is not in a sum."""
        for total in self.sums:
            total.drop(worker)

    def reset(self) -> None:
        """Begin the open phase's sums again."""
        self.settle()
        for total in self.sums:
            total.reset()

    def leave_out(self, absent: Sequence[int]) -> None:
        """Leave the absent workers' payloads out of all sums."""
        self.settle()
        for total in self.sums:
            total.leave_out(absent)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the sums hold until their workers' turn comes."""
        return sum(total.waiting_bytes for total in self.sums)

    @property
    def is_order_free(self) -> bool:
        """Whether all sums are."""
        return all(total.is_order_free for total in self.sums)

    def would_wait(self, worker: int) -> bool:
        """Whether a worker before this one is still missing in the sum of its next payload."""
        for total in self.sums:
            if not total.is_complete(worker):
                return total.would_wait(worker)
        return False


class ServerAlgorithm(SumCollector):
    """The server's half. The engine drives it: reports in, then :meth:`close` at the end of a phase.

    A synchronization round has one phase or more; in the first the workers train, in the others they
    compute losses.

    Attributes:
        settings: the run's.
        params: the server's own model, float32 ``[dim]`` on the CPU; moved in place by :meth:`settle`.
        integers: of the last closed round; ``None`` where values are float32, or before the first.
    """

    phases: ClassVar[int] = 1
    """How many exchanges a synchronization round has."""

    sends_dual_weights: ClassVar[bool] = True
    """Whether a worker is told its dual weight."""

    reports_bring_weights: ClassVar[bool] = False
    """Whether a round's weights are known from its reports only: :attr:`dual_weights` has them once it is
    closed."""

    settings: AlgorithmSettings
    params: Tensor
    grid: Grid | None = None
    """Of integer messages, as :attr:`params` have it; ``None`` where there are none."""

    companions: Mapping[Role, Companion] = MappingProxyType({})
    """What goes with :attr:`params`, by the role of its payload; :meth:`settle` comes first."""

    integers: IntegerRound | None = None

    undrawn: frozenset[int] = frozenset()
    """Workers that no phase to come asks, where only some are drawn; set before a phase is closed."""

    @property
    def keeps_residuals(self) -> bool:
        """Whether a worker's process holds what a new one cannot make again: its uplink residual."""
        return False

    @property
    def residual_norm(self) -> float | None:
        """The Euclidean norm of what the server has yet to send; ``None`` where it keeps nothing.
        :meth:`settle` comes first; it takes a pass over the vector."""
        return None

    @property
    def participants(self) -> Sequence[int]:
        """The workers that the open phase waits for, ascending."""
        return range(self.settings.workers)

    @property
    def worker_params(self) -> Tensor:
        """What a worker's model holds in the open phase, float32 ``[dim]``; :meth:`settle` comes first."""
        return self.params

    def update_norm(self, header: PayloadHeader, data: bytes | bytearray) -> float:
        """The Euclidean norm of the update in a worker's payload, whose first one it is; by default of its
        values."""
        return float(np.linalg.norm(unpack(header, data).values.astype(np.float64)))

    def streamed_header(self) -> PayloadHeader | None:
        """The downlink payload's header if it can be sent while the uplink still comes, else ``None``."""
        return None

    def streamed(self) -> memoryview:
        """The bytes of the downlink payload that are final so far (its beginning)."""
        raise AssertionError("an algorithm without a streamed header streams nothing")

    @abc.abstractmethod
    def settle(self) -> None:
        """Move the server's own model by what :meth:`close` made; idempotent. Off the critical path."""

    @property
    @abc.abstractmethod
    def dual_weights(self) -> NDArray[np.float64]:
        """q for the open round, ``[m]``."""

    @property
    def told_weights(self) -> NDArray[np.float64]:
        """What each worker is told of it in the open round, ``[m]``: its own weight, or what that follows
        from."""
        return self.dual_weights

    @property
    def mean_loss(self) -> float | None:
        """Of the last closed round, where the workers' own losses are not told."""
        return None

    @abc.abstractmethod
    def state(self) -> Arrays:
        """Everything but the parameters that the open phase begins with; :meth:`settle` comes first."""

    @abc.abstractmethod
    def restore(self, state: Arrays, position: Position) -> None:
        """Begin the phase at ``position`` with a :meth:`state`; the parameters have been put back."""

    @abc.abstractmethod
    def digest_material(self) -> bytes:
        """What a worker must draw as the server does, in round 1; compared at the handshake."""


class Replica(abc.ABC):
    """A copy of the model that follows the run by what the server broadcasts."""

    @abc.abstractmethod
    def apply(self, position: Position, params: Tensor, header: PayloadHeader, data: memoryview) -> None:
        """Move ``params`` (float32 ``[dim]``) by the payload of the step at ``position``.

        Raises:
            ProtocolError: if the payload is not what the algorithm sends.
        """


@dataclass(frozen=True)
class LocalSteps:
    """Steps of SGD from the model as it is: ``w <- (1 - eta lambda) w``, then ``w <- w - eta g``.

    Attributes:
        updates: the update round of each, 1-based, which says its minibatch.
        etas: the step size of each.
        weight_decay: lambda.
        snapshot_at: after how many of them the model is noted too; 0 for never.
    """

    updates: Sequence[int]
    etas: Sequence[float]
    weight_decay: float = 0.0
    snapshot_at: int = 0


@dataclass(frozen=True)
class LocalUpdate:
    """What local steps made.

    Attributes:
        loss: the mean over all their minibatches' examples.
        examples: how many those are.
        end: the model after them, float32 ``[dim]`` on the host.
        snapshot: the model after ``snapshot_at`` of them.
    """

    loss: float
    examples: int
    end: NDArray[np.float32]
    snapshot: NDArray[np.float32] | None = None


class LocalModel(Protocol):
    """A worker's model and data, as a training step sees them."""

    @property
    def params(self) -> Tensor:
        """The model, float32 ``[dim]``; what is changed in it counts after :meth:`publish`."""
        ...

    @property
    def train_examples(self) -> int:
        """How many training examples the worker has."""
        ...

    def publish(self) -> None:
        """Make the module compute with :attr:`params`."""
        ...

    def gradient(self, update: int, scale: float) -> tuple[float, int, Tensor]:
        """The loss on the minibatch of an update round (1-based), its size, and ``scale`` times the
        gradient: float32 ``[dim]``, free to change, and valid until the next call."""
        ...

    def weighted_gradient(self, update: int, scale: float) -> tuple[float, int, Weighted]:
        """The same, as autograd leaves it: to be computed where it is to go, which saves a pass over it."""
        ...

    def local_steps(self, steps: LocalSteps) -> LocalUpdate:
        """Take these steps; the model is then as before.

        Raises:
            NonFiniteError: if a loss or gradient is not finite, or the model leaves float32's range.
        """
        ...

    def loss(self, synchronization: int) -> tuple[float, int]:
        """The loss on a minibatch drawn for that alone, and its size."""
        ...


class WorkerAlgorithm(abc.ABC):
    """One worker's half."""

    takes_weight: ClassVar[bool] = True
    """Whether training needs the worker's dual weight."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    @abc.abstractmethod
    def train(self, position: Position, weight: float, model: LocalModel) -> tuple[Report, list[Payload]]:
        """The answer to a training step.

        Args:
            weight: this worker's dual weight; 1 if it takes none.

        Raises:
            NonFiniteError: if a loss or gradient is not finite, or a result leaves float32's range; the
                model is as before, and so is the residual.
        """

    @property
    def residual(self) -> Tensor | None:
        """What the worker has yet to send, float32 ``[dim]``; ``None`` where nothing is kept."""
        return None

    def state(self) -> Arrays:
        """What a worker must not lose, after each training report: :attr:`residual` by its name, if there is
        one. It may share the worker's memory."""
        residual = self.residual
        return {} if residual is None else {"residual": residual.cpu().numpy()}

    def restore(self, state: Arrays) -> None:
        """Continue with a :meth:`state`."""
        assert not state, "a worker that keeps nothing is given something"

    def begin_anew(self) -> None:
        """Forget what earlier steps have left: all of :meth:`state`."""
        assert not self.state(), "a worker that keeps something, and does not say how it is forgotten"

    def put_back(self, report: Report, payloads: Sequence[Payload]) -> None:  # noqa: B027  # most cannot
        """The worker's own report came too late to count: make what it carried part of what is still to be
        sent, where the algorithm keeps such a thing; else it is dropped.

        Raises:
            NonFiniteError: if the result leaves float32's range; the residual is as before.
        """

    def measure(self, position: Position, model: LocalModel) -> tuple[Report, list[Payload]]:
        """The answer to a step that asks for a loss at the model as it is.

        Raises:
            NonFiniteError: if the loss is not finite.
        """
        loss, examples = model.loss(position.round)
        return Report(self.worker, position, finite_loss(loss), examples), []


def _nothing(_: int) -> None:
    pass


class WorkerSide:
    """What a worker process runs: a replica for its one model copy, and a half for each hosted worker.

    Attributes:
        prepare: draws a coming synchronization's randomness, off the critical path.
        grid: of integer messages, as this process's model has it; ``None`` where there are none.
        companions: as :attr:`ServerAlgorithm.companions`, of this process's model.
        digest_material: as :meth:`ServerAlgorithm.digest_material`.
        hides_losses: whether metrics are told as numbers to be added up only.
        hides_norms: whether the norms of residuals are not told.
    """

    def __init__(
        self,
        replica: Replica,
        halves: Mapping[int, WorkerAlgorithm],
        prepare: Callable[[int], None] = _nothing,
        digest_material: Callable[[], bytes] = bytes,
        grid: Grid | None = None,
        *,
        companions: Mapping[Role, Companion] = MappingProxyType({}),
        hides_losses: bool = False,
        hides_norms: bool = False,
    ) -> None:
        self.replica = replica
        self.halves = halves
        self.prepare = prepare
        self.digest_material = digest_material
        self.grid = grid
        self.companions = companions
        self.hides_losses = hides_losses
        self.hides_norms = hides_norms


def finite_loss(loss: float) -> float:
    """The loss.

    Raises:
        NonFiniteError: if it is not finite.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss is {loss}")
    return loss


NOT_FINITE = "the gradient has an element that is not finite"


def finite_gradient(model: LocalModel, update: int, scale: float) -> tuple[float, int, Tensor]:
    """The loss, minibatch size and scaled gradient of an update round.

    Raises:
        NonFiniteError: if the loss or an element of the scaled gradient is not finite.
    """
    loss, examples, gradient = model.gradient(update, scale)
    finite_loss(loss)
    if not is_finite(gradient):
        raise NonFiniteError(NOT_FINITE)
    return loss, examples, gradient
