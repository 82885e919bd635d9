"""Reading a frame that is one chunk without copying its data.

protobuf's parser copies a bytes field twice before Python sees it. Payload chunks are nearly all of what
travels, so a frame that holds one chunk and nothing else is read here, in protobuf's wire format; any
other frame, and any that looks unusual, is left to protobuf.
"""

from __future__ import annotations

from typing import NamedTuple

from afl.v1 import federation_pb2 as pb

_VARINT = 0
_LENGTH_DELIMITED = 2
_LONGEST_VARINT = 10

_LIMITS = {
    pb.Chunk.WORKER_FIELD_NUMBER: 1 << 32,
    pb.Chunk.PAYLOAD_FIELD_NUMBER: 1 << 32,
    pb.Chunk.OFFSET_FIELD_NUMBER: 1 << 64,
}
"""Of a chunk's numbers, in the order of :class:`ChunkView`."""


class ChunkView(NamedTuple):
    """A chunk whose data is a view into its frame; the fields are those of ``pb.Chunk``."""

    worker: int
    payload: int
    offset: int
    data: memoryview


def lone_chunk_of_worker(frame: bytes) -> ChunkView | None:
    """The chunk of a worker's frame that holds nothing else, or ``None`` to leave it to protobuf."""
    return _lone_chunk(frame, pb.WorkerFrame.CHUNKS_FIELD_NUMBER)


def lone_chunk_of_server(frame: bytes) -> ChunkView | None:
    """The chunk of a server's frame that holds nothing else, or ``None`` to leave it to protobuf."""
    return _lone_chunk(frame, pb.ServerFrame.CHUNKS_FIELD_NUMBER)


def _lone_chunk(frame: bytes, chunks_field: int) -> ChunkView | None:
    if not frame or frame[0] != chunks_field << 3 | _LENGTH_DELIMITED:
        return None
    length, place = _varint(frame, 1)
    if place + length != len(frame):
        return None
    numbers = dict.fromkeys(_LIMITS, 0)
    while place < len(frame):
        field, wire_type = frame[place] >> 3, frame[place] & 7
        value, place = _varint(frame, place + 1)
        is_last = place + value == len(frame)
        if field == pb.Chunk.DATA_FIELD_NUMBER and wire_type == _LENGTH_DELIMITED and is_last:
            worker, payload, offset = numbers.values()
            return ChunkView(worker, payload, offset, memoryview(frame)[place:])
        if field not in numbers or wire_type != _VARINT or value >= _LIMITS[field]:
            return None
        numbers[field] = value
    return None


def _varint(frame: bytes, place: int) -> tuple[int, int]:
    """The number at ``place`` and the place after it; beyond the frame's end if it is cut off."""
    value = 0
    for index, byte in enumerate(frame[place : place + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    return 0, len(frame) + 1
