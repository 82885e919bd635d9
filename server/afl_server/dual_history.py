"""The dual weights of the last rounds, for whoever watches them move and restart."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from afl.config import Config

COLUMNS: Final = 60
"""Points of a line at most: what a terminal shows."""

SHOWN_WORKERS: Final = 6

BLOCKS: Final = 4
"""So many restarts are in sight, if there is the memory."""

MOST_ROUNDS: Final = 1024
MOST_VALUES: Final = 1 << 21
"""8 MiB of float32, whatever the number of workers."""


class DualHistory:
    """A window of the last rounds; written by the run, read by any thread.

    Args:
        block: rounds from restart to restart; 0 if the weights never restart.
    """

    def __init__(self, workers: int, block: int = 0) -> None:
        self._block = block
        wanted = min(MOST_ROUNDS, max(COLUMNS, BLOCKS * block))
        self._entries: deque[tuple[int, NDArray[np.float32]]] = deque(
            maxlen=max(2, min(wanted, MOST_VALUES // workers))
        )
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: Config) -> Self:
        """A run's."""
        return cls(config.workers, config.algorithm.restart_length)

    def add(self, round_: int, weights: NDArray[np.float64]) -> None:
        """The weights that a round used, ``[m]``."""
        with self._lock:
            self._entries.append((round_, weights.astype(np.float32)))

    def view(self) -> dict[str, Any]:
        """At most :data:`COLUMNS` points of the workers with most weight, as JSON has it.

        ``rounds`` holds the first round of each point, ``restarts`` the points in which a block begins, and
        ``weights`` a line for each of ``workers``: the mean over a point's rounds.
        """
        with self._lock:
            entries = list(self._entries)
        if not entries:
            return {"rounds": [], "restarts": [], "workers": [], "weights": []}
        rounds = np.array([round_ for round_, _ in entries])
        values = np.stack([weights for _, weights in entries])
        # Points begin at multiples of their length, so that they do not flicker as the window moves on.
        length = -(-(int(rounds[-1]) - int(rounds[0]) + 1) // (COLUMNS - 1))
        starts = np.flatnonzero(np.diff(rounds // length, prepend=-1))
        sizes = np.diff(starts, append=len(rounds))
        means = np.add.reduceat(values, starts, axis=0) / sizes[:, None]
        most = np.sort(np.argsort(-values.mean(axis=0), kind="stable")[:SHOWN_WORKERS])
        begins = (rounds > 1) & ((rounds - 1) % self._block == 0) if self._block else np.zeros(len(rounds))
        has_begun = np.add.reduceat(np.asarray(begins, dtype=np.int64), starts)
        return {
            "rounds": rounds[starts].tolist(),
            "restarts": np.flatnonzero(has_begun).tolist(),
            "workers": most.tolist(),
            "weights": np.round(means[:, most].T.astype(np.float64), 5).tolist(),
        }
