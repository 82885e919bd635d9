"""Compressed vectors to payload bytes and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afl.codecs.indices import EncodedIndices, decode, encode, max_size
from afl.compressors.base import Compressed, Compressor
from afl.errors import NonFiniteError, ProtocolError
from afl.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.vectors import array_is_finite

VALUE_BYTES = 4


def pack(compressor: Compressor, compressed: Compressed, role: Role = Role.UPDATE) -> Payload:
    """The payload of a compressed vector; its sections share memory with ``compressed``."""
    values = np.ascontiguousarray(compressed.values, dtype="<f4")
    coded: EncodedIndices | None = None
    if compressed.indices is not None:
        coded = encode(compressed.indices, compressor.dim)
    header = PayloadHeader(
        role=role,
        encoding=compressor.encoding,
        dim=compressor.dim,
        count=len(values),
        value_bytes=values.nbytes,
        index_coding=int(coded.coding) if coded else 0,
        index_parameter=coded.parameter if coded else 0,
        index_bytes=len(coded.data) if coded else 0,
    )
    index_section = (memoryview(coded.data),) if coded and coded.data else ()
    return Payload(header, (*index_section, bytes_of(values)))


def unpack(header: PayloadHeader, data: bytes | bytearray | memoryview) -> Compressed:
    """The compressed vector of a whole payload; its values share memory with ``data``.

    Raises:
        ProtocolError: if lengths or indices are not what the header says.
        NonFiniteError: if a value is not finite.
    """
    if len(data) != header.total_bytes:
        raise ProtocolError(f"a payload of {len(data)} bytes; its header says {header.total_bytes}")
    view = memoryview(data)
    values = values_of(view[header.index_bytes :])
    if header.encoding is not Encoding.INDEXED:
        return Compressed(values)
    indices = decode(
        header.index_coding, header.index_parameter, view[: header.index_bytes], header.count, header.dim
    )
    return Compressed(values, indices)


def values_of(data: bytes | memoryview) -> NDArray[np.float32]:
    """Finite float32 values from raw little-endian bytes, without a copy.

    Raises:
        ProtocolError: if the length is no multiple of four.
        NonFiniteError: if a value is not finite.
    """
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
    """The raw little-endian bytes of contiguous values, without a copy."""
    return values.reshape(-1).view(np.uint8).data


def expected(compressor: Compressor, role: Role = Role.UPDATE) -> PayloadHeader:
    """The header a compressor's payloads have; ``index_bytes`` is the most that is accepted."""
    is_indexed = compressor.encoding is Encoding.INDEXED
    return PayloadHeader(
        role=role,
        encoding=compressor.encoding,
        dim=compressor.dim,
        count=compressor.count,
        value_bytes=compressor.count * VALUE_BYTES,
        index_bytes=max_size(compressor.count, compressor.dim) if is_indexed else 0,
    )


def check_header(header: PayloadHeader, expected_header: PayloadHeader) -> None:
    """Raise unless ``header`` is what is expected, before anything is allocated for it.

    Raises:
        ProtocolError: naming the field, its value and the right one.
    """
    for name in ("role", "encoding", "value_type", "dim", "count", "value_bytes"):
        found, right = getattr(header, name), getattr(expected_header, name)
        if found != right:
            raise ProtocolError(f"a payload whose {name} is {_shown(found)}; here it is {_shown(right)}")
    if header.index_bytes > expected_header.index_bytes:
        raise ProtocolError(
            f"a payload that claims {header.index_bytes} bytes of indices; "
            f"{expected_header.index_bytes} are the most for {header.count} of {header.dim}"
        )


def _shown(value: object) -> str:
    return value.name if isinstance(value, Role | Encoding | ValueType) else str(value)
