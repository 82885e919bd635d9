"""Compressed vectors to payload bytes and back, each by the codec that its compressor or header names."""

from __future__ import annotations

import dataclasses

from afl.core.codecs.codec import Codec
from afl.core.codecs.integers import Integers, integers, sum_bits
from afl.core.codecs.modular import modular
from afl.core.codecs.plain import DENSE, INDEXED, SEEDED
from afl.core.codecs.signs import SIGNS
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.errors import ProtocolError

CODECS: dict[tuple[Encoding, ValueType], Codec] = {
    (codec.encoding, codec.value_type): codec for codec in (DENSE, INDEXED, SEEDED, SIGNS)
}


def codec_of(form: Compressor | PayloadHeader) -> Codec:
    """The codec of a compressor's messages, or of a payload whose header has been checked."""
    if form.value_type is ValueType.INTEGER:
        return integers(form.encoding, form.bits)
    if form.value_type is ValueType.MODULAR:
        return modular(form.encoding, form.bits)
    return CODECS[form.encoding, form.value_type]


def pack(compressor: Compressor, compressed: Compressed, role: Role = Role.UPDATE) -> Payload:
    """The payload of a compressed vector; float32 values share their memory with ``compressed``."""
    return codec_of(compressor).pack(compressor, compressed, role)


def pack_to_add(compressor: Compressor, compressed: Compressed) -> Payload:
    """The payload of a compressed vector that is read again, and added to others, before anything is sent:
    integers at fixed width, which takes less time than their shortest form."""
    codec = codec_of(compressor)
    make = codec.plain if isinstance(codec, Integers) else codec.pack
    return make(compressor, compressed, Role.UPDATE)


def unpack(header: PayloadHeader, data: bytes | bytearray | memoryview) -> Compressed:
    """The compressed vector of a whole payload; its values share memory with ``data``. Raises ProtocolError
    if lengths, indices or signs are not what the header says, NonFiniteError if a value is not finite."""
    if len(data) != header.total_bytes:
        raise ProtocolError(f"a payload of {len(data)} bytes; its header says {header.total_bytes}")
    view = memoryview(data)
    return codec_of(header).unpack(header, view[: header.index_bytes], view[header.index_bytes :])


def expected(compressor: Compressor, role: Role = Role.UPDATE) -> PayloadHeader:
    """The header a compressor's payloads have; ``index_bytes`` is the most that is accepted, and so are the
    count and ``value_bytes`` where they vary."""
    return codec_of(compressor).expected(compressor, role)


def joint_header(header: PayloadHeader, workers: int) -> PayloadHeader:
    """The header of the sum of so many workers' payloads of integers, each with this one; ``value_bytes`` is
    the most."""
    if header.value_type is ValueType.MODULAR:
        return header
    codec = integers(header.encoding, sum_bits(header.bits, workers))
    return codec.header(header.dim, header.count, header.role)


def check_header(header: PayloadHeader, expected_header: PayloadHeader) -> None:
    """Raise a ProtocolError unless ``header`` is what is expected, before anything is allocated for it."""
    right = expected_header
    codec = codec_of(right)
    if codec.count_varies and header.encoding is right.encoding:
        if header.count > right.count:
            raise ProtocolError(f"a payload whose count is {header.count}; here it is 0 to {right.count}")
        right = codec.header(right.dim, header.count, right.role)
    if codec.length_varies and 1 < header.value_bytes < right.value_bytes:
        right = dataclasses.replace(right, value_bytes=header.value_bytes)
    for name in ("role", "encoding", "value_type", "dim", "count", "bits", "value_bytes"):
        found, due = getattr(header, name), getattr(right, name)
        if found != due:
            found, due = getattr(found, "name", found), getattr(due, "name", due)
            raise ProtocolError(f"a payload whose {name} is {found}; here it is {due}")
    if header.index_bytes > right.index_bytes:
        raise ProtocolError(
            f"a payload that claims {header.index_bytes} bytes of indices; "
            f"{right.index_bytes} are the most for {header.count} of {header.dim}"
        )
