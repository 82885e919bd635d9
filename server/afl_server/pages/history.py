"""How a run has gone, in bounded memory: what the status page draws.

Rounds share a fixed number of buckets. When these are full, neighbours are merged and each holds twice as
many rounds, so that the whole run fits whatever its length. Of dual weights a bucket keeps each worker's
least and largest, so that merging hides no peak; ``dual_window.py`` has the last rounds as they were.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afl_server.federation.evaluation_summary import EvaluationSummary

BUCKETS = 256
"""Points of a curve: more than a screen resolves, few enough that a page of ten curves is small."""

MOST_FOLLOWED = 4096
"""Up to so many workers each has curves of its own (17 MB at most); of more, only what is said of all."""

SPREAD = (0.0, 0.25, 0.75, 1.0)
"""The quantiles over the workers that are kept of each evaluation."""


@dataclass
class Bucket:
    """Some rounds that follow one another.

    Attributes:
        round: the last of them.
        weight_max: the largest dual weight.
        sent: bytes since the run began, both ways, at the end of them.
        rounds: how many they are.
    """

    round: int
    weight_max: float
    sent: int
    rounds: int = 1

    def absorb(self, later: Bucket) -> None:
        """Take in what follows."""
        self.weight_max = max(self.weight_max, later.weight_max)
        self.round, self.sent = later.round, later.sent
        self.rounds += later.rounds


@dataclass(frozen=True)
class View:
    """A history at one moment; ``n`` workers were asked for, none of a run with too many to follow.

    Attributes:
        width: rounds in a bucket.
        low: the least dual weight in each bucket, ``[buckets, n]``; NaN where an earlier process ran it.
        high: the largest, likewise.
        spacing: every how many-th evaluation there is; the last is always among them.
        accuracy: ``[evaluations, n]``; NaN where there is none.
        loss: likewise.
        spread: quantiles over all workers, as :data:`SPREAD` has them, of accuracy and of loss,
            ``[evaluations, 2, 4]``.
    """

    width: int
    buckets: list[Bucket]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    spacing: int
    evaluations: list[EvaluationSummary]
    accuracy: NDArray[np.float32]
    loss: NDArray[np.float32]
    spread: NDArray[np.float32]


class History:
    """Of one run; filled from the run's event loop, read from any thread.

    Args:
        workers: m.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self.workers = workers
        self.follows = workers <= MOST_FOLLOWED
        """Whether each worker has curves of its own."""
        columns = workers if self.follows else 0
        self._width = 1
        self._buckets: list[Bucket] = []
        self._low = np.empty((BUCKETS, columns), dtype=np.float32)
        self._high = np.empty((BUCKETS, columns), dtype=np.float32)
        self._evaluations: list[EvaluationSummary] = []
        self._spacing = 1
        self._evaluated = 0
        self._accuracy = np.empty((BUCKETS, columns), dtype=np.float32)
        self._loss = np.empty((BUCKETS, columns), dtype=np.float32)
        self._spread = np.empty((BUCKETS, 2, len(SPREAD)), dtype=np.float32)
        self.version = 0
        """Grows with whatever is added."""

    # What happens.

    def add_round(self, bucket: Bucket, dual_weights: NDArray[np.float64] | None = None) -> None:
        """A closed round; without its dual weights ``[m]`` where only its line in the metrics is left."""
        with self._lock:
            self.version += 1
            self._fold(bucket, dual_weights)

    def _fold(self, bucket: Bucket, dual_weights: NDArray[np.float64] | None) -> None:
        if not self._buckets or self._buckets[-1].rounds >= self._width:
            if len(self._buckets) == BUCKETS:
                self._halve()
            self._buckets.append(bucket)
            place = len(self._buckets) - 1
            self._low[place] = self._high[place] = np.nan
        else:
            place = len(self._buckets) - 1
            self._buckets[place].absorb(bucket)
        if dual_weights is not None and self.follows:
            np.fmin(self._low[place], dual_weights, out=self._low[place], casting="same_kind")
            np.fmax(self._high[place], dual_weights, out=self._high[place], casting="same_kind")

    def _halve(self) -> None:
        for first, second in zip(self._buckets[::2], self._buckets[1::2], strict=True):
            first.absorb(second)
        del self._buckets[1::2]
        kept = BUCKETS // 2
        self._low[:kept] = np.fmin(self._low[::2], self._low[1::2])
        self._high[:kept] = np.fmax(self._high[::2], self._high[1::2])
        self._width *= 2

    def add_evaluation(self, point: EvaluationSummary, metrics: Sequence[Mapping[str, float]]) -> None:
        """An evaluation, with the metrics of each worker, ``[m]``; those of an absent worker are empty."""
        accuracy = np.array([entry.get("accuracy", math.nan) for entry in metrics])
        loss = np.array([entry.get("loss", math.nan) for entry in metrics])
        accuracy, loss = _drawable(accuracy), _drawable(loss)
        spread = [_spread(accuracy), _spread(loss)]
        with self._lock:
            self.version += 1
            points = self._evaluations
            if points and (self._evaluated - 1) % self._spacing:
                # The one before was there as the last only.
                points.pop()
            if len(points) == BUCKETS:
                del points[1::2]
                kept = BUCKETS // 2
                for array in (self._accuracy, self._loss, self._spread):
                    array[:kept] = array[::2].copy()
                self._spacing *= 2
            place = len(points)
            points.append(point)
            self._evaluated += 1
            self._spread[place] = spread
            if self.follows:
                self._accuracy[place], self._loss[place] = accuracy, loss

    # What is drawn.

    def view(self, workers: Sequence[int] = ()) -> View:
        """The curves as they are now, with those of some workers."""
        columns = list(workers) if self.follows else []
        with self._lock:
            rounds, evaluated = len(self._buckets), len(self._evaluations)
            return View(
                self._width,
                [Bucket(**vars(bucket)) for bucket in self._buckets],
                self._low[:rounds, columns],
                self._high[:rounds, columns],
                self._spacing,
                list(self._evaluations),
                self._accuracy[:evaluated, columns],
                self._loss[:evaluated, columns],
                self._spread[:evaluated].copy(),
            )

    def heaviest(self, count: int) -> list[int]:
        """The workers whose dual weight has been largest on average, heaviest first."""
        if not self.follows:
            return list(range(min(count, self.workers)))
        with self._lock:
            seen = self._high[: len(self._buckets)]
            seen = seen[~np.isnan(seen[:, 0])]
            mean = seen.mean(axis=0) if len(seen) else np.zeros(self.workers)
        # Of equals the first: a page must not flicker between them.
        order: list[int] = np.argsort(-mean, kind="stable")[:count].tolist()
        return order


def _drawable(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values as near as the curves' type of numbers has them; NaN stays."""
    largest = float(np.finfo(np.float32).max)
    return values.clip(-largest, largest)


def _spread(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each quantile as the value that is nearest to it: workers that are there, at a tenth of the time."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return np.full(len(SPREAD), np.nan)
    places = [round(quantile * (len(known) - 1)) for quantile in SPREAD]
    return known[places]
