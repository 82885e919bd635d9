"""Rules that take a step of ascent from the weights of the round before.

AFL-BR and AFL-Com take KL mirror ascent with blockwise restarts (Algorithm 1, line 8; equation 3); AFL
(Mohri et al.) and DRFA take Euclidean projected ascent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from afl.core.dual.projections import project_below_cap, project_to_simplex
from afl.core.dual.rule import DualRule
from afl.core.options import AlgorithmOption

LOWEST_LOG_WEIGHT = -1e290
"""A log weight never falls below this, so that no sum of losses within a block reaches minus infinity."""


class DualWeights(DualRule):
    """KL mirror ascent with restarts; the weights are kept as logarithms.

    Updating logarithms cannot overflow for any finite loss, and a weight that underflows to zero is still
    known by its logarithm.

    With a largest weight the step is projected onto the weights that are at most that: the objective is then
    the mean loss of the worst ``1 / largest_weight`` workers together, not the loss of the single worst.

    Args:
        workers: m.
        eta_q: dual step size.
        block: B; the weights restart to uniform after every round that is a multiple of it.
        largest_weight: at least 1/m and at most 1, which is no cap; ``None`` for none.
    """

    name = "kl-restarts"
    description = "KL mirror ascent that begins again at uniform weights every B rounds (the paper's)"
    takes = frozenset({"block", "eta_q", "largest_weight"})
    has_theorems = True
    proven = "Theorems 1 to 3 are about this rule"
    can_hide = True

    def __init__(self, workers: int, eta_q: float, block: int, largest_weight: float | None = None) -> None:
        super().__init__(workers)
        assert block >= 1
        assert eta_q >= 0
        assert largest_weight is None or 1.0 / workers <= largest_weight <= 1
        self._eta_q = eta_q
        self._block = block
        self._largest = largest_weight
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
        """Go from q_t to q_{t+1}: uniform if ``t mod B == 0``, else proportional to q_t exp(eta_q l), or the
        nearest to that below the largest weight.

        Args:
            round_: t, 1-based.
            losses: finite, float64 ``[m]``; the caller has refused any other.
        """
        if round_ % self._block == 0:
            self.log_weights = np.full(len(losses), self._uniform_log)
            self.weights = np.full(len(losses), 1.0 / len(losses))
            return
        self.log_weights = _raised(self.log_weights, _gain(losses, self._eta_q * self.factor))
        self.weights = np.exp(self.log_weights)
        if self._largest is not None and self.log_weights.max() > math.log(self._largest):
            self.log_weights = project_below_cap(self.log_weights, self._largest)
            self.weights = np.minimum(np.exp(self.log_weights), self._largest)


class Cvar(DualWeights):
    """KL mirror ascent with restarts for the mean loss of a share of the workers, the worst served: the
    conditional value at risk. It is :class:`DualWeights` with a largest weight of 1 / (share m).

    Args:
        share: of the workers, from 0 to 1; below 1/m it is the single worst, at 1 all of them.
    """

    name = "cvar"
    description = (
        "kl-restarts for the mean loss of the worst share of the workers, each of them at most alike"
    )
    takes = frozenset({"block", "eta_q"})
    options = (
        AlgorithmOption(
            "share",
            "share of the workers, the worst served, whose mean loss is lowered (CVaR); the same as a "
            "largest_weight of 1 / (share m)",
            least=0.0,
            most=1.0,
        ),
    )
    proven = (
        "Theorems 1 to 3 hold by our reading of their proofs, with Phi the mean of the worst share of the "
        "risks, and ln(1 / share) for ln m; the paper does not state it"
    )
    can_hide = False

    def __init__(self, workers: int, eta_q: float, block: int, share: float) -> None:
        assert 0 <= share <= 1
        super().__init__(workers, eta_q, block, 1.0 / max(1.0, share * workers))


class FixedShare(DualRule):
    """KL mirror ascent whose weights are mixed with a fixed share of uniform ones after each round, in place
    of restarts (Herbster, Warmuth: "Tracking the best expert", Machine Learning 1998).

    No weight is below ``uniform / m``, so what is long past is forgotten and a weight recovers in about
    ``ln(m / uniform) / (eta_q times the difference of losses)`` rounds.

    Args:
        workers: m.
        eta_q: dual step size.
        uniform: the share, above 0 and at most 1.
    """

    name = "fixed-share"
    description = "KL mirror ascent that mixes in a share of uniform weights each round, in place of restarts"
    takes = frozenset({"eta_q"})
    options = (
        AlgorithmOption(
            "uniform",
            "share of uniform weights that is mixed in after each round; about 1 / B forgets as restarts do",
            least=1e-9,
            most=1.0,
        ),
    )
    proven = (
        "Herbster and Warmuth (1998) bound the regret of the weights against any that change now and then, "
        "with ln(m / uniform) for ln m; of the model with it, with or without compression, nothing is proven"
    )
    can_hide = True

    def __init__(self, workers: int, eta_q: float, uniform: float) -> None:
        super().__init__(workers)
        assert eta_q >= 0
        assert 0 < uniform <= 1
        self._eta_q = eta_q
        self._uniform = uniform

    def update(
        self,
        round_: int,  # noqa: ARG002  # every round alike
        losses: NDArray[np.float64],
    ) -> None:
        """``q <- (1 - uniform) q' + uniform / m`` with q' proportional to q exp(eta_q l)."""
        raised = np.exp(_raised(np.log(self.weights), _gain(losses, self._eta_q * self.factor)))
        self.weights = (1.0 - self._uniform) * raised + self._uniform / len(losses)


class ProjectedAscent(DualRule):
    """``q <- Pi(q + eta_q l)`` with the Euclidean projection onto the simplex.

    Args:
        workers: m.
        eta_q: dual step size.
    """

    name = "projected"
    description = "Euclidean projected ascent without restarts (AFL, Mohri et al. 2019)"
    takes = frozenset({"eta_q"})
    proven = (
        "the bounds of AFL (Mohri et al. 2019, convex losses) and of stochastic descent ascent (Lin, Jin, "
        "Jordan 2020) grow with m where the paper's grow with ln m; with compression nothing is proven"
    )

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
        # The projection does not see what is added to all alike, so losses are taken from the largest.
        gain = _gain(losses, self._eta_q * self.factor)
        self.weights = project_to_simplex(self.weights + np.maximum(gain, LOWEST_LOG_WEIGHT))


def _gain(losses: NDArray[np.float64], step: float) -> NDArray[np.float64]:
    """``step (l - max l)``, which may be minus infinity."""
    assert bool(np.isfinite(losses).all())
    # Halved before the subtraction: the difference of two finite doubles can overflow.
    with np.errstate(over="ignore"):
        gain: NDArray[np.float64] = 2.0 * step * (0.5 * losses - 0.5 * losses.max())
    return gain


def _raised(log_weights: NDArray[np.float64], gain: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithms of weights in proportion to ``exp(log_weights + gain)``."""
    assert gain.shape == log_weights.shape
    raised = np.maximum(log_weights + gain, LOWEST_LOG_WEIGHT)
    raised -= raised.max()
    raised -= math.log(float(np.exp(raised).sum()))
    return raised
