"""What a server adds its workers' messages up in, as their bytes come."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.compressors.base import Compressed, Realization
from afl.core.messages import PayloadHeader
from afl.core.vectors import is_finite
from afl.errors import NonFiniteError


class Sum(abc.ABC):
    """The sum of one message of each worker.

    The defaults are those of a sum whose order does not matter, as of integers: nothing waits for its turn.

    Attributes:
        total: what has been added so far, ``[count]``; in this memory until :meth:`reset`.
    """

    total: NDArray[Any]

    in_values: ClassVar[bool] = True
    """Whether the sum is in the messages' own values, so that it can be sent as one of them."""

    is_order_free: ClassVar[bool] = False
    """Whether messages are added whole, in any order: one can be left out until its last byte has come."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes held that are not in the sum yet."""
        return 0

    def expect(self, worker: int, messages: int) -> None:  # noqa: ARG002
        """A worker's message comes next, which is the sum of so many workers' own."""
        assert messages == 1

    @abc.abstractmethod
    def add(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """The next bytes of a worker's message, in order and without gaps; kept by reference while they wait.

        Raises:
            NonFiniteError: if a value is not finite; nothing of these bytes was taken.
            ProtocolError: if the bytes are not what the header says.
        """

    @abc.abstractmethod
    def received(self, worker: int) -> int:
        """Bytes of a worker's message that are in the sum, or wait for it, and cannot be taken back."""

    def is_complete(self, worker: int) -> bool:  # noqa: ARG002
        """Whether all of a worker's message has come, as far as that matters to whose turn it is."""
        return False

    @abc.abstractmethod
    def leave_out(self, absent: Iterable[int]) -> None:
        """Some workers have no part in it; nothing of them has come."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Begin a new sum."""

    @abc.abstractmethod
    def vector(self, realization: Realization, dim: int) -> Tensor:
        """The sum of messages of this realization in coordinates, float32 ``[dim]``."""

    def drop(self, worker: int) -> None:  # noqa: B027  # where all that came is in the sum
        """Forget what has come of an unfinished message, as far as it is not in the sum."""

    def would_wait(self, worker: int) -> bool:  # noqa: ARG002
        """Whether a piece of ``worker`` that came now would wait for another's."""
        return False

    def final(self) -> memoryview:
        """The bytes at the beginning of the sum that no message changes any more."""
        return memoryview(b"")

    def checked(self, where: str, of: str) -> NDArray[Any]:  # noqa: ARG002
        """The complete sum: :attr:`total`.

        Raises:
            NonFiniteError: if it left its type's range; says where, and what was added.
        """
        return self.total


class Runs(Protocol):
    """Reads values of which any run can be read without the others."""

    def values(self, data: bytes | memoryview) -> NDArray[Any]:
        """As :meth:`afl.core.codecs.codec.Codec.values`."""
        ...

    def value_bytes(self, count: int) -> int:
        """The length of ``count`` values, in bytes."""
        ...


class ValueSum(Sum):
    """Values as they travel, in ascending worker id: ``((0 + c_0) + c_1) + ...`` in float32.

    Args:
        runs: how they are read.
        count: values a message.
        participants: whose messages are added, ascending.
    """

    def __init__(self, runs: Runs, count: int, participants: Sequence[int]) -> None:
        self._runs = runs
        self._count = count
        self.restart(participants)

    def restart(self, participants: Sequence[int]) -> None:
        """Begin a new sum, of other participants, in new memory."""
        self._rank = {worker: rank for rank, worker in enumerate(participants)}
        self._sum = OrderedSum(len(participants), self._count)
        self.total = self._sum.total

    def weigh(self, worker: int, weight: float) -> None:
        """What multiplies a worker's values, rounded to float32; before its first piece, 1 if never."""
        self._sum.factors[self._rank[worker]] = None if weight == 1.0 else np.float32(weight)

    def add(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:  # noqa: ARG002
        """Each value is added as soon as those of the workers before have been."""
        self._sum.add(self._rank[worker], self._runs.values(data))

    def received(self, worker: int) -> int:
        """Bytes that have come of the worker's values."""
        return self._runs.value_bytes(self._sum.received(self._rank[worker]))

    def is_complete(self, worker: int) -> bool:
        """Whether as many values have come as a message has."""
        return worker in self._rank and self._sum.received(self._rank[worker]) == self._count

    def leave_out(self, absent: Iterable[int]) -> None:
        """Sum without the absent workers: the others' values do not wait for theirs."""
        self._sum.leave_out(self._rank[worker] for worker in absent)

    def reset(self) -> None:
        """Begin a new sum, in the same memory."""
        self._sum.reset()

    def would_wait(self, worker: int) -> bool:
        """Whether a worker before this one is still missing; never of one that takes no part."""
        return worker in self._rank and self._sum.would_wait(self._rank[worker])

    @property
    def waiting_bytes(self) -> int:
        """Bytes of values whose turn in the sum has not come."""
        return self._sum.waiting_bytes

    def final(self) -> memoryview:
        """The values that all workers are folded into."""
        return self.total[: self._sum.done].view(np.uint8).data

    def checked(self, where: str, of: str) -> NDArray[np.float32]:
        """The sum of all values."""
        return checked_sum(self.total, where, of)

    def vector(self, realization: Realization, dim: int) -> Tensor:
        """What the sum of the values stands for: the sum of what they stand for."""
        dense = torch.zeros(dim)
        realization.add_to(dense, Compressed(self.total))
        return dense


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
        """How many values have come from ``worker``."""
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


def checked_sum(total: NDArray[np.float32], where: str, of: str) -> NDArray[np.float32]:
    """A complete sum.

    Raises:
        NonFiniteError: if it left float32's range; says where, and what was added.
    """
    if not is_finite(torch.from_numpy(total)):
        raise NonFiniteError(f"{where}: the sum of the workers' {of} overflows float32")
    return total
