"""Integers modulo ``2^bits``: what masks are added to, and what adds up whatever the order.

A payload is the residues, each from 0 to ``2^bits - 1``: of 8, 16, 32 or 64 bits as little-endian words, of
another width packed (:func:`afl.core.codecs._bits.write_fixed`). Nothing is coded by what it is: under a mask
all residues are alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs._bits import blocks, bytes_for, read_fixed, write_fixed
from afl.core.codecs.codec import IntegerCodec
from afl.core.compressors.base import Compressed
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType


class Modular(IntegerCodec):
    """``count`` residues modulo ``2^bits``."""

    value_type = ValueType.MODULAR

    def whole(self, integers: NDArray[Any], role: Role, dim: int) -> Payload:
        """The payload of signed integers, or of residues, ``[count]``; only ``bits`` of each are read."""
        count, bits = len(integers), self.bits
        words = integers.astype(word_type(bits), copy=False)
        if _is_word(bits):
            section = words.astype(f"<u{bits // 8}", copy=False).view(np.uint8).data
            return self._payload(role, dim, count, section)
        stream = np.empty(bytes_for(count * bits), dtype=np.uint8)
        largest = (1 << bits) - 1
        for start, stop in blocks(count):
            write_fixed(stream, words[start:stop] & words.dtype.type(largest), start, count, bits)
        return self._payload(role, dim, count, stream.data)

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:  # noqa: ARG002
        """The residues, in the narrowest unsigned type; read only where they are words."""
        count, bits = header.count, self.bits
        kind = word_type(bits)
        if _is_word(bits):
            return Compressed(np.frombuffer(values, dtype=f"<u{bits // 8}").astype(kind, copy=False))
        stream: NDArray[np.uint8] = np.frombuffer(values, dtype=np.uint8)
        words = np.empty(count, dtype=kind)
        for start, stop in blocks(count):
            words[start:stop] = read_fixed(stream, start, stop, count, bits, kind=kind)
        return Compressed(words)

    def value_bytes(self, count: int) -> int:
        """``bits`` bits a value."""
        return bytes_for(count * self.bits)


@cache
def modular(encoding: Encoding, bits: int) -> Modular:
    """The codec of residues modulo ``2^bits``."""
    return Modular(encoding, bits)


def word_type(bits: int) -> type[np.unsignedinteger[Any]]:
    """The narrowest unsigned type of so many bits or more: its overflow is right modulo ``2^bits``."""
    return next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if np.iinfo(kind).bits >= bits)


def signed(residues: NDArray[Any], bits: int) -> NDArray[Any]:
    """The integers from ``-2^(bits - 1)`` to ``2^(bits - 1) - 1`` that are congruent to them, int32, or int64
    of more than 32 bits."""
    kind = np.int32 if bits <= 32 else np.int64
    spare = np.iinfo(kind).bits - bits
    integers: NDArray[Any] = residues.astype(kind)
    integers <<= spare
    integers >>= spare
    return integers


def _is_word(bits: int) -> bool:
    return bits in {8, 16, 32, 64}
