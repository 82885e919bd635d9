"""The sum of a compressor's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.codecs.integers import integer_type
from afl.core.codecs.payload import codec_of, unpack
from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.grid import counted_integers
from afl.core.messages import PayloadHeader
from afl.core.sums import Sum, checked_sum


def sum_of(compressor: Compressor, workers: int, realization: Callable[[], Realization]) -> Sum:
    """The sum for a compressor's messages: of their values where these can be added as they travel.

    Args:
        realization: of the open round.
    """
    if compressor.bits:
        bits = compressor.bits + (workers - 1).bit_length()
        return IntegerSum(compressor.count + compressor.groups, bits, compressor.count)
    codec = codec_of(compressor)
    if compressor.additive_idempotent and codec.in_runs:
        return codec.sum_of(compressor.count, range(workers))
    return MessageSum(compressor.dim, realization)


class IntegerSum(Sum):
    """Integers, each worker's message added once it is there: the order changes nothing.

    Args:
        count: integers a message.
        bits: that hold each sum.
        values: how many of the integers stand for values; the others are the groups' own.
    """

    is_order_free = True

    def __init__(self, count: int, bits: int, values: int) -> None:
        self._values = values
        self.total: NDArray[Any] = np.zeros(count, dtype=integer_type(bits))
        self.reset()

    def reset(self) -> None:
        """Begin a new sum, in the same memory."""
        self.total.fill(0)
        self._arriving: dict[int, bytearray] = {}
        self._added: dict[int, int] = {}
        self.seen: NDArray[np.int64] = np.zeros(4, dtype=np.int64)
        """Of the messages added: :func:`afl.core.grid.counted_integers`, and their bytes."""

    def add(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """Nothing is added before the message is complete."""
        message: bytes | bytearray | memoryview = data
        if len(data) < header.total_bytes:
            message = self._arriving.setdefault(worker, bytearray())
            message += data
            if len(message) < header.total_bytes:
                return
            self.drop(worker)
        integers = unpack(header, message).values
        np.add(self.total, integers, out=self.total)
        self._added[worker] = header.total_bytes
        self.seen[:3] += counted_integers(integers[: self._values], (1 << (header.bits - 1)) - 1)
        self.seen[3] += header.value_bytes

    def received(self, worker: int) -> int:
        """Bytes of a complete message; an unfinished one can be taken back."""
        return self._added.get(worker, 0)

    def is_complete(self, worker: int) -> bool:
        """Whether the worker's message has been added."""
        return worker in self._added

    def drop(self, worker: int) -> None:
        """Forget a worker's unfinished message."""
        self._arriving.pop(worker, None)

    def leave_out(self, absent: Iterable[int]) -> None:
        """Nothing waits for the absent workers' messages."""

    @property
    def waiting_bytes(self) -> int:
        """Of messages that are incomplete."""
        return sum(map(len, self._arriving.values()))

    def vector(self, realization: Realization, dim: int) -> Tensor:
        """What the sum of the integers stands for."""
        dense = torch.zeros(dim)
        realization.add_to(dense, Compressed(self.total))
        return dense


class MessageSum(Sum):
    """Decoded messages, each added whole when its worker's turn has come.

    Args:
        dim: d.
        realization: of the open round's messages.
    """

    in_values = False

    def __init__(self, dim: int, realization: Callable[[], Realization]) -> None:
        self.total: NDArray[np.float32] = np.zeros(dim, dtype=np.float32)
        self._realization = realization
        self.reset()

    def reset(self) -> None:
        """Begin a new sum, in the same memory."""
        self.total.fill(0.0)
        self._arriving: dict[int, bytearray] = {}
        self._waiting: dict[int, tuple[Compressed, int]] = {}
        self._complete: dict[int, int] = {}
        self._left_out: frozenset[int] = frozenset()
        self._next = 0
        self._held = 0

    def add(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """Nothing is added before the message is complete and those of all workers before are in."""
        buffer = self._arriving.setdefault(worker, bytearray())
        buffer += data
        self._held += len(data)
        if len(buffer) < header.total_bytes:
            return
        # Decoded before its turn: a bad message must be refused while its sender can still be told.
        self.drop(worker)
        message = unpack(header, buffer)
        self._waiting[worker] = (message, header.total_bytes)
        self._complete[worker] = header.total_bytes
        self._held += header.total_bytes
        realization = self._realization()
        total = torch.from_numpy(self.total)
        while self._next in self._waiting or self._next in self._left_out:
            if self._next in self._waiting:
                message, size = self._waiting.pop(self._next)
                realization.add_to(total, message)
                self._held -= size
            self._next += 1

    @property
    def waiting_bytes(self) -> int:
        """Of messages that are incomplete, or whose turn has not come."""
        return self._held

    def received(self, worker: int) -> int:
        """Bytes of a complete message; an unfinished one can be taken back."""
        return self._complete.get(worker, 0)

    def drop(self, worker: int) -> None:
        """Forget a worker's unfinished message."""
        self._held -= len(self._arriving.pop(worker, b""))

    def leave_out(self, absent: Iterable[int]) -> None:
        """Sum without the absent workers: the others' messages do not wait for theirs."""
        self._left_out = frozenset(absent)

    def would_wait(self, worker: int) -> bool:
        """Whether a worker before this one is still missing."""
        return worker > self._next

    def checked(self, where: str, of: str) -> NDArray[np.float32]:
        """The sum of all decoded messages, float32 ``[dim]``."""
        return checked_sum(self.total, where, of)

    def vector(self, realization: Realization, dim: int) -> Tensor:  # noqa: ARG002
        """The sum, which is a vector of d already: float32 ``[dim]``."""
        return torch.from_numpy(self.total)
