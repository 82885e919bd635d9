"""How a run has gone, in bounded memory: what the status page draws.

Rounds share a fixed number of buckets. When these are full, neighbours are merged and each holds twice as
many rounds, so that the whole run fits whatever its length. Of dual weights a bucket keeps each worker's
least and largest, so that merging hides no peak; ``dual_window.py`` has the last rounds as they were.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from afl.runs.metrics import ranked
from afl_server.federation.evaluation_summary import EvaluationSummary
from afl_server.pages.dual_window import COLUMNS

BUCKETS = 256  # points of a curve: more than a screen resolves, few enough that a page of ten curves is small
# Up to so many workers each has curves of its own (17 MB at most); of more, only what is said of all.
MOST_FOLLOWED = 4096
SPREAD = (0.0, 0.25, 0.75, 1.0)  # the quantiles over the workers that are kept of each evaluation
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass
class Bucket:
    """Some rounds that follow one another.

    Attributes:
        low: the least dual weight of each worker that is followed; NaN where an earlier process ran them.
        high: the largest, likewise.
    """

    round: int  # the last of them
    weight_max: float
    sent: int  # bytes since the run began, both ways, at the end of them
    rounds: int = 1
    low: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32), compare=False)
    high: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32), compare=False)

    def absorb(self, later: Bucket) -> None:
        """Take in what follows."""
        self.weight_max = max(self.weight_max, later.weight_max)
        self.round, self.sent = later.round, later.sent
        self.rounds += later.rounds
        self.low, self.high = np.fmin(self.low, later.low), np.fmax(self.high, later.high)


class Point(NamedTuple):
    """An evaluation; NaN where a worker that is followed has no such metric."""

    summary: EvaluationSummary
    value: NDArray[np.float32]  # of the metric that ranks
    loss: NDArray[np.float32]
    spread: NDArray[np.float32]  # quantiles over all workers of these values and of the losses, [2, 4]


class View(NamedTuple):
    """A history at one moment; a bucket has ``width`` rounds, or fewer if it is the last."""

    width: int
    buckets: Sequence[Bucket]
    spacing: int  # every how many-th evaluation is among the points; the last always is
    points: Sequence[Point]


class History:
    """Of a run of m ``workers``; filled from the run's event loop, read from any thread."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.follows = workers <= MOST_FOLLOWED  # whether each worker has curves of its own
        self.version = 0  # grows with whatever is added
        self._lock = threading.Lock()
        self._width = self._spacing = 1
        self._buckets: list[Bucket] = []
        self._points: list[Point] = []
        self._evaluated = 0

    def add_round(self, bucket: Bucket, dual_weights: NDArray[np.float64] | None = None) -> None:
        """A closed round; without its dual weights ``[m]`` where only its line in the metrics is left."""
        known = np.full(self.workers, np.nan) if dual_weights is None else dual_weights
        bucket.low = bucket.high = self._followed(known)
        with self._lock:
            self.version += 1
            buckets = self._buckets
            if buckets and buckets[-1].rounds < self._width:
                buckets[-1].absorb(bucket)
                return
            if len(buckets) == BUCKETS:
                for first, second in zip(buckets[::2], buckets[1::2], strict=True):
                    first.absorb(second)
                del buckets[1::2]
                self._width *= 2
            buckets.append(bucket)

    def add_evaluation(self, summary: EvaluationSummary, metrics: Sequence[Mapping[str, float]]) -> None:
        """An evaluation, with the metrics of each worker, ``[m]``; those of an absent worker are empty."""
        value, loss = (
            # As near as the curves' type of numbers has them; NaN stays.
            np.array([entry.get(name, math.nan) for entry in metrics]).clip(-_LARGEST, _LARGEST)
            for name in (ranked(vars(summary)).metric, "loss")
        )
        spread = np.array([_spread(value), _spread(loss)], dtype=np.float32)
        point = Point(summary, self._followed(value), self._followed(loss), spread)
        with self._lock:
            self.version += 1
            if self._points and (self._evaluated - 1) % self._spacing:
                # The one before was there as the last only.
                self._points.pop()
            if len(self._points) == BUCKETS:
                del self._points[1::2]
                self._spacing *= 2
            self._points.append(point)
            self._evaluated += 1

    def view(self) -> View:
        """The curves as they are now."""
        with self._lock:
            buckets = [replace(bucket) for bucket in self._buckets]
            return View(self._width, buckets, self._spacing, list(self._points))

    def worst(self) -> dict[str, Any]:
        """How the worst worker was served at no more than :data:`COLUMNS` evaluations of the whole run, and
        now, by the metric that ranks."""
        with self._lock:
            summaries = [point.summary for point in self._points]
        shown = summaries[:: -(-len(summaries) // COLUMNS) or 1]
        values = [ranked(vars(summary)).worst for summary in shown]
        by = ranked(vars(summaries[-1])) if summaries else None
        return {
            "measure": None if by is None else f"worst {by.metric}",
            "rounds": [summary.round for summary in shown],
            "values": [value if value is not None and math.isfinite(value) else None for value in values],
            "last": None if by is None else by.worst,
        }

    def heaviest(self, count: int) -> list[int]:
        """The workers whose dual weight has been largest on average, heaviest first."""
        if not self.follows:
            return list(range(min(count, self.workers)))
        seen = [bucket.high for bucket in self.view().buckets if not np.isnan(bucket.high[0])]
        mean = np.mean(seen, axis=0) if seen else np.zeros(self.workers)
        # Of equals the first: a page must not flicker between them.
        return [int(worker) for worker in np.argsort(-mean, kind="stable")[:count]]

    def _followed(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        return values.astype(np.float32) if self.follows else np.empty(0, np.float32)


def _spread(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each quantile as the value that is nearest to it: workers that are there, at a tenth of the time."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return np.full(len(SPREAD), np.nan)
    return known[[round(quantile * (len(known) - 1)) for quantile in SPREAD]]
