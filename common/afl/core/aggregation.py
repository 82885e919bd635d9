"""The sum of a compressor's messages: at the server, and of integers already where they are made."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.codecs.codec import IntegerCodec
from afl.core.codecs.integers import sum_bits
from afl.core.codecs.modular import signed, word_type
from afl.core.codecs.payload import codec_of, joint_header, unpack
from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.grid import counted_integers, integer_type
from afl.core.messages import MOST_JOINED, Kind, Payload, PayloadHeader, Report, Share, ValueType
from afl.core.sums import Sum, checked_sum
from afl.errors import DivergedError, ProtocolError


def sum_of(compressor: Compressor, workers: int, realization: Callable[[], Realization]) -> Sum:
    """The sum for a compressor's messages: of their values where these can be added as they travel.

    Args:
        realization: of the open round.
    """
    if compressor.value_type is ValueType.MODULAR:
        return ModularSum(compressor.count, compressor.groups, compressor.bits, workers)
    if compressor.bits:
        return IntegerSum(compressor.count, compressor.groups, compressor.bits, workers)
    codec = codec_of(compressor)
    if compressor.additive_idempotent and codec.in_runs:
        return codec.sum_of(compressor.count, range(workers))
    return MessageSum(compressor.dim, realization)


class WholeMessages(Sum):
    """Messages of integers, each added once it is there: the order changes nothing."""

    is_order_free = True

    def __init__(self, total: NDArray[Any]) -> None:
        self.total = total
        # Not reset: a report may open before the last sum has been taken out of this memory.
        self._messages: dict[int, int] = {}
        self.reset()

    @abc.abstractmethod
    def _take(self, header: PayloadHeader, integers: NDArray[Any], messages: int) -> None:
        """Add a message, which is the sum of so many workers' own.

        Raises:
            ProtocolError: if it cannot be that.
        """

    def reset(self) -> None:
        """Begin a new sum, in the same memory."""
        self.total.fill(0)
        self._arriving: dict[int, bytearray] = {}
        self._added: dict[int, int] = {}

    def expect(self, worker: int, messages: int) -> None:
        """Remember what the message stands for."""
        self._messages[worker] = messages

    def add(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """Nothing is added before the message is complete."""
        message: bytes | bytearray | memoryview = data
        if len(data) < header.total_bytes:
            message = self._arriving.setdefault(worker, bytearray())
            message += data
            if len(message) < header.total_bytes:
                return
            self.drop(worker)
        self._take(header, unpack(header, message).values, self._messages.get(worker, 1))
        self._added[worker] = header.total_bytes

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

    def would_wait(self, worker: int) -> bool:
        """Whether more has come of another message: where too much is incomplete, one is brought to its end
        after the other, so that what is held gets less."""
        longest = max(self._arriving, key=lambda other: len(self._arriving[other]), default=worker)
        return longest != worker

    def vector(self, realization: Realization, dim: int) -> Tensor:
        """What the sum of the integers stands for."""
        dense = torch.zeros(dim)
        realization.add_to(dense, Compressed(self._sums()))
        return dense

    def _sums(self) -> NDArray[Any]:
        """The integers that have been added up."""
        return self.total


class IntegerSum(WholeMessages):
    """Integers in the width that their sum has.

    Args:
        count: integers a message.
        groups: of the grid: so many more integers, behind them, are the groups' own.
        bits: that hold an integer of one worker's.
        workers: m.
    """

    def __init__(self, count: int, groups: int, bits: int, workers: int) -> None:
        self._values = count
        self._limit = (1 << (bits - 1)) - 1
        super().__init__(np.zeros(count + groups, dtype=integer_type(sum_bits(bits, workers))))

    def reset(self) -> None:
        """Begin a new sum, in the same memory."""
        super().reset()
        self.seen: NDArray[np.int64] = np.zeros(4, dtype=np.int64)
        """Of the messages added: :func:`afl.core.grid.counted_integers`, and their bytes."""

    def _take(self, header: PayloadHeader, integers: NDArray[Any], messages: int) -> None:
        most = messages * self._limit
        # What one worker can send, its codec knows.
        if messages > 1 and max(integers.max(), -integers.min()) > most:
            raise ProtocolError(
                f"an integer beyond {most}, the largest that {messages} workers can add up to"
            )
        flags = integers[self._values :]
        if len(flags) and not 0 <= flags.min() <= flags.max() <= messages:
            found = f"from {flags.min()} to {flags.max()}"
            raise ProtocolError(
                f"groups' own integers {found}; of {messages} workers they are 0 to {messages}"
            )
        np.add(self.total, integers, out=self.total)
        self.seen[:3] += counted_integers(integers[: self._values], most)
        self.seen[3] += header.value_bytes


class ModularSum(WholeMessages):
    """Residues modulo ``2^bits``, which may be under masks that cancel in the sum of all workers'.

    Args:
        count: residues a message.
        groups: of the grid: so many more, behind them, are the groups' own.
        bits: the logarithm of the modulus; all workers' integers add up to less.
        workers: m.
    """

    def __init__(self, count: int, groups: int, bits: int, workers: int) -> None:
        self._values = count
        self._bits = bits
        self._workers = workers
        super().__init__(np.zeros(count + groups, dtype=word_type(bits)))

    def _take(self, header: PayloadHeader, integers: NDArray[Any], messages: int) -> None:  # noqa: ARG002
        np.add(self.total, integers, out=self.total)

    def checked(self, where: str, of: str) -> NDArray[Any]:
        """The sum of the integers, int32 ``[count + groups]``.

        Raises:
            DivergedError: if so many workers cannot add up to it: then a mask is left in it.
        """
        sums = self._sums()
        flags = sums[self._values :]
        if len(flags) and not 0 <= flags.min() <= flags.max() <= self._workers:
            raise DivergedError(
                f"{where}: the workers' {of} do not add up; one of them sent another mask than its peers, as "
                "it does if its model or settings are not theirs"
            )
        return sums

    def _sums(self) -> NDArray[Any]:
        return signed(self.total, self._bits)


def joint_reports(
    answers: Iterable[tuple[Kind, tuple[Report, list[Payload]]]],
) -> Iterator[tuple[Kind, tuple[Report, list[Payload]]]]:
    """What a process sends of its workers' answers to a step, which come in ascending order: joint reports of
    those that bring integers to a sum, after the others, which are as they were."""
    joint = []
    for kind, answer in answers:
        if _can_join(kind, answer[0]):
            joint.append(answer)
        else:
            yield kind, answer
    for start in range(0, len(joint), MOST_JOINED):
        yield Kind.TRAIN, _joined(joint[start : start + MOST_JOINED])


def _can_join(kind: Kind, report: Report) -> bool:
    widths = [header.bits for header in report.payloads]
    return kind is Kind.TRAIN and any(widths) and all(widths) and not report.weight


def _joined(answers: Sequence[tuple[Report, list[Payload]]]) -> tuple[Report, list[Payload]]:
    first, *others = (report for report, _ in answers)
    sums = [_sum_of(payloads) for payloads in zip(*(own for _, own in answers), strict=True)]
    shares = tuple(Share(report.worker, report.loss, report.examples) for report in others)
    return replace(first, payloads=tuple(total.header for total in sums), others=shares), sums


def _sum_of(payloads: Sequence[Payload]) -> Payload:
    header = joint_header(payloads[0].header, len(payloads))
    codec = codec_of(header)
    assert isinstance(codec, IntegerCodec)
    type_of = word_type if header.value_type is ValueType.MODULAR else integer_type
    total: NDArray[Any] = np.zeros(header.count, dtype=type_of(header.bits))
    for payload in payloads:
        total += unpack(payload.header, payload.data).values
    return codec.whole(total, header.role, header.dim)


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
