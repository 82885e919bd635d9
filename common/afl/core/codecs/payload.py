"""Compressed vectors to payload bytes and back."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs.indices import EncodedIndices, decode, encode, max_size
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.core.vectors import array_is_finite
from afl.errors import NonFiniteError, ProtocolError

VALUE_BYTES = 4


def pack(compressor: Compressor, compressed: Compressed, role: Role = Role.UPDATE) -> Payload:
    """The payload of a compressed vector; values share their memory with ``compressed``."""
    dim, encoding, listed = compressor.dim, compressor.encoding, compressed.indices
    values = np.ascontiguousarray(compressed.values, dtype="<f4")
    count, section = len(values), bytes_of(values)
    if encoding is Encoding.SIGNS:
        assert compressed.signs is not None
        assert listed is not None
        count = dim - len(listed)
        section = memoryview(section.tobytes() + compressed.signs.tobytes())
        if count < len(listed):
            listed = _others(listed, dim)
    coded: EncodedIndices | None = None
    if listed is not None and len(listed):
        coded = encode(listed, dim)
    header = PayloadHeader(
        role=role,
        encoding=encoding,
        dim=dim,
        count=count,
        value_bytes=_value_bytes(encoding, count),
        index_coding=int(coded.coding) if coded else 0,
        index_parameter=coded.parameter if coded else 0,
        index_bytes=len(coded.data) if coded else 0,
    )
    index_section = (memoryview(coded.data),) if coded and coded.data else ()
    return Payload(header, (*index_section, section))


def unpack(header: PayloadHeader, data: bytes | bytearray | memoryview) -> Compressed:
    """The compressed vector of a whole payload; its values share memory with ``data``.

    Raises:
        ProtocolError: if lengths, indices or signs are not what the header says.
        NonFiniteError: if a value is not finite.
    """
    if len(data) != header.total_bytes:
        raise ProtocolError(f"a payload of {len(data)} bytes; its header says {header.total_bytes}")
    view = memoryview(data)
    indices, rest = view[: header.index_bytes], view[header.index_bytes :]
    match header.encoding:
        case Encoding.INDEXED:
            return Compressed(values_of(rest), _indices(header, indices))
        case Encoding.SIGNS:
            return _signs(header, _indices(header, indices), rest)
        case _:
            return Compressed(values_of(rest))


def _indices(header: PayloadHeader, data: memoryview) -> NDArray[np.int64]:
    listed = _listed(header.encoding, header.count, header.dim)
    if listed == 0 and header.index_coding == header.index_parameter == len(data) == 0:
        return np.zeros(0, dtype=np.int64)
    return decode(header.index_coding, header.index_parameter, data, listed, header.dim)


def _signs(header: PayloadHeader, listed: NDArray[np.int64], data: memoryview) -> Compressed:
    count = header.count
    scale = values_of(data[:VALUE_BYTES])
    signs: NDArray[np.uint8] = np.frombuffer(data[VALUE_BYTES:], dtype=np.uint8)
    if not (scale[0] > 0.0 if count else scale.view(np.uint32)[0] == 0):
        right = "it is positive" if count else "it is zero where every coordinate is"
        raise ProtocolError(f"a scale of {scale[0]} for {count} signs; {right}")
    if count % 8 and signs[-1] >> (count % 8):
        raise ProtocolError(f"{count} signs with bits set behind the last; those are zero")
    zeros = _others(listed, header.dim) if count < header.dim - count else listed
    return Compressed(scale, zeros, signs)


def _others(indices: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """The coordinates that are not among ``indices``, ascending."""
    is_other = np.ones(dim, dtype=np.bool_)
    is_other[indices] = False
    return np.flatnonzero(is_other)


def _listed(encoding: Encoding, count: int, dim: int) -> int:
    """How many indices travel. Beside signs it is those of the zeros, or of the others if they are fewer."""
    match encoding:
        case Encoding.INDEXED:
            return count
        case Encoding.SIGNS:
            return min(count, dim - count)
        case _:
            return 0


def _value_bytes(encoding: Encoding, count: int) -> int:
    if encoding is Encoding.SIGNS:
        return VALUE_BYTES + (count + 7) // 8
    return count * VALUE_BYTES


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
    """The header a compressor's payloads have; ``index_bytes`` is the most that is accepted.

    With ``Encoding.SIGNS`` the count varies too, and what follows from it: the compressor's is the most.
    """
    dim, count, encoding = compressor.dim, compressor.count, compressor.encoding
    listed = dim // 2 if encoding is Encoding.SIGNS else _listed(encoding, count, dim)
    return PayloadHeader(
        role=role,
        encoding=encoding,
        dim=dim,
        count=count,
        value_bytes=_value_bytes(encoding, count),
        index_bytes=max_size(listed, dim),
    )


def check_header(header: PayloadHeader, expected_header: PayloadHeader) -> None:
    """Raise unless ``header`` is what is expected, before anything is allocated for it.

    Raises:
        ProtocolError: naming the field, its value and the right one.
    """
    encoding, dim, count = expected_header.encoding, expected_header.dim, expected_header.count
    right = expected_header
    if header.encoding is encoding is Encoding.SIGNS:
        if not 0 <= header.count <= count:
            raise ProtocolError(f"a payload whose count is {header.count}; here it is 0 to {count}")
        right = dataclasses.replace(
            right,
            count=header.count,
            value_bytes=_value_bytes(encoding, header.count),
            index_bytes=max_size(_listed(encoding, header.count, dim), dim),
        )
    for name in ("role", "encoding", "value_type", "dim", "count", "value_bytes"):
        found, due = getattr(header, name), getattr(right, name)
        if found != due:
            raise ProtocolError(f"a payload whose {name} is {_shown(found)}; here it is {_shown(due)}")
    if header.index_bytes > right.index_bytes:
        raise ProtocolError(
            f"a payload that claims {header.index_bytes} bytes of indices; "
            f"{right.index_bytes} are the most for {header.count} of {header.dim}"
        )


def _shown(value: object) -> str:
    return value.name if isinstance(value, Role | Encoding | ValueType) else str(value)
