"""Sums over workers in ascending worker id, whatever the order of arrival, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class OrderedSum:
    """``total = ((0 + a_0 c_0) + a_1 c_1) + ...`` in float32, folded as pieces come.

    Float addition is not associative, so the order is part of the result. A piece of worker i is added as
    soon as worker i-1's values for the same places have been; until then it waits. Pieces of one worker
    come in order and without gaps.

    Args:
        workers: m.
        length: values each worker sends.
    """

    def __init__(self, workers: int, length: int) -> None:
        self._length = length
        self._workers = workers
        self.total: NDArray[np.float32] = np.zeros(length, dtype=np.float32)
        self._folded = [0] * workers
        self._received = [0] * workers
        self.factors: list[np.float32 | None] = [None] * workers
        """a_i, which multiplies (rounded once) before the sum; ``None`` for none. Set before worker i's
        first piece."""
        self._waiting: list[deque[NDArray[np.float32]]] = [deque() for _ in range(workers)]
        self._left_out: set[int] = set()
        self.waiting_bytes = 0
        """Bytes of pieces whose turn has not come."""

    def reset(self) -> None:
        """Begin a new sum."""
        self.total.fill(0.0)
        for worker in range(self._workers):
            self._folded[worker] = 0
            self._received[worker] = 0
            self.factors[worker] = None
            self._waiting[worker].clear()
        self._left_out.clear()
        self.waiting_bytes = 0

    def leave_out(self, absent: Iterable[int]) -> None:
        """Go on without some workers, of which nothing has come."""
        for worker in absent:
            assert self._received[worker] == 0
            self._left_out.add(worker)
            self._advance(worker)

    @property
    def done(self) -> int:
        """Leading values of :attr:`total` that are final: all workers are folded in."""
        return self._folded[-1]

    def received(self, worker: int) -> int:
        """Values that have come from ``worker``."""
        return self._received[worker]

    def would_wait(self, worker: int) -> bool:
        """Whether a piece of ``worker`` that came now would have to wait for another worker's."""
        received = self._received[worker]
        return worker > 0 and received < self._length and self._folded[worker - 1] <= received

    def add(self, worker: int, piece: NDArray[np.float32]) -> None:
        """The next values of ``worker``; float32, kept by reference until folded."""
        assert self._received[worker] + len(piece) <= self._length
        self._received[worker] += len(piece)
        self._waiting[worker].append(piece)
        self.waiting_bytes += piece.nbytes
        self._advance(worker)

    def _advance(self, worker: int) -> None:
        """Fold what can be of ``worker`` and, where that was what they waited for, of those behind it."""
        # A sum beyond float32 is infinite, and refused when the round closes.
        with np.errstate(over="ignore", invalid="ignore"):
            while worker < self._workers and self._fold(worker):
                worker += 1

    def _fold(self, worker: int) -> bool:
        """Fold what can be of ``worker``; whether anything was."""
        waiting = self._waiting[worker]
        start = before = self._folded[worker]
        limit = self._folded[worker - 1] if worker else self._length
        while waiting and start < limit:
            piece = waiting[0]
            count = min(len(piece), limit - start)
            target, factor = self.total[start : start + count], self.factors[worker]
            np.add(target, piece[:count] if factor is None else piece[:count] * factor, out=target)
            if count == len(piece):
                waiting.popleft()
            else:
                waiting[0] = piece[count:]
            self.waiting_bytes -= count * piece.itemsize
            start += count
        if worker in self._left_out:
            start = limit
        self._folded[worker] = start
        return start > before
