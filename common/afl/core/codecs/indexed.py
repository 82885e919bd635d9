"""Values after the indices of their coordinates (``INDEXED``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs.codec import Codec
from afl.core.codecs.indices import EncodedIndices, decode, encode, max_size
from afl.core.codecs.plain import VALUE_BYTES, bytes_of, values_of
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role


class Indexed(Codec):
    """``count`` float32 values and their indices."""

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The indices in their shortest coding; the values' own memory."""
        assert compressed.indices is not None
        values, dim = compressed.values, compressor.dim
        return self._payload(
            role, dim, len(values), bytes_of(values), encoded_indices(compressed.indices, dim)
        )

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:
        """The values, without a copy, and their decoded indices."""
        return Compressed(values_of(values), decoded_indices(header, indices, header.count))

    def value_bytes(self, count: int) -> int:
        """Four bytes for each float32 value."""
        return VALUE_BYTES * count

    def most_index_bytes(self, count: int, dim: int) -> int:
        """The most bytes that the shortest coding of ``count`` indices can need."""
        return max_size(count, dim)

    def float_equivalents(self, header: PayloadHeader) -> float:
        """A value, and ``ceil(log2 d) / 32`` for its index."""
        return header.count * (1 + (header.dim - 1).bit_length() / 32)


INDEXED = Indexed(Encoding.INDEXED)


def encoded_indices(indices: NDArray[np.int64], dim: int) -> EncodedIndices | None:
    """Ascending indices in their shortest coding; ``None`` where there are none."""
    return encode(indices, dim) if len(indices) else None


def decoded_indices(header: PayloadHeader, data: memoryview, count: int) -> NDArray[np.int64]:
    """``count`` ascending indices below the header's dimension, int64 ``[count]``.

    Raises:
        ProtocolError: if the bytes are not those of so many.
    """
    if count == 0 and header.index_coding == header.index_parameter == len(data) == 0:
        return np.zeros(0, dtype=np.int64)
    return decode(header.index_coding, header.index_parameter, data, count, header.dim)
