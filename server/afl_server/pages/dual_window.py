"""The dual weights of the last rounds, for whoever watches them move and restart: a terminal and the page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from afl.config import Config

COLUMNS: Final = 60  # points of a line at most: what a terminal shows
POINTS: Final = 256  # points of a page's line at most
SHOWN_WORKERS: Final = 6
ALL_SHOWN: Final = 10  # up to so many workers all are shown
OVERTAKES: Final = 1.25  # so many times a shown worker's weight is what takes its place
BLOCKS: Final = 4  # so many restarts are in sight, if there is the memory
MOST_ROUNDS: Final = 1024
MOST_VALUES: Final = 1 << 21  # 8 MiB of float32, whatever the number of workers


class DualWindow:
    """A window of the last rounds; written by the run, read by any thread."""

    def __init__(self, workers: int, block: int = 0) -> None:
        self._block = block  # rounds from restart to restart; 0 if the weights never restart
        most = max(2, min(MOST_ROUNDS, MOST_VALUES // workers))
        # Where there is no memory for all rounds of the blocks, one of so many is kept; of very many workers,
        # the last rounds that there is memory for.
        self._stride = max(1, -(-BLOCKS * block // most)) if most >= POINTS else 1
        self._entries: deque[tuple[int, NDArray[np.float32]]] = deque(
            maxlen=min(most, max(POINTS, BLOCKS * block // self._stride))
        )
        self._shown = list(range(min(workers, ALL_SHOWN if workers <= ALL_SHOWN else SHOWN_WORKERS)))
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: Config) -> Self:
        """A run's."""
        return cls(config.workers, config.algorithm.restart_length)

    def add(self, round_: int, weights: NDArray[np.float64]) -> None:
        """The weights that a round used, ``[m]``."""
        if round_ % self._stride == 0:
            with self._lock:
                self._entries.append((round_, weights.astype(np.float32)))

    def curves(self, workers: Sequence[int]) -> tuple[list[int], NDArray[np.float32]]:
        """At most :data:`POINTS` rounds of the last three blocks or more, and some workers' weights in them,
        ``[rounds, workers]``."""
        with self._lock:
            entries = list(self._entries)
        # A multiple of what is kept, so that the points do not flicker as the window moves on.
        spacing = self._stride * max(1, -(-(BLOCKS - 1) * self._block // (POINTS * self._stride)))
        chosen = [entry for entry in entries if entry[0] % spacing == 0][-POINTS:]
        columns = list(workers)
        weights = np.array([row[columns] for _, row in chosen], dtype=np.float32)
        return [round_ for round_, _ in chosen], weights.reshape(len(chosen), len(columns))

    def view(self) -> dict[str, Any]:
        """At most :data:`COLUMNS` points of the workers with most weight, as JSON has it.

        ``rounds`` holds the first round of each point, ``restarts`` the points in which a block begins, and
        ``weights`` a line for each of ``workers``: the mean over a point's rounds.
        """
        with self._lock:
            entries = list(self._entries)
        if not entries:
            return {"rounds": [], "restarts": [], "workers": [], "weights": []}
        oldest = entries[-1][0] - max(COLUMNS, BLOCKS * self._block)
        entries = [entry for entry in entries if entry[0] > oldest]
        rounds = np.array([round_ for round_, _ in entries])
        values = np.stack([weights for _, weights in entries])
        # Points begin at multiples of their length, so that they do not flicker as the window moves on.
        length = -(-(int(rounds[-1]) - int(rounds[0]) + 1) // (COLUMNS - 1))
        starts = np.flatnonzero(np.diff(rounds // length, prepend=-1))
        ends = np.append(starts[1:], len(rounds))
        means = np.add.reduceat(values, starts, axis=0) / (ends - starts)[:, None]
        shown = self._places(values.mean(axis=0))
        # A block has begun in a point, or since the last round before it that was kept.
        block, since = self._block or int(rounds[-1]), rounds[starts] - 1 - self._stride
        has_begun = (rounds[ends - 1] - 1) // block > np.maximum(since, 0) // block
        return {
            "rounds": rounds[starts].tolist(),
            "restarts": np.flatnonzero(has_begun).tolist(),
            "workers": shown,
            "weights": np.round(means[:, shown].T.astype(np.float64), 5).tolist(),
        }

    def _places(self, weights: NDArray[np.float32]) -> list[int]:
        """The workers that are shown, ascending; one gives way only to one with clearly more weight, ``[m]``,
        so that lines do not jump while somebody reads them."""
        with self._lock:
            for worker in np.argsort(-weights, kind="stable")[: len(self._shown)].tolist():
                lightest = min(self._shown, key=lambda one: weights[one])
                if worker not in self._shown and weights[worker] > OVERTAKES * weights[lightest]:
                    self._shown[self._shown.index(lightest)] = worker
            return sorted(self._shown)
