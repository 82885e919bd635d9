"""FedAvg (McMahan et al. 2017): the mean of the workers' models after tau local steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import Arrays, ServerAlgorithm
from afl.core.algorithms.local_sgd import ModelMean, model_header, model_payload
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.plain import values_of
from afl.core.messages import Payload, PayloadHeader, Position, Report
from afl.core.sums import Sum
from afl.core.vectors import overwrite
from afl.errors import ProtocolError

LARGEST_WEIGHT = float(1 << 53)
"""The largest number of examples that a double counts exactly."""


class FedAvgServer(ServerAlgorithm):
    """``w <- sum_i a_i w_i / sum_i a_i``, with ``a_i = 1`` or worker i's number of training examples."""

    sends_dual_weights = False
    reports_bring_weights = True

    def __init__(self, settings: AlgorithmSettings, params: Tensor) -> None:
        self.settings = settings
        self.params = params
        self.round = 1
        self._mean = ModelMean(len(params), range(settings.workers))
        self._weights = [1.0] * settings.workers
        self._absent: frozenset[int] = frozenset()

    @property
    def dual_weights(self) -> NDArray[np.float64]:
        """The weights of the mean, as far as they are known; uniform before."""
        weights = np.array(self._weights)
        normalized: NDArray[np.float64] = weights / weights.sum()
        return normalized

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:  # noqa: ARG002
        """The model after the local steps."""
        return (model_header(len(self.params)),)

    def open_report(self, report: Report) -> None:
        """Set the weight of the worker's model in the mean."""
        self.settle()
        if not self.settings.weigh_by_samples:
            return
        weight = report.weight
        if not (1 <= weight <= LARGEST_WEIGHT and weight.is_integer()):
            raise ProtocolError(
                f"worker {report.worker} reports {weight} training examples; it must be a whole number from 1"
            )
        self._weights[report.worker] = weight
        self._mean.weigh(report.worker, weight)

    @property
    def sums(self) -> Sequence[Sum]:
        """The mean of the models."""
        return (self._mean,)

    def leave_out(self, absent: Sequence[int]) -> None:
        """Leave absent workers out of the mean, and their weights out of its total."""
        super().leave_out(absent)
        self._absent = frozenset(absent)

    def close(self) -> Payload:
        """The mean.

        Raises:
            NonFiniteError: if the sum leaves float32's range.
        """
        total = sum(weight for worker, weight in enumerate(self._weights) if worker not in self._absent)
        mean = self._mean.mean(total, f"round {self.settings.updates_after(self.round)}")
        self._absent = frozenset()
        self._pending = mean
        self.round += 1
        return model_payload(mean)

    def settle(self) -> None:
        """The server's own copy; then the sum is free for the next round."""
        if self._pending is None:
            return
        overwrite(self.params, self._pending)
        self._pending = None
        self._mean.restart(self.participants)

    def unsent(self) -> Arrays:
        """The weights of the mean."""
        return self.state()

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:  # noqa: ARG002
        """Take the mean as it was sent."""
        self._weights = unsent["weights"].tolist()
        self._pending = values_of(payload.data).copy()
        self.round += 1
        self.settle()

    def state(self) -> Arrays:
        """The weights of the mean."""
        return {"weights": np.array(self._weights)}

    def restore(self, state: Arrays, position: Position) -> None:
        """Begin the round at ``position`` with the weights of a :meth:`state`."""
        self.round = position.round
        self._weights = state["weights"].tolist()

    def digest_material(self) -> bytes:
        """Empty: workers and server draw nothing in common."""
        return b""
