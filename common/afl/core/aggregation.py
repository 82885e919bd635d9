"""What a server adds its workers' messages up in, byte by byte as they come."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.codecs.codec import Codec
from afl.core.codecs.payload import codec_of, unpack
from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.messages import PayloadHeader
from afl.core.sums import OrderedSum
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

    @property
    def waiting_bytes(self) -> int:
        """Bytes held that are not in the sum yet."""
        return 0

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


class ValueSum(Sum):
    """Values as they travel, in ascending worker id: ``((0 + c_0) + c_1) + ...`` in float32.

    Args:
        codec: of the messages, any run of whose values can be read alone.
        count: values a message.
        participants: whose messages are added, ascending.
    """

    def __init__(self, codec: Codec, count: int, participants: Sequence[int]) -> None:
        assert codec.in_runs
        self._codec = codec
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
        self._sum.add(self._rank[worker], self._codec.values(data))

    def received(self, worker: int) -> int:
        """All that has come."""
        return self._codec.value_bytes(self._sum.received(self._rank[worker]))

    def leave_out(self, absent: Iterable[int]) -> None:
        """The others' values pass theirs."""
        self._sum.leave_out(self._rank[worker] for worker in absent)

    def reset(self) -> None:
        """In the same memory."""
        self._sum.reset()

    def would_wait(self, worker: int) -> bool:
        """Whether a worker before this one is still missing; never of one that takes no part."""
        return worker in self._rank and self._sum.would_wait(self._rank[worker])

    @property
    def waiting_bytes(self) -> int:
        """Of values whose turn has not come."""
        return self._sum.waiting_bytes

    def final(self) -> memoryview:
        """The values that all workers are folded into."""
        return self.total[: self._sum.done].view(np.uint8).data

    def checked(self, where: str, of: str) -> NDArray[np.float32]:
        """The sum of all values."""
        return _finite(self.total, where, of)

    def vector(self, realization: Realization, dim: int) -> Tensor:
        """What the sum of the values stands for: the sum of what they stand for."""
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
        """In the same memory."""
        self.total.fill(0.0)
        self._arriving: dict[int, bytearray] = {}
        self._waiting: dict[int, tuple[Compressed, int]] = {}
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

    def received(self, worker: int) -> int:  # noqa: ARG002
        """An unfinished message is dropped with its session."""
        return 0

    def drop(self, worker: int) -> None:
        """All that has come of it."""
        self._held -= len(self._arriving.pop(worker, b""))

    def leave_out(self, absent: Iterable[int]) -> None:
        """The others' messages pass theirs."""
        self._left_out = frozenset(absent)

    def would_wait(self, worker: int) -> bool:
        """Whether a worker before this one is still missing."""
        return worker > self._next

    def checked(self, where: str, of: str) -> NDArray[np.float32]:
        """The sum of all messages."""
        return _finite(self.total, where, of)

    def vector(self, realization: Realization, dim: int) -> Tensor:  # noqa: ARG002
        """It is one."""
        return torch.from_numpy(self.total)


def sum_of(compressor: Compressor, workers: int, realization: Callable[[], Realization]) -> Sum:
    """The sum for a compressor's messages: of their values where these can be added as they travel.

    Args:
        realization: of the open round.
    """
    codec = codec_of(compressor)
    if compressor.additive_idempotent and codec.in_runs:
        return ValueSum(codec, compressor.count, range(workers))
    return MessageSum(compressor.dim, realization)


def _finite(total: NDArray[np.float32], where: str, of: str) -> NDArray[np.float32]:
    if not is_finite(torch.from_numpy(total)):
        raise NonFiniteError(f"{where}: the sum of the workers' {of} overflows float32")
    return total
