"""FedAvg (McMahan et al. 2017): the mean of the workers' models after tau local steps.

With ``optimizer`` or ``server_eta``, the server takes ``D = w - mean``, the mean of the local changes, for a
gradient and steps along it (FedOpt: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2),
as :mod:`afl.core.algorithms.optimizers` has it: Adam with its bias correction, which theirs has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import Arrays, ServerAlgorithm
from afl.core.algorithms.local_sgd import ModelMean, model_header, model_payload
from afl.core.algorithms.optimizers import create_optimizer
from afl.core.algorithms.schedule import CONSTANT
from afl.core.algorithms.settings import AlgorithmSettings, OptimizerChoice
from afl.core.codecs.plain import values_of
from afl.core.compressors.base import Compressed
from afl.core.compressors.identity import IDENTITY
from afl.core.messages import Payload, PayloadHeader, Position, Report
from afl.core.sums import Sum
from afl.core.vectors import is_finite, overwrite
from afl.errors import NonFiniteError, ProtocolError

LARGEST_WEIGHT = float(1 << 53)
"""The largest number of examples that a double counts exactly."""


class FedAvgServer(ServerAlgorithm):
    """``mean = sum_i a_i w_i / sum_i a_i``, with ``a_i = 1`` or worker i's number of training examples; then
    ``w <- mean``, or a step of the server's optimizer along ``w - mean``."""

    sends_dual_weights = False
    reports_bring_weights = True

    def __init__(self, settings: AlgorithmSettings, params: Tensor) -> None:
        self.settings = settings
        self.params = params
        self.round = 1
        self._mean = ModelMean(len(params), range(settings.workers))
        self._weights = [1.0] * settings.workers
        self._absent: frozenset[int] = frozenset()
        self._optimizer = None
        """The server's; ``None`` if the model becomes the mean as it is."""
        if (settings.optimizer, settings.server_eta) != (OptimizerChoice(), 1.0):
            # The schedule and the weight decay are of the workers' steps.
            own = replace(settings, eta_w=settings.server_eta, schedule=CONSTANT, weight_decay=0.0)
            self._optimizer = create_optimizer(own, len(params))
        self._closed_with: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        """The mean of the last round that was closed, as long as its sum's memory is left alone."""

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
        """The mean, or where the server's optimizer leads.

        Raises:
            NonFiniteError: if the sum or the step leaves float32's range.
        """
        total = sum(weight for worker, weight in enumerate(self._weights) if worker not in self._absent)
        mean = self._mean.mean(total, f"round {self.settings.updates_after(self.round)}")
        self._absent = frozenset()
        self._closed_with = mean
        self._pending = self._stepped(mean)
        self.round += 1
        return model_payload(self._pending)

    def _stepped(self, mean: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._optimizer is None:
            return mean
        params = self.params.clone()
        with np.errstate(over="ignore"):
            change = Compressed(params.numpy() - mean)
        self._optimizer.step(self.round, params, IDENTITY, change)
        if not is_finite(params):
            where = f"round {self.settings.updates_after(self.round)}"
            raise NonFiniteError(
                f"{where}: the server's step leaves float32's range; lower algorithm.server_eta"
            )
        stepped: NDArray[np.float32] = params.numpy()
        return stepped

    def settle(self) -> None:
        """The server's own copy; then the sum is free for the next round."""
        if self._pending is None:
            return
        overwrite(self.params, self._pending)
        self._pending = None
        self._mean.restart(self.participants)

    def unsent(self) -> Arrays:
        """The weights of the mean, and the mean itself where the model is another."""
        weights = {"weights": np.array(self._weights)}
        return weights if self._optimizer is None else {**weights, "mean": self._closed_with}

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:  # noqa: ARG002
        """Take the model as it was sent."""
        self._weights = unsent["weights"].tolist()
        self._pending = values_of(payload.data).copy()
        if self._optimizer is not None:
            # For what the optimizer keeps.
            self._stepped(unsent["mean"])
        self.round += 1
        self.settle()

    def state(self) -> Arrays:
        """The weights of the mean, and what the optimizer keeps."""
        kept = None if self._optimizer is None else self._optimizer.state.numpy()
        return {"weights": np.array(self._weights), **({} if kept is None else {"optimizer": kept})}

    def restore(self, state: Arrays, position: Position) -> None:
        """Begin the round at ``position`` with the weights of a :meth:`state`."""
        self.round = position.round
        self._weights = state["weights"].tolist()
        if self._optimizer is not None:
            self._optimizer.state.copy_(torch.from_numpy(state["optimizer"].copy()))

    def digest_material(self) -> bytes:
        """Empty: workers and server draw nothing in common."""
        return b""
