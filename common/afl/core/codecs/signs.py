"""One scale, and a bit for each coordinate that is not zero (``SIGNS``)."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs.codec import Codec, decoded_indices
from afl.core.codecs.indices import max_size
from afl.core.codecs.plain import VALUE_BYTES, bytes_of, values_of
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role
from afl.errors import ProtocolError


class Signs(Codec):
    """``count`` signs after their scale. The indices are those of the zeros, or of the others if they are
    fewer."""

    count_varies = True

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """A copy of scale and signs, one after the other."""
        zeros, signs, dim = compressed.indices, compressed.signs, compressor.dim
        assert zeros is not None
        assert signs is not None
        count = dim - len(zeros)
        section = memoryview(bytes_of(compressed.values).tobytes() + signs.tobytes())
        listed = _others(zeros, dim) if count < len(zeros) else zeros
        return self._payload(role, dim, count, section, listed)

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:
        """The scale must be positive, unless there is no sign, and the bits behind the last sign zero."""
        count, dim = header.count, header.dim
        listed = decoded_indices(header, indices, min(count, dim - count))
        scale = values_of(values[:VALUE_BYTES])
        signs: NDArray[np.uint8] = np.frombuffer(values[VALUE_BYTES:], dtype=np.uint8)
        if not (scale[0] > 0.0 if count else scale.view(np.uint32)[0] == 0):
            right = "it is positive" if count else "it is zero where every coordinate is"
            raise ProtocolError(f"a scale of {scale[0]} for {count} signs; {right}")
        if count % 8 and signs[-1] >> (count % 8):
            raise ProtocolError(f"{count} signs with bits set behind the last; those are zero")
        return Compressed(scale, _others(listed, dim) if count < dim - count else listed, signs)

    def value_bytes(self, count: int) -> int:
        """The scale (four bytes), and a bit for each sign, rounded up to bytes."""
        return VALUE_BYTES + (count + 7) // 8

    def most_index_bytes(self, count: int, dim: int) -> int:
        """The most bytes that the indices of the zeros, or of the others, can need."""
        return max_size(min(count, dim - count), dim)

    def float_equivalents(self, header: PayloadHeader) -> float:
        """The paper does not charge for signs; they count as it charges for indices: the scale, and a bit a
        coordinate."""
        return 1 + header.dim / 32

    def expected(self, compressor: Compressor, role: Role) -> PayloadHeader:
        """The count varies; the compressor's is the most. Indices are longest for half of the coordinates."""
        most = super().expected(compressor, role)
        return dataclasses.replace(most, index_bytes=max_size(most.dim // 2, most.dim))


SIGNS = Signs(Encoding.SIGNS)


def _others(indices: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """The coordinates that are not among ``indices``, ascending."""
    is_other = np.ones(dim, dtype=np.bool_)
    is_other[indices] = False
    return np.flatnonzero(is_other)
