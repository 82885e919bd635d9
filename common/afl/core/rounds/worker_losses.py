"""The losses that workers report for the dual step: the last of each, and what one counts as."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

FAR_ABOVE = 10.0
"""A loss is far above the others' if it exceeds so many times the highest median of a round so far."""


class WorkerLosses:
    """What is known of the losses of ``workers`` workers.

    Attributes:
        cap: a loss beyond it, or below its negative, counts as that in the dual step.
        last: the last that each worker reported, ``[m]``; NaN before its first.
        highest_median: the highest of all rounds' medians of the workers' absolute losses.
        far_above: the workers whose losses of the last round were far above the others' (:data:`FAR_ABOVE`).
    """

    def __init__(self, workers: int, cap: float) -> None:
        self.cap = cap
        self.last: NDArray[np.float64] = np.full(workers, np.nan)
        self.highest_median = 0.0
        self.far_above: tuple[int, ...] = ()

    def counting(self, loss: float) -> float:
        """What a loss counts as in the dual step."""
        return min(max(loss, -self.cap), self.cap)

    def take(self, losses: NDArray[np.float64]) -> None:
        """Those of a round that is closed, ``[m]``; NaN for a worker that was not asked, or absent."""
        np.copyto(self.last, losses, where=~np.isnan(losses))
        sizes = np.abs(losses[~np.isnan(losses)])
        if len(sizes):
            # The lower of two in the middle: the sum of both may overflow.
            median = float(np.sort(sizes)[(len(sizes) - 1) // 2])
            self.highest_median = max(self.highest_median, median)
        with np.errstate(over="ignore"):
            is_far = losses > FAR_ABOVE * self.highest_median
        self.far_above = tuple(np.flatnonzero(is_far).tolist())

    def stand_ins(
        self, participants: Sequence[int], losses: NDArray[np.float64], disbelieved: Collection[int] = ()
    ) -> dict[int, float]:
        """For each absent participant, the loss that stands for its own in the dual step.

        It is the last that it reported. For one that never has, or is not believed, it is the mean of the
        present: adding the same to all losses moves no dual weight, so that a worker of which nothing is
        known neither gains nor loses against the average of the others. Where nobody is present it is 0.

        Args:
            losses: of the open round, ``[m]``; NaN for those that are absent.
            disbelieved: workers whose last loss, too, does not count.
        """
        absent = [worker for worker in participants if np.isnan(losses[worker])]
        if not absent:
            return {}
        present = losses[~np.isnan(losses)]
        # Divided before the sum, which could overflow; rounding must not lead past the ends.
        mean = 0.0
        if len(present):
            mean = min(max(math.fsum(present / len(present)), present.min()), present.max())
        unknown = {worker for worker in absent if worker in disbelieved or np.isnan(self.last[worker])}
        return {worker: float(mean if worker in unknown else self.last[worker]) for worker in absent}
