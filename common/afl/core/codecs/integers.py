"""Integers on a grid: at a fixed width, or entropy-coded, whichever is smaller.

The first byte of a payload is its form. With ``FIXED`` the integers follow, each plus ``2^(bits - 1)`` as an
unsigned integer of ``bits`` bits (:func:`afl.core.codecs._bits.write_fixed`). With ``ENTROPY`` a histogram
follows, in varints as protobuf has them: the smallest integer (zigzag), the number of integers from it to the
largest, and how often each occurs; then the 32-bit words, little-endian, of constriction's ANS coder with the
histogram as its model. Of a payload of one integer alone, no words follow.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from constriction import stream as constriction
from numpy.typing import NDArray

from afl.core.codecs._bits import blocks, bytes_for, read_fixed, write_fixed
from afl.core.codecs.codec import Codec
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.errors import ProtocolError

MOST_SYMBOLS = 1 << 12
"""The widest histogram: of a wider one the varints alone would cost what an entropy coder saves."""

_WORD_BYTES = 4


class Form(IntEnum):
    """How the integers of a payload are coded; the numbers are those of its first byte."""

    FIXED = 0
    ENTROPY = 1


class Integers(Codec):
    """``count`` integers, from ``-(2^(bits - 1) - 1)`` to ``2^(bits - 1) - 1``."""

    value_type = ValueType.INTEGER
    length_varies = True

    def __init__(self, encoding: Encoding, bits: int) -> None:
        super().__init__(encoding)
        self.bits = bits

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The shortest payload of the integers, int32 or int64 ``[count]``."""
        return self.whole(compressed.values, role, compressor.dim)

    def whole(self, integers: NDArray[Any], role: Role, dim: int) -> Payload:
        """The shortest payload of integers, int32 or int64 ``[count]``."""
        coded = _entropy_coded(integers, self.value_bytes(len(integers)))
        section = memoryview(_fixed(integers, self.bits) if coded is None else coded)
        return self._payload(role, dim, len(integers), section)

    def plain(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The payload at fixed width: made and read faster than the shortest."""
        integers = compressed.values
        return self._payload(role, compressor.dim, len(integers), memoryview(_fixed(integers, self.bits)))

    def expected(self, compressor: Compressor, role: Role) -> PayloadHeader:
        """The most bytes are those at the fixed width."""
        return self.header(compressor.dim, compressor.count + compressor.groups, role)

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:  # noqa: ARG002
        """The integers, int32, or int64 where they have more than 32 bits."""
        return Compressed(integers_of(values, header.count, self.bits))

    def value_bytes(self, count: int) -> int:
        """The form, and ``bits`` bits a value: the most, since what is longer is not sent."""
        return 1 + bytes_for(count * self.bits)

    def float_equivalents(self, header: PayloadHeader) -> float:
        """The bits that travel, over 32."""
        return header.value_bytes / 4


@cache
def integers(encoding: Encoding, bits: int) -> Integers:
    """The codec of integers of so many bits."""
    return Integers(encoding, bits)


def probe() -> bytes:
    """An entropy-coded payload that is always the same: a party that codes it in another way could not decode
    what others send."""
    return _entropy_coded(np.repeat(np.arange(-3, 4, dtype=np.int32), 3 ** np.arange(7)), 1 << 10) or b""


def sum_bits(bits: int, messages: int) -> int:
    """The width that holds the sum of so many messages of ``bits`` bits."""
    return bits + (messages - 1).bit_length()


def integer_type(bits: int) -> type[np.int32 | np.int64]:
    """The type that holds sums of ``bits`` bits."""
    return np.int32 if bits <= 32 else np.int64


def integers_of(data: memoryview, count: int, bits: int) -> NDArray[Any]:
    """``count`` integers from their payload. Raises ProtocolError if it is not the payload of so many."""
    form, coded = data[0], data[1:]
    if form == Form.ENTROPY:
        return _decoded(coded, count, bits)
    if form != Form.FIXED:
        raise ProtocolError(f"integers in the unknown form {form}; {list(map(int, Form))} are known")
    if len(coded) != bytes_for(count * bits):
        raise ProtocolError(
            f"{len(coded)} bytes of integers; {count} of {bits} bits take {bytes_for(count * bits)}"
        )
    stream: NDArray[np.uint8] = np.frombuffer(coded, dtype=np.uint8)
    integers = np.empty(count, dtype=integer_type(bits))
    middle = 1 << (bits - 1)
    for start, stop in blocks(count):
        integers[start:stop] = read_fixed(stream, start, stop, count, bits) - middle
    if integers.min() <= -middle:
        raise ProtocolError(
            f"an integer of {-middle}; in {bits} bits they are from {1 - middle} to {middle - 1}"
        )
    return integers


def _fixed(integers: NDArray[Any], bits: int) -> bytearray:
    count = len(integers)
    section = bytearray(1 + bytes_for(count * bits))
    section[0] = Form.FIXED
    stream: NDArray[np.uint8] = np.frombuffer(section, dtype=np.uint8)[1:]
    for start, stop in blocks(count):
        shifted = (integers[start:stop].astype(np.int64) + (1 << (bits - 1))).view(np.uint64)
        write_fixed(stream, shifted, start, count, bits)
    return section


def _entropy_coded(integers: NDArray[Any], most: int) -> bytes | None:
    """The entropy-coded payload, if it is shorter than ``most`` bytes."""
    smallest, largest = int(integers.min()), int(integers.max())
    if largest - smallest >= MOST_SYMBOLS:
        return None
    symbols = (integers - smallest).astype(np.int32, copy=False)
    counts = np.bincount(symbols)
    zigzag = 2 * smallest if smallest >= 0 else -2 * smallest - 1
    head = bytearray([Form.ENTROPY]) + _varints(np.array([zigzag, len(counts), *counts]))
    occurring = counts[counts > 0]
    least_bits = float((occurring * np.log2(len(integers) / occurring)).sum())
    if len(head) + least_bits / 8 >= most:
        return None
    if len(counts) > 1:
        coder = constriction.stack.AnsCoder()
        coder.encode_reverse(symbols, _model(counts))
        head += coder.get_compressed().astype("<u4", copy=False).tobytes()
    return bytes(head) if len(head) < most else None


def _decoded(data: memoryview, count: int, bits: int) -> NDArray[Any]:
    first, start = _read_varints(data, 2)
    zigzag, length = map(int, first)
    if not 1 <= length <= MOST_SYMBOLS:
        raise ProtocolError(f"a histogram of {length} integers; it has 1 to {MOST_SYMBOLS}")
    counts, read = _read_varints(data[start:], length)
    # Added up in Python: a lying histogram may wrap around.
    total = sum(counts.tolist())
    if total != count or not counts[0] or not counts[-1]:
        raise ProtocolError(
            f"a histogram of {total} integers, {counts[0]} and {counts[-1]} of them at its ends; the payload "
            f"has {count}, and both ends occur"
        )
    smallest = zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1) // 2
    limit = 1 << (bits - 1)
    if smallest <= -limit or smallest + length > limit:
        raise ProtocolError(f"a histogram from {smallest} to {smallest + length - 1}, beyond {bits} bits")
    words = data[start + read :]
    kind = integer_type(bits)
    if length == 1:
        if len(words):
            raise ProtocolError(f"{len(words)} bytes behind a payload of one integer alone")
        return np.full(count, smallest, dtype=kind)
    if len(words) % _WORD_BYTES:
        raise ProtocolError(f"{len(words)} bytes of coded integers; they come in words of {_WORD_BYTES}")
    try:
        coder = constriction.stack.AnsCoder(np.frombuffer(words, dtype="<u4").astype(np.uint32))
    except ValueError as error:
        raise ProtocolError("coded integers whose last word is zero") from error
    symbols: NDArray[np.int32] = coder.decode(_model(counts), count)
    if not coder.is_empty() or not np.array_equal(np.bincount(symbols, minlength=length), counts):
        raise ProtocolError("coded integers that are not those of their histogram")
    decoded: NDArray[Any] = symbols.astype(kind, copy=False)
    decoded += smallest
    return decoded


def _model(counts: NDArray[np.int64]) -> Any:
    return constriction.model.Categorical(counts / counts.sum(), perfect=False)


def _varints(numbers: NDArray[np.int64]) -> bytes:
    """Numbers below 2^63, one after the other."""
    groups = numbers[:, None] >> _SHIFTS
    is_used = (groups > 0) | (_SHIFTS == 0)
    goes_on = np.zeros_like(is_used)
    goes_on[:, :-1] = is_used[:, 1:]
    coded: NDArray[np.uint8] = ((groups & 0x7F) | goes_on << 7).astype(np.uint8)
    content: bytes = coded[is_used].tobytes()
    return content


def _read_varints(data: memoryview, count: int) -> tuple[NDArray[np.int64], int]:
    """The first ``count`` numbers, and how many bytes they take. Raises ProtocolError if there are fewer."""
    stream: NDArray[np.uint8] = np.frombuffer(data[: len(_SHIFTS) * count], dtype=np.uint8)
    ends = np.flatnonzero(stream < 0x80)[:count]
    lengths = np.diff(ends, prepend=-1)
    if len(ends) < count or lengths.max() > len(_SHIFTS):
        raise ProtocolError("a histogram that ends within a number, or has one beyond 63 bits")
    starts = ends - lengths + 1
    used = int(ends[-1]) + 1
    places = np.arange(used) - np.repeat(starts, lengths)
    return np.add.reduceat((stream[:used] & 0x7F).astype(np.int64) << 7 * places, starts), used


_SHIFTS = 7 * np.arange(9)
"""Of the groups of seven bits of a number below 2^63."""
