"""Integers on a grid: at a fixed width, or entropy-coded, whichever is smaller.

The first byte of a payload is its form. With ``FIXED`` the integers follow, each plus ``2^(bits - 1)`` as an
unsigned integer of ``bits`` bits (:func:`afl.core.codecs._bits.write_fixed`). Else there follow,
little-endian, the smallest integer, in the fewest of 8, 16, 32 and 64 bits that hold ``bits``; and the number
of integers from it to the largest, in 16 bits. What is coded then are tuples of 4, 2 or 1 neighbouring
integers, each a number to the base of that many; the last tuple is filled up with the last integer.

With ``HUFFMAN``, a tuple is a byte, and the bytes are a raw stream of Deflate (RFC 1951), which brings its
own table. With ``ANS``, there follow a histogram, of how often each integer occurs, in the fewest of 8, 16,
32 and 64 bits that hold the count of all; then the 32-bit words of constriction's ANS coder, whose model is
the histogram; of a payload of one integer alone, none. Tuples are numbered by how likely they are: a decoder
that seeks the right one from the first on finds most of them soon.

ANS comes within a thousandth of the entropy. Huffman's codes take a fifth of the time to read, but none is
shorter than a bit: they are taken where they are nearly as short.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from constriction import stream as constriction
from numpy.typing import NDArray

from afl.core.codecs._bits import blocks, bytes_for, read_fixed, write_fixed
from afl.core.codecs.codec import IntegerCodec
from afl.core.compressors.base import Compressed, Compressor
from afl.core.grid import integer_type
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.errors import ProtocolError

MOST_SYMBOLS = 1 << 12
"""The widest histogram: a wider one alone would cost what an entropy coder saves."""

MOST_TUPLES = 1 << 8
"""Of more than one integer, and of those that have Huffman codes."""

_NEARLY = 1.02
"""Huffman's codes may take so many times the entropy, and with their table as much as two histograms more."""

_LIKELY = 0.6
"""Where a tuple is more likely than this, its code of a whole bit is too long."""

_SOUGHT = 0.8
"""With fewer tuples than this before the right one, on average, ANS finds it in less time by seeking than by
halving their number again and again (measured). What is decoded is the same."""

_ZLIB_MEMORY = 9
"""The most: a table for every 2^15 tuples, not for fewer."""

_WORD_BYTES = 4


class Form(IntEnum):
    """How the integers of a payload are coded; the numbers are those of its first byte."""

    FIXED = 0
    ANS = 1
    HUFFMAN = 2


class Integers(IntegerCodec):
    """``count`` integers, from ``-(2^(bits - 1) - 1)`` to ``2^(bits - 1) - 1``."""

    value_type = ValueType.INTEGER
    length_varies = True

    def whole(self, integers: NDArray[Any], role: Role, dim: int) -> Payload:
        """The shortest payload of integers, ``[count]``."""
        coded = _entropy_coded(integers, self.bits, self.value_bytes(len(integers)))
        section = memoryview(_fixed(integers, self.bits) if coded is None else coded)
        return self._payload(role, dim, len(integers), section)

    def plain(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The payload at fixed width: made and read faster than the shortest."""
        integers = compressed.values
        return self._payload(role, compressor.dim, len(integers), memoryview(_fixed(integers, self.bits)))

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:  # noqa: ARG002
        """The integers, in their :func:`afl.core.grid.integer_type`."""
        return Compressed(integers_of(values, header.count, self.bits))

    def value_bytes(self, count: int) -> int:
        """The form, and ``bits`` bits a value: the most, since what is longer is not sent."""
        return 1 + bytes_for(count * self.bits)


@cache
def integers(encoding: Encoding, bits: int) -> Integers:
    """The codec of integers of so many bits."""
    return Integers(encoding, bits)


def probe() -> bytes:
    """Payloads of the form ANS that are always the same, of tuples of 4, 2 and 1: a party that codes them in
    another way could not decode what others send."""
    integers = (np.repeat(np.arange(width), (4000, *range(1, width))) for width in (3, 7, 20))
    return b"".join(_entropy_coded(each, 16, 1 << 14) or b"" for each in integers)


def sum_bits(bits: int, messages: int) -> int:
    """The width that holds the sum of so many messages of ``bits`` bits."""
    return bits + (messages - 1).bit_length()


def integers_of(data: memoryview, count: int, bits: int) -> NDArray[Any]:
    """``count`` integers from their payload. Raises ProtocolError if it is not the payload of so many."""
    form, coded = data[0], data[1:]
    if form in (Form.ANS, Form.HUFFMAN):
        return _decoded(Form(form), coded, count, bits)
    if form != Form.FIXED:
        raise ProtocolError(f"integers in the unknown form {form}; {list(map(int, Form))} are known")
    if len(coded) != bytes_for(count * bits):
        raise ProtocolError(
            f"{len(coded)} bytes of integers; {count} of {bits} bits take {bytes_for(count * bits)}"
        )
    stream: NDArray[np.uint8] = np.frombuffer(coded, dtype=np.uint8)
    kind = integer_type(bits)
    integers = np.empty(count, dtype=kind)
    middle = 1 << (bits - 1)
    for start, stop in blocks(count):
        # Both wrap around where the type has no bit to spare.
        found = read_fixed(stream, start, stop, count, bits, kind=kind)
        np.subtract(found, np.array(middle).astype(kind), out=integers[start:stop])
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
    kind = integer_type(bits)
    middle = np.array(1 << (bits - 1)).astype(kind)
    for start, stop in blocks(count):
        shifted = (integers[start:stop].astype(kind) + middle).view(f"u{middle.itemsize}")
        write_fixed(stream, shifted, start, count, bits)
    return section


def _entropy_coded(integers: NDArray[Any], bits: int, most: int) -> bytes | None:
    """The entropy-coded payload, if it is shorter than ``most`` bytes."""
    smallest, largest = int(integers.min()), int(integers.max())
    width = largest - smallest + 1
    if width > MOST_SYMBOLS:
        return None
    size = _tuple_size(width)
    missing = -len(integers) % size
    tuples = _tuples(integers, smallest, width, size)
    seen = np.zeros(width**size, dtype=np.int64)
    for start, stop in blocks(len(tuples)):
        seen += np.bincount(tuples[start:stop], minlength=len(seen))
    counts = _counts(seen, width, size)
    counts[int(integers[-1]) - smallest] -= missing
    of_smallest, of_counts = _histogram_types(bits, len(integers))
    span = np.array([smallest], of_smallest).tobytes() + width.to_bytes(2, "little")
    histogram = counts.astype(of_counts).tobytes()
    occurring = counts[counts > 0]
    least = float((occurring * np.log2(len(integers) / occurring)).sum()) / 8
    if 1 + len(span) + least >= most:
        return None
    words = b""
    if width > 1:
        chances = _chances(counts, size)
        if len(chances) <= MOST_TUPLES and chances.max() < _LIKELY:
            words = _huffman(tuples)
            if len(words) <= _NEARLY * least + 2 * len(histogram):
                payload = b"".join((bytes([Form.HUFFMAN]), span, words))
                return payload if len(payload) < most else None
        words = _ans(tuples, chances)
    payload = b"".join((bytes([Form.ANS]), span, histogram, words))
    return payload if len(payload) < most else None


def _huffman(tuples: NDArray[np.unsignedinteger[Any]]) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, _ZLIB_MEMORY, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(tuples.astype(np.uint8, copy=False).data) + coder.flush()


def _ans(tuples: NDArray[np.unsignedinteger[Any]], chances: NDArray[np.float64]) -> bytes:
    order = _order(chances)
    numbers = np.empty(len(order), dtype=np.int32)
    numbers[order] = np.arange(len(order), dtype=np.int32)
    model = constriction.model.Categorical(chances[order], perfect=False)
    coder = constriction.stack.AnsCoder()
    for start, stop in reversed(list(blocks(len(tuples)))):
        coder.encode_reverse(numbers.take(tuples[start:stop]), model)
    words: bytes = coder.get_compressed().astype("<u4", copy=False).tobytes()
    return words


def _decoded(form: Form, data: memoryview, count: int, bits: int) -> NDArray[Any]:
    of_smallest, _ = _histogram_types(bits, count)
    start = of_smallest.itemsize + 2
    if len(data) < start:
        raise ProtocolError("integers that end before they say which may occur")
    smallest = int(np.frombuffer(data[: start - 2], of_smallest)[0])
    width = int.from_bytes(data[start - 2 : start], "little")
    most = MOST_SYMBOLS if form is Form.ANS else MOST_TUPLES
    if not 1 <= width <= most:
        raise ProtocolError(f"a spread of {width} integers; in the form {form.name} it has 1 to {most}")
    limit = 1 << (bits - 1)
    if smallest <= -limit or smallest + width > limit:
        raise ProtocolError(f"integers from {smallest} to {smallest + width - 1}, beyond {bits} bits")
    if form is Form.HUFFMAN:
        values = _values(smallest, width, bits)
        flat = _read_huffman(data[start:], values, -(-count // values.shape[1]))
    else:
        flat = _read_ans(data[start:], smallest, width, count, bits)
    if len(flat) > count and (flat[count:] != flat[count - 1]).any():
        raise ProtocolError("coded integers that are filled up with others than the last")
    return flat[:count]


def _read_huffman(data: memoryview, values: NDArray[Any], tuples: int) -> NDArray[Any]:
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One more than there are: without room for it, the end of the stream might not be read.
        numbers = np.frombuffer(decoder.decompress(data, tuples + 1), dtype=np.uint8)
    except zlib.error as error:
        raise ProtocolError(f"integers whose Huffman codes cannot be read ({error})") from error
    if len(numbers) != tuples or not decoder.eof or decoder.unused_data or numbers.max() >= len(values):
        raise ProtocolError(f"Huffman codes that are not those of {tuples} tuples below {len(values)}")
    return values.take(numbers, axis=0).reshape(-1)


def _read_ans(data: memoryview, smallest: int, width: int, count: int, bits: int) -> NDArray[Any]:
    _, of_counts = _histogram_types(bits, count)
    start = width * of_counts.itemsize
    if len(data) < start:
        raise ProtocolError(f"a histogram of {width} integers that ends within its counts")
    histogram = np.frombuffer(data[:start], of_counts).tolist()
    # Added up in Python: a lying histogram may wrap around.
    total = sum(histogram)
    if total != count or not histogram[0] or not histogram[-1]:
        raise ProtocolError(
            f"a histogram of {total} integers, {histogram[0]} and {histogram[-1]} of them at its ends; the "
            f"payload has {count}, and both ends occur"
        )
    words = data[start:]
    if width == 1:
        if len(words):
            raise ProtocolError(f"{len(words)} bytes behind a payload of one integer alone")
        return np.full(count, smallest, dtype=integer_type(bits))
    if len(words) % _WORD_BYTES:
        raise ProtocolError(f"{len(words)} bytes of coded integers; they come in words of {_WORD_BYTES}")
    try:
        coder = constriction.stack.AnsCoder(np.frombuffer(words, dtype="<u4").astype(np.uint32))
    except ValueError as error:
        raise ProtocolError("coded integers whose last word is zero") from error
    counts, size = np.array(histogram), _tuple_size(width)
    chances = _chances(counts, size)
    order = _order(chances)
    chances = chances[order]
    is_soon = bool(chances @ np.arange(len(chances)) < _SOUGHT)
    model = constriction.model.Categorical(chances, perfect=False, lazy=is_soon)
    values = _values(smallest, width, bits)[order]
    integers = np.empty((-(-count // size), size), dtype=values.dtype)
    seen = np.zeros(len(order), dtype=np.int64)
    for begin, end in blocks(len(integers)):
        numbers = coder.decode(model, end - begin)
        seen[order] += np.bincount(numbers, minlength=len(seen))
        values.take(numbers, axis=0, out=integers[begin:end], mode="clip")
    flat = integers.reshape(-1)
    counts[int(flat[count - 1]) - smallest] += len(flat) - count
    if not (coder.is_empty() and np.array_equal(_counts(seen, width, size), counts)):
        raise ProtocolError("coded integers that are not those of their histogram")
    return flat


def _values(smallest: int, width: int, bits: int) -> NDArray[Any]:
    """The integers of each tuple, by its number, ``[width^size, size]``."""
    size = _tuple_size(width)
    digits = np.arange(width)[:, None] if size == 1 else _digits(width, size)
    return (digits + smallest).astype(integer_type(bits))


def _histogram_types(bits: int, count: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Of the smallest integer, and of how often each occurs."""
    return np.dtype(integer_type(bits)).newbyteorder("<"), np.min_scalar_type(count).newbyteorder("<")


def _tuple_size(width: int) -> int:
    """How many integers a step of the coder stands for, of ``width`` different ones."""
    return next(size for size in (4, 2, 1) if size == 1 or width**size <= MOST_TUPLES)


def _tuples(integers: NDArray[Any], smallest: int, width: int, size: int) -> NDArray[np.unsignedinteger[Any]]:
    """Each tuple as a number to the base ``width``, its first integer the highest digit."""
    # Wraps around where the integers' type is too narrow; the digits are not negative.
    digits: NDArray[np.unsignedinteger[Any]] = (integers - smallest).view(f"u{integers.itemsize}")
    if size == 1:
        return digits.astype(np.uint16)
    padded = np.empty(len(digits) + -len(digits) % size, dtype=np.uint8)
    padded[: len(digits)] = digits
    padded[len(digits) :] = digits[-1]
    # The highest byte of the product is the number; what lies below carries nothing into it.
    factor = sum(width**place << 8 * place for place in range(size))
    numbers: NDArray[np.uint8] = ((padded.view(f"<u{size}") * factor) >> 8 * (size - 1)).astype(np.uint8)
    return numbers


@cache
def _digits(width: int, size: int) -> NDArray[np.int64]:
    """Of each tuple, by its number, int64 ``[width^size, size]``."""
    digits: NDArray[np.int64] = np.arange(width**size)[:, None] // width ** np.arange(size)[::-1] % width
    return digits


@cache
def _occurrences(width: int, size: int) -> NDArray[np.int64]:
    """How often each integer occurs in each tuple, int64 ``[width^size, width]``."""
    occurrences: NDArray[np.int64] = (_digits(width, size)[:, :, None] == np.arange(width)).sum(axis=1)
    return occurrences


def _counts(seen: NDArray[np.int64], width: int, size: int) -> NDArray[np.int64]:
    """How often each integer occurs where each tuple does so often."""
    return seen if size == 1 else seen @ _occurrences(width, size)


def _chances(counts: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """The probability of each tuple."""
    chances: NDArray[np.float64] = counts / counts.sum()
    while size > 1:
        chances, size = np.multiply.outer(chances, chances).ravel(), size // 2
    return chances


def _order(chances: NDArray[np.float64]) -> NDArray[np.int64]:
    """The tuples, the most likely first."""
    return np.argsort(-chances, kind="stable")
