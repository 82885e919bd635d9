"""DRFA (Deng et al. 2020), in the paper's full-participation variant (appendix D.1) and with sampling.

Synchronization s, with tau local steps and dual weights q:

1. phase 0: worker i takes tau SGD steps from w_s, and sends its model at the end and its model at t', one
   step drawn uniformly for all (shared randomness);
2. server: ``w_{s+1} = sum_i q_i w_i(end)`` and ``w' = sum_i q_i w_i(t')``;
3. phase 1: the server broadcasts w', worker i sends its loss l_i on a minibatch there;
4. server: ``q <- Pi(q + tau eta_q l)``; it broadcasts w_{s+1}.

With sampling, phase 0 asks b workers drawn from q with replacement, whose models are averaged (each as
often as it was drawn), and phase 1 asks b workers drawn uniformly without replacement, whose losses are
scaled by m/b (the 1/p of appendix B.3); the others' count as zero.

Where a step may close without some of its workers, phase 0's means are over the present, with their weights
scaled to sum to what all would have; if those weights are all zero, w_{s+1} and w' are w_s. Workers in
quarantine are not drawn: phase 0 draws from q of the others, as if they had it all (evenly, if they have
none), and phase 1 among the others, whose losses are scaled by their number/b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import Arrays, ServerAlgorithm
from afl.core.algorithms.local_sgd import ModelMean, model_header, model_payload, snapshot_offset
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.plain import values_of
from afl.core.dual import ProjectedAscent
from afl.core.messages import Payload, PayloadHeader, Position, Report, Role
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.sums import Sum
from afl.core.vectors import overwrite

TRAINING, MEASURING = 0, 1


class DrfaServer(ServerAlgorithm):
    """DRFA on the server: means of models in phase 0, a dual step by losses in phase 1."""

    phases = 2
    sends_dual_weights = False

    def __init__(self, settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness) -> None:
        self.settings = settings
        self.params = params
        self.round = 1
        self.phase = TRAINING
        self.dual = ProjectedAscent(settings.workers, settings.eta_q)
        self._randomness = randomness
        self._participants: Sequence[int] = range(settings.workers)
        self._weights: NDArray[np.float64] = self.dual.weights
        self._total = 1.0
        self._among = settings.workers
        """How many workers the open phase's were drawn from."""
        self._draw_trainers()
        self._end = ModelMean(len(params), self._participants)
        self._snapshot = ModelMean(len(params), self._participants)
        self._snapshot_values: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._losses: dict[int, float] = {}

    @property
    def participants(self) -> Sequence[int]:
        """All workers; with sampling those drawn for the phase."""
        return self._participants

    @property
    def worker_params(self) -> Tensor:
        """w_s, and w' while losses are measured there."""
        return self.params if self.phase == TRAINING else torch.from_numpy(self._snapshot_values)

    @property
    def dual_weights(self) -> NDArray[np.float64]:
        """q for the open synchronization."""
        return self.dual.weights

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:
        """The model at the end and at t'; then nothing but the loss."""
        if position.phase == MEASURING:
            return ()
        dim = len(self.params)
        return (model_header(dim), model_header(dim, Role.SNAPSHOT))

    def open_report(self, report: Report) -> None:
        """Set the weight of the worker's models in both means."""
        self.settle()
        if self.phase == TRAINING:
            weight = float(self._weights[report.worker])
            self._end.weigh(report.worker, weight)
            self._snapshot.weigh(report.worker, weight)

    def add_loss(self, worker: int, loss: float) -> None:
        """Record a loss measured at w'; losses of local steps are ignored."""
        if self.phase == MEASURING:
            self._losses[worker] = loss

    @property
    def sums(self) -> Sequence[Sum]:
        """The means of the models at the end and at t'; none while losses are measured."""
        return (self._end, self._snapshot) if self.phase == TRAINING else ()

    def reset(self) -> None:
        """Begin the open phase again."""
        super().reset()
        self._losses.clear()

    def leave_out(self, absent: Sequence[int]) -> None:
        """Scale the others' weights, so that their mean is a mean."""
        super().leave_out(absent)
        if self.phase == MEASURING:
            return
        present = [worker for worker in self._participants if worker not in absent]
        self._total = float(self._weights[present].sum())
        if self.settings.sampled is None and self._total > 0.0:
            # Before the sum: weights that are all tiny would lose their digits in float32.
            self._weights, self._total = self._weights / self._total, 1.0

    def close(self) -> Payload:
        """Step 2 or step 4.

        Raises:
            NonFiniteError: if a sum leaves float32's range.
        """
        return self._close_training() if self.phase == TRAINING else self._close_measuring()

    def settle(self) -> None:
        """Move the server's own model to w_{s+1}."""
        if self._pending is not None:
            overwrite(self.params, self._pending)
            self._pending = None
            self._restart_sums()

    def unsent(self) -> Arrays:
        """w_{s+1}, which workers are sent only after the losses at w'."""
        return {} if self._pending is None else {"end": self._pending}

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:
        """Step 2 or step 4."""
        if self.phase == TRAINING:
            self._measure(unsent["end"], values_of(payload.data).copy())
            self.settle()
        else:
            self._losses = {worker: float(losses[worker]) for worker in self._participants}
            self._close_measuring()

    def state(self) -> Arrays:
        """q and, while losses are measured there, w'."""
        assert self._pending is None
        state: dict[str, NDArray[Any]] = {**self.dual.state(), "snapshot": self._snapshot_values}
        if self.undrawn:
            state["undrawn"] = np.array(sorted(self.undrawn))
        return state

    def restore(self, state: Arrays, position: Position) -> None:
        """Begin a phase of synchronization s."""
        self.round, self.phase = position.round, position.phase
        self.dual.restore(state)
        self._snapshot_values = state["snapshot"].copy()
        self.undrawn = frozenset(state["undrawn"].tolist() if "undrawn" in state else ())
        if self.phase == TRAINING:
            self._draw_trainers()
            self._restart_sums()
        else:
            self._draw_measurers()

    def digest_material(self) -> bytes:
        """t' of the first synchronization, as 8 bytes."""
        steps = len(self.settings.updates_of(1))
        return snapshot_offset(self._randomness, 1, steps).to_bytes(8, "little")

    def _close_training(self) -> Payload:
        where = f"synchronization {self.round}"
        if self._total == 0.0:
            # No present worker has any weight.
            self._measure(self.params.numpy().copy(), self.params.numpy().copy())
        else:
            end = self._end.mean(self._total, where)
            self._measure(end, self._snapshot.mean(self._total, where))
        return model_payload(self._snapshot_values, Role.SNAPSHOT)

    def _measure(self, end: NDArray[np.float32], snapshot: NDArray[np.float32]) -> None:
        # The sum's memory begins anew with the next sum; the snapshot stays as long as losses are measured.
        self._snapshot_values = snapshot
        self._pending = end
        self.phase = MEASURING
        self._draw_measurers()

    def _close_measuring(self) -> Payload:
        self.settle()
        workers = self.settings.workers
        losses = np.zeros(workers)
        for worker, loss in self._losses.items():
            losses[worker] = loss
        self._losses.clear()
        updates, share = self.settings.updates_of(self.round), self._among / len(self._participants)
        self.dual.factor = len(updates) * share * self.settings.eta_q_factor(updates[-1])
        self.dual.update(self.round, losses)
        self._snapshot_values = np.zeros(0, dtype=np.float32)
        self.round += 1
        self.phase = TRAINING
        self._draw_trainers()
        self._restart_sums()
        return model_payload(self.params.numpy())

    def _restart_sums(self) -> None:
        self._end.restart(self._participants)
        self._snapshot.restart(self._participants)

    def _draw_trainers(self) -> None:
        """Draw the workers that train, and how much each one's models count."""
        settings = self.settings
        if settings.sampled is None:
            self._participants, self._weights = range(settings.workers), self.dual.weights
            self._total = 1.0
            return
        uniform = self._randomness.stream(Purpose.MODEL_SAMPLING, self.round).uniform(settings.sampled)
        eligible = self._eligible()
        bounds = np.cumsum(self.dual.weights[eligible])
        if bounds[-1] == 0.0:
            bounds = np.arange(1.0, len(eligible) + 1)
        drawn = np.searchsorted(bounds, uniform * bounds[-1], side="right")
        drawn = eligible[np.minimum(drawn, len(eligible) - 1)]
        counts = np.bincount(drawn, minlength=settings.workers)
        self._weights = counts.astype(np.float64)
        self._total = float(settings.sampled)
        self._participants = tuple(np.flatnonzero(counts).tolist())

    def _draw_measurers(self) -> None:
        """Draw the workers whose losses move the dual weights."""
        settings = self.settings
        if settings.sampled is not None:
            stream = self._randomness.stream(Purpose.LOSS_SAMPLING, self.round)
            eligible = self._eligible()
            self._among = len(eligible)
            drawn = stream.subset(self._among, min(settings.sampled, self._among))
            self._participants = tuple(eligible[drawn].tolist())

    def _eligible(self) -> NDArray[np.int64]:
        """The workers that may be drawn, ascending."""
        return np.setdiff1d(np.arange(self.settings.workers), list(self.undrawn)).astype(np.int64)
