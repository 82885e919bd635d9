"""What FedAvg and DRFA share: local steps at the workers, and means of whole models at the server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import (
    LocalModel,
    LocalSteps,
    LocalUpdate,
    Replica,
    WorkerAlgorithm,
    WorkerSide,
    finite_gradient,
)
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.payload import check_header
from afl.core.codecs.plain import DENSE, values_of
from afl.core.messages import Payload, PayloadHeader, Position, Report, Role
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.sums import ValueSum
from afl.core.vectors import is_finite, overwrite, scale
from afl.errors import NonFiniteError


def model_header(dim: int, role: Role = Role.ITERATE) -> PayloadHeader:
    """A whole model's header."""
    return DENSE.header(dim, dim, role)


def model_payload(values: NDArray[np.float32], role: Role = Role.ITERATE) -> Payload:
    """A whole model, which shares memory with ``values``, float32 ``[dim]``."""
    return DENSE.whole(values, role, len(values))


class ModelMean(ValueSum):
    """The weighted mean of the participants' models, or of other vectors of float32.

    Args:
        dim: d.
    """

    def __init__(self, dim: int, participants: Sequence[int]) -> None:
        super().__init__(DENSE, dim, participants)

    def mean(self, total_weight: float, where: str, of: str = "models") -> NDArray[np.float32]:
        """The sum divided by the total weight, rounded to float32; the sum's memory.

        Raises:
            NonFiniteError: if the sum left float32's range.
        """
        total = self.checked(where, of)
        if total_weight != 1.0:
            np.divide(total, np.float32(total_weight), out=total)
        return total


class IterateReplica(Replica):
    """A copy of the model that is replaced by each model the server sends."""

    def apply(self, position: Position, params: Tensor, header: PayloadHeader, data: memoryview) -> None:  # noqa: ARG002
        """``w <- the payload``."""
        role = Role.SNAPSHOT if header.role is Role.SNAPSHOT else Role.ITERATE
        check_header(header, model_header(len(params), role))
        overwrite(params, values_of(data))


def snapshot_offset(randomness: SharedRandomness, synchronization: int, steps: int) -> int:
    """After how many local steps (1 to ``steps``) the snapshot t' is taken, the same at all workers."""
    return 1 + randomness.stream(Purpose.SNAPSHOT, synchronization).integer(steps)


class LocalSgdWorker(WorkerAlgorithm):
    """tau steps of SGD from the server's model, on the worker's own minibatches.

    A model that comes too late to count is dropped: it was made from an old model of the server, and there
    is no residual to put it into.

    Args:
        snapshots: the run's randomness if the model at t' is sent too (DRFA).
    """

    takes_weight = False

    def __init__(
        self, worker: int, settings: AlgorithmSettings, snapshots: SharedRandomness | None = None
    ) -> None:
        super().__init__(worker)
        self._settings = settings
        self._snapshots = snapshots

    def train(
        self,
        position: Position,
        weight: float,  # noqa: ARG002  # the server weighs
        model: LocalModel,
    ) -> tuple[Report, list[Payload]]:
        """The model after the steps, and at t'.

        The loss reported is the mean over the local steps' minibatches.
        """
        settings, updates = self._settings, self._settings.updates_of(position.round)
        snapshot_at = 0
        if self._snapshots is not None:
            snapshot_at = snapshot_offset(self._snapshots, position.round, len(updates))
        etas = tuple(settings.eta_w_of(update) for update in updates)
        made = model.local_steps(LocalSteps(updates, etas, settings.weight_decay, snapshot_at))
        payloads = [model_payload(made.end)]
        if made.snapshot is not None:
            payloads.append(model_payload(made.snapshot, Role.SNAPSHOT))
        report = Report(
            self.worker,
            position,
            made.loss,
            made.examples,
            tuple(payload.header for payload in payloads),
            weight=float(model.train_examples) if self._settings.weigh_by_samples else 0.0,
        )
        return report, payloads


LEFT_RANGE = "the model left float32's range in the local steps"


def step_by_step(model: LocalModel, steps: LocalSteps) -> LocalUpdate:
    """:meth:`LocalModel.local_steps` by one gradient after the other, each where the last led."""
    start = model.params.clone()
    snapshot: NDArray[np.float32] | None = None
    losses, examples = 0.0, 0
    try:
        for taken, (update, eta) in enumerate(zip(steps.updates, steps.etas, strict=True), start=1):
            loss, size, step = finite_gradient(model, update, eta)
            losses, examples = losses + loss * size, examples + size
            if steps.weight_decay:
                scale(model.params, 1.0 - eta * steps.weight_decay, out=model.params)
            model.params.sub_(step)
            model.publish()
            if taken == steps.snapshot_at:
                snapshot = _copied(model.params)
        if not is_finite(model.params):
            raise NonFiniteError(LEFT_RANGE)
        return LocalUpdate(losses / examples, examples, _copied(model.params), snapshot)
    finally:
        model.params.copy_(start)
        model.publish()


def _copied(params: Tensor) -> NDArray[np.float32]:
    copied: NDArray[np.float32] = params.detach().cpu().numpy().copy()
    return copied


def local_sgd_side(
    settings: AlgorithmSettings, workers: Sequence[int], snapshots: SharedRandomness | None
) -> WorkerSide:
    """What a process runs for its workers; ``snapshots`` as :class:`LocalSgdWorker` takes it."""

    def offset_of_first() -> bytes:
        steps = len(settings.updates_of(1))
        return b"" if snapshots is None else snapshot_offset(snapshots, 1, steps).to_bytes(8, "little")

    halves = {worker: LocalSgdWorker(worker, settings, snapshots) for worker in workers}
    return WorkerSide(IterateReplica(), halves, digest_material=offset_of_first)
