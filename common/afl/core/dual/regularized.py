"""KL-regularized weights: a smooth maximum of the losses in place of steps towards the largest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from afl.core.dual.rule import DualRule
from afl.core.options import AlgorithmOption

LARGEST_LOSS = 1e300
"""What a loss counts as at most, either way, so that no mean of losses overflows."""


class KlRegularized(DualRule):
    """``q_i`` in proportion to ``exp(u_i / lambda)``, with u a moving average of the losses.

    For losses that do not change these are the weights that maximize ``sum_i q_i l_i - lambda KL(q, 1/m)``
    (FGDRO-KL; Guo, Yang: "Communication-efficient federated group distributionally robust optimization",
    NeurIPS 2024). There is no path behind them: they move as the losses do, and need no restart.

    Args:
        workers: m.
        temperature: lambda, above 0, in the losses' unit.
        beta: how much of the average stays each round; the first round's losses are the first average.
    """

    name = "kl-regularized"
    description = "weights in proportion to exp(average loss / temperature) (FGDRO-KL, Guo and Yang 2024)"
    options = (
        AlgorithmOption(
            "temperature",
            "lambda: a worker whose average loss is higher by so much has e times the weight",
            least=1e-12,
            most=1e12,
            unit="loss",
        ),
        AlgorithmOption(
            "beta",
            "how much of the average of the losses stays each round",
            default=0.9,
            least=0.0,
            most=0.999,
        ),
    )
    proven = (
        "Guo and Yang (2024) prove convergence for lambda ln(mean of exp(R_i / lambda)), which is at most "
        "lambda ln m below the largest risk, with averaged gradients and without compression; for the "
        "steps here, or with error feedback, nothing is proven"
    )

    def __init__(self, workers: int, temperature: float, beta: float) -> None:
        super().__init__(workers)
        assert temperature > 0
        assert 0 <= beta < 1
        self._temperature = temperature
        self._beta = beta
        self.mean_losses: NDArray[np.float64] = np.zeros(workers)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """With the average of the losses."""
        return {**super().state(), "dual_mean_losses": self.mean_losses}

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Continue from a :meth:`state`."""
        super().restore(state)
        self.mean_losses = state["dual_mean_losses"].copy()

    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        """Average the losses, and weigh by the average."""
        assert losses.shape == self.weights.shape
        assert bool(np.isfinite(losses).all())
        bounded = np.clip(losses, -LARGEST_LOSS, LARGEST_LOSS)
        stays = self._beta if round_ > 1 else 0.0
        self.mean_losses = stays * self.mean_losses + (1.0 - stays) * bounded
        with np.errstate(over="ignore"):
            weights = np.exp((self.mean_losses - self.mean_losses.max()) / self._temperature)
        self.weights = weights / weights.sum()
