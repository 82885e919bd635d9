"""The dual weights: KL mirror ascent with blockwise restarts (AFL-BR, Algorithm 1, line 8; equation 3)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LOWEST_LOG_WEIGHT = -1e290
"""A log weight never falls below this, so that no sum of losses within a block reaches minus infinity."""


class DualWeights:
    """The dual weights q on the simplex, kept as logarithms.

    Updating logarithms cannot overflow for any finite loss, and a weight that underflows to zero is still
    known by its logarithm.

    Args:
        workers: m.
        eta_q: dual step size.
        block: B; the weights restart to uniform after every round that is a multiple of it.
    """

    def __init__(self, workers: int, eta_q: float, block: int) -> None:
        assert workers >= 1
        assert block >= 1
        assert eta_q >= 0
        self._eta_q = eta_q
        self._block = block
        self._uniform_log = -math.log(workers)
        self.log_weights: NDArray[np.float64] = np.full(workers, self._uniform_log)
        self.weights: NDArray[np.float64] = np.full(workers, 1.0 / workers)

    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        """Go from q_t to q_{t+1}: uniform if ``t mod B == 0``, else proportional to q_t exp(eta_q l).

        Args:
            round_: t, 1-based.
            losses: finite, float64 ``[m]``; the caller has refused any other.
        """
        assert losses.shape == self.weights.shape
        assert bool(np.isfinite(losses).all())
        if round_ % self._block == 0:
            self.log_weights = np.full(len(losses), self._uniform_log)
            self.weights = np.full(len(losses), 1.0 / len(losses))
            return
        # Halved before the subtraction: the difference of two finite doubles can overflow.
        with np.errstate(over="ignore"):
            gain = 2.0 * self._eta_q * (0.5 * losses - 0.5 * losses.max())
        raised = np.maximum(self.log_weights + gain, LOWEST_LOG_WEIGHT)
        raised -= raised.max()
        raised -= math.log(float(np.exp(raised).sum()))
        self.log_weights = raised
        self.weights = np.exp(raised)
