"""Vectorized bit streams: positions of ones in a bitmap, and unsigned integers of a fixed width.

Everything here works a block at a time, so that temporaries stay in a core's cache whatever the length
of the stream. The layouts are those that :mod:`afl.core.codecs.indices` documents; all of them put the first
bit of a stream in the lowest bit of its first byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A multiple of 8, so that a block of values of any width starts at a byte. 2**15 int64 are 256 KiB.
BLOCK = 1 << 15
_BLOCK_BYTES = 1 << 13


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """Consecutive half-open ranges ``(start, stop)`` that cover ``range(count)``, ``BLOCK`` items each."""
    for start in range(0, count, BLOCK):
        yield start, min(start + BLOCK, count)


def bytes_for(bits: int) -> int:
    """The bytes that hold ``bits`` bits."""
    return (bits + 7) // 8


def set_ones(stream: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
    """Set the bits at ``positions`` (strictly ascending, int64 ``[k]``, ``k >= 1``) in a stream of bytes, in
    place; bits already set stay set."""
    first_byte = int(positions[0]) >> 3
    last_byte = int(positions[-1]) >> 3
    bits = np.zeros(8 * (last_byte + 1 - first_byte), dtype=np.uint8)
    bits[positions - 8 * first_byte] = 1
    # The first byte may hold the last bits of the block before.
    stream[first_byte : last_byte + 1] |= np.packbits(bits, bitorder="little")


def find_ones(stream: NDArray[np.uint8], out: NDArray[np.int64]) -> int:
    """Write the ascending positions of the ones in a stream of bytes to ``out``, int64 ``[k]``; returns how
    many there are, and stops early, with a number above ``k``, once there are more than ``k``."""
    found = 0
    for start in range(0, stream.size, _BLOCK_BYTES):
        bits = np.unpackbits(stream[start : start + _BLOCK_BYTES], bitorder="little")
        ones = np.flatnonzero(bits.view(np.bool_))
        stop = found + ones.size
        if stop > out.size:
            return stop
        np.add(ones, 8 * start, out=out[found:stop])
        found = stop
    return found


def write_fixed(
    stream: NDArray[np.uint8], values: NDArray[np.unsignedinteger[Any]], start: int, count: int, width: int
) -> None:
    """Write some of ``count`` unsigned integers of ``width`` bits to their place in ``stream``.

    Args:
        stream: uint8 ``[bytes_for(count * width)]``; the places of ``values`` are overwritten.
        values: the integers from place ``start`` on, a multiple of 8; each below ``2**width``.
    """
    planes, rest = divmod(width, 8)
    for plane in range(planes):
        offset = plane * count + start
        stream[offset : offset + values.size] = (values >> (8 * plane)).astype(np.uint8)
    if rest:
        packed = _pack((values >> (8 * planes)).astype(np.uint8), rest)
        offset = planes * count + start * rest // 8
        stream[offset : offset + packed.size] = packed


def read_fixed(
    stream: NDArray[np.uint8],
    start: int,
    stop: int,
    count: int,
    width: int,
    *,
    kind: type[np.integer[Any]] = np.int64,
) -> NDArray[Any]:
    """The integers from place ``start``, a multiple of 8, to ``stop`` that :func:`write_fixed` wrote:
    ``[stop - start]``, of a type of at least ``width`` bits, whose sign is a bit like the others."""
    planes, rest = divmod(width, 8)
    values = np.zeros(stop - start, dtype=kind)
    for plane in range(planes):
        part = stream[plane * count + start : plane * count + stop]
        values |= part.astype(kind) << (8 * plane)
    if rest:
        offset = planes * count + start * rest // 8
        packed = stream[offset : offset + bytes_for((stop - start) * rest)]
        values |= _unpack(packed, stop - start, rest).astype(kind) << (8 * planes)
    return values


def _pack(values: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Pack integers of 1 to 7 bits; uint8 ``[n]`` to uint8 ``[bytes_for(n * width)]``, padded with zeros."""
    if width == 4:
        pairs = np.zeros(values.size + values.size % 2, dtype=np.uint8)
        pairs[: values.size] = values
        both: NDArray[np.uint16] = pairs.view("<u2")
        return (both | both >> 4).astype(np.uint8)
    bits = np.empty((values.size, width), dtype=np.uint8)
    for place in range(width):
        np.bitwise_and(values >> place, 1, out=bits[:, place])
    return np.packbits(bits, bitorder="little")


def _unpack(packed: NDArray[np.uint8], count: int, width: int) -> NDArray[np.uint8]:
    """The inverse of :func:`_pack`: uint8 ``[bytes_for(count * width)]`` to uint8 ``[count]``."""
    if width == 4:
        spread = packed.astype("<u2")
        pairs: NDArray[np.uint8] = ((spread | spread << 4) & 0x0F0F).view(np.uint8)
        return pairs[:count]
    bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    values = bits[:, 0].copy()
    for place in range(1, width):
        values |= bits[:, place] << place
    return values
