"""The dual weights q on the simplex, and the rules that move them.

AFL-BR and AFL-Com take KL mirror ascent with blockwise restarts (Algorithm 1, line 8; equation 3); AFL
(Mohri et al.) and DRFA take Euclidean projected ascent.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

LOWEST_LOG_WEIGHT = -1e290
"""A log weight never falls below this, so that no sum of losses within a block reaches minus infinity."""


class DualRule(abc.ABC):
    """Dual weights and how they follow the losses.

    Attributes:
        weights: q, float64 ``[m]``, uniform at first.
        factor: what the next update multiplies its step size by; multiplying the losses could overflow.
    """

    factor: float = 1.0

    def __init__(self, workers: int) -> None:
        assert workers >= 1
        self.weights: NDArray[np.float64] = np.full(workers, 1.0 / workers)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """What :meth:`restore` takes."""
        return {"dual_weights": self.weights}

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Continue from a :meth:`state`."""
        assert state["dual_weights"].shape == self.weights.shape
        self.weights = state["dual_weights"].copy()

    @abc.abstractmethod
    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        """Go from q_t to q_{t+1}.

        Args:
            round_: t, 1-based.
            losses: finite, float64 ``[m]``; the caller has refused any other.
        """


class DualWeights(DualRule):
    """KL mirror ascent with restarts; the weights are kept as logarithms.

    Updating logarithms cannot overflow for any finite loss, and a weight that underflows to zero is still
    known by its logarithm.

    Args:
        workers: m.
        eta_q: dual step size.
        block: B; the weights restart to uniform after every round that is a multiple of it.
    """

    def __init__(self, workers: int, eta_q: float, block: int) -> None:
        super().__init__(workers)
        assert block >= 1
        assert eta_q >= 0
        self._eta_q = eta_q
        self._block = block
        self._uniform_log = -math.log(workers)
        self.log_weights: NDArray[np.float64] = np.full(workers, self._uniform_log)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """With the logarithms, which a weight that underflowed is known by."""
        return {**super().state(), "dual_log_weights": self.log_weights}

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Continue from a :meth:`state`."""
        super().restore(state)
        self.log_weights = state["dual_log_weights"].copy()

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
            gain = 2.0 * self._eta_q * self.factor * (0.5 * losses - 0.5 * losses.max())
        raised = np.maximum(self.log_weights + gain, LOWEST_LOG_WEIGHT)
        raised -= raised.max()
        raised -= math.log(float(np.exp(raised).sum()))
        self.log_weights = raised
        self.weights = np.exp(raised)


class CappedWeights(DualWeights):
    """KL mirror ascent with restarts on the weights that are at most ``largest``.

    The objective is then the mean loss of the worst ``1 / largest`` workers together, not the loss of the
    single worst.

    Args:
        largest: alpha, above 1/m and at most 1, which is no cap.
    """

    def __init__(self, workers: int, eta_q: float, block: int, largest: float) -> None:
        super().__init__(workers, eta_q, block)
        assert 1.0 / workers < largest <= 1
        self._largest = largest

    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        """The step of :class:`DualWeights`, projected."""
        super().update(round_, losses)
        if self.log_weights.max() > math.log(self._largest):
            self.log_weights = project_below_cap(self.log_weights, self._largest)
            self.weights = np.minimum(np.exp(self.log_weights), self._largest)


class ProjectedAscent(DualRule):
    """``q <- Pi(q + eta_q l)`` with the Euclidean projection onto the simplex.

    Args:
        workers: m.
        eta_q: dual step size.
    """

    def __init__(self, workers: int, eta_q: float) -> None:
        super().__init__(workers)
        assert eta_q >= 0
        self._eta_q = eta_q

    def update(
        self,
        round_: int,  # noqa: ARG002  # every round alike
        losses: NDArray[np.float64],
    ) -> None:
        """One step of ascent, projected."""
        assert losses.shape == self.weights.shape
        assert bool(np.isfinite(losses).all())
        with np.errstate(over="ignore"):
            # The projection does not see what is added to all alike, so losses are taken from the largest.
            gain = 2.0 * self._eta_q * self.factor * (0.5 * losses - 0.5 * losses.max())
        self.weights = project_to_simplex(self.weights + np.maximum(gain, LOWEST_LOG_WEIGHT))


def project_below_cap(log_weights: NDArray[np.float64], largest: float) -> NDArray[np.float64]:
    """The nearest point of the simplex with no weight above ``largest``, in Kullback-Leibler divergence.

    It is ``min(c q_i, largest)`` for the one c for which it sums to 1 (Herbster, Warmuth 2001): the largest
    weights are capped, as few as will do, and the others keep their ratios.

    Args:
        log_weights: of a point of the simplex, as logarithms, finite float64 ``[m]``.
        largest: above 1/m, at most 1.

    Returns:
        The logarithms of the nearest point, ``[m]``.
    """
    order = np.argsort(-log_weights, kind="stable")
    descending = log_weights[order]
    ratios = np.exp(np.diff(descending)).tolist()
    # Of weight k and those behind it, in units of weight k: no logarithm is so low that their count is lost.
    sums = [1.0]
    for ratio in reversed(ratios):
        sums.append(1.0 + ratio * sums[-1])
    left = 1.0 - largest * np.arange(len(order))
    # Where one more cap's worth is left, rounding must not take it for two.
    fits = (left <= largest + 1e-12) | (left <= largest * np.array(sums[::-1]))
    capped = int(np.argmax(fits))
    raised = math.log(left[capped] / sums[len(order) - 1 - capped])
    projected: NDArray[np.float64] = log_weights - descending[capped] + raised
    projected[order[:capped]] = math.log(largest)
    return np.minimum(projected, math.log(largest))


def project_to_simplex(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point of the simplex in the Euclidean norm; finite float64 ``[m]``.

    By sorting (Held, Wolfe, Crowder 1974; Duchi et al. 2008): ``max(x - theta, 0)`` for the one theta
    for which it sums to 1.
    """
    # Only the distances to the largest matter; from there the sums are exact where the answer is not zero.
    with np.errstate(over="ignore"):
        below = point - point.max()
        descending = np.sort(below)[::-1]
        excess = np.cumsum(descending) - 1.0
        counts = np.arange(1, len(point) + 1)
        positive = int(np.flatnonzero(descending * counts > excess)[-1])
    theta = excess[positive] / counts[positive]
    projected: NDArray[np.float64] = np.maximum(below - theta, 0.0)
    projected /= projected.sum()
    return projected
