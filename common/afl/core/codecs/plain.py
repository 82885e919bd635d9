"""Float32 values: alone, of all coordinates (``DENSE``) or of those that follow from the shared randomness
(``SEEDED``); or after the indices of their coordinates (``INDEXED``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs.codec import Codec, decoded_indices
from afl.core.codecs.indices import max_size
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role
from afl.core.vectors import array_is_finite
from afl.errors import NonFiniteError, ProtocolError

VALUE_BYTES = 4


def values_of(data: bytes | memoryview) -> NDArray[np.float32]:
    """Finite float32 values from raw little-endian bytes, without a copy. Raises ProtocolError if the length
    is no multiple of four, NonFiniteError if a value is not finite."""
    if len(data) % VALUE_BYTES:
        raise ProtocolError(f"{len(data)} bytes of float32 values; the length must be a multiple of 4")
    values: NDArray[np.float32] = np.frombuffer(data, dtype="<f4")
    if not array_is_finite(values):
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NonFiniteError(
            f"the value {values[place]} is not finite (value {place} of {len(values)} received)"
        )
    return values


def bytes_of(values: NDArray[np.float32]) -> memoryview:
    """The raw little-endian bytes of values, without a copy where they are contiguous float32."""
    contiguous: NDArray[np.float32] = np.ascontiguousarray(values, dtype="<f4")
    return contiguous.reshape(-1).view(np.uint8).data


class Plain(Codec):
    """``count`` float32 values and nothing else."""

    in_runs = True

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The payload of the values, whose memory it shares."""
        return self.whole(compressed.values, role, compressor.dim)

    def whole(self, values: NDArray[np.float32], role: Role, dim: int) -> Payload:
        """The payload of values, whose memory it shares; float32 ``[count]``."""
        return self._payload(role, dim, len(values), bytes_of(values))

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:  # noqa: ARG002
        """The values, without a copy."""
        return Compressed(values_of(values))

    def values(self, data: bytes | memoryview) -> NDArray[np.float32]:
        """Finite float32 values, without a copy; raises as :func:`values_of` does."""
        return values_of(data)

    def value_bytes(self, count: int) -> int:
        """Four bytes for each float32 value."""
        return VALUE_BYTES * count


class Indexed(Codec):
    """``count`` float32 values and their indices."""

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The indices in their shortest coding; the values' own memory."""
        assert compressed.indices is not None
        values = compressed.values
        return self._payload(role, compressor.dim, len(values), bytes_of(values), compressed.indices)

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


DENSE = Plain(Encoding.DENSE)
SEEDED = Plain(Encoding.SEEDED)
INDEXED = Indexed(Encoding.INDEXED)
