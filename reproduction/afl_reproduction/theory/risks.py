"""The exact risks of the task ``synthetic``, whose constants are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from afl.tasks import TaskContext
from afl.tasks.synthetic import Synthetic


@dataclass(frozen=True)
class SyntheticRisks:
    """``R_1 .. R_m`` and their gradients for all workers at once, in float64.

    Attributes:
        centres: float64 ``[m, d]``.
    """

    centres: NDArray[np.float64]
    scale: float

    @classmethod
    def of(cls, task: Synthetic, context: TaskContext) -> Self:
        """Those of all workers."""
        centres = np.stack([task.centre(worker, context) for worker in range(context.workers)])
        return cls(centres.astype(np.float64), task.options.scale)

    @property
    def smoothness(self) -> float:
        """``L`` of every risk."""
        smoothness: float = 2 * self.scale / self.centres.shape[1]
        return smoothness

    def values(self, w: NDArray[np.float64]) -> NDArray[np.float64]:
        """``R_i(w)``: ``[m]``, for ``w`` of ``[d]``."""
        square = (w - self.centres) ** 2
        values: NDArray[np.float64] = self.scale * (square / (1 + square)).mean(axis=1)
        return values

    def gradients(self, w: NDArray[np.float64]) -> NDArray[np.float64]:
        """The gradients of the risks at ``w``: ``[m, d]``."""
        distance = w - self.centres
        gradients: NDArray[np.float64] = self.scale / len(w) * 2 * distance / (1 + distance**2) ** 2
        return gradients

    def lower_bound(self, weights: NDArray[np.float64], resolution: int = 512) -> float:
        """A number that the worst risk ``max_i R_i(w)`` is nowhere below, whatever the weights.

        The worst risk is at least the weighted mean of the risks, a sum over coordinates of functions
        ``f_j`` of one variable each. ``f_j`` is least between the smallest and the largest centre, since
        every ``rho`` falls before its centre and rises after it. On a grid of step ``h`` there, ``f_j`` is
        nowhere more than ``h^2 / 4`` below its least value on the grid, in units of ``scale / d``: ``rho''``
        is at most 2, so ``f_j(x) - x^2`` is concave and ``f_j`` lies above its chord less ``h^2 / 4``.

        Args:
            weights: on the simplex, ``[m]``. The bound is close to the least worst risk where they are
                the weights of a minimax point.
            resolution: steps of the grid.
        """
        total = 0.0
        for centres in self.centres.T:
            grid, step = np.linspace(centres.min(), centres.max(), resolution + 1, retstep=True)
            square = (grid[:, None] - centres) ** 2
            least = float((square / (1 + square) @ weights).min())
            total += max(0.0, least - float(step) ** 2 / 4)
        bound: float = self.scale / self.centres.shape[1] * total
        return bound
