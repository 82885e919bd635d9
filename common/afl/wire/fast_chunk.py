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

_WORKER_TAG = pb.WorkerFrame.CHUNKS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_SERVER_TAG = pb.ServerFrame.CHUNKS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_WORKER = pb.Chunk.WORKER_FIELD_NUMBER
_PAYLOAD = pb.Chunk.PAYLOAD_FIELD_NUMBER
_OFFSET = pb.Chunk.OFFSET_FIELD_NUMBER
_DATA = pb.Chunk.DATA_FIELD_NUMBER
_LIMITS = {_WORKER: 1 << 32, _PAYLOAD: 1 << 32, _OFFSET: 1 << 64}


class ChunkView(NamedTuple):
    """A chunk whose data is a view into its frame; the fields are those of ``pb.Chunk``."""

    worker: int
    payload: int
    offset: int
    data: memoryview


def lone_chunk_of_worker(frame: bytes) -> ChunkView | None:
    """The chunk of a worker's frame that holds nothing else, or ``None`` to leave it to protobuf."""
    return _lone_chunk(frame, _WORKER_TAG)


def lone_chunk_of_server(frame: bytes) -> ChunkView | None:
    """The chunk of a server's frame that holds nothing else, or ``None`` to leave it to protobuf."""
    return _lone_chunk(frame, _SERVER_TAG)


def _lone_chunk(frame: bytes, tag: int) -> ChunkView | None:
    if not frame or frame[0] != tag:
        return None
    length, place = _varint(frame, 1)
    if place + length != len(frame):
        return None
    numbers = {_WORKER: 0, _PAYLOAD: 0, _OFFSET: 0}
    while place < len(frame):
        field, wire_type = frame[place] >> 3, frame[place] & 7
        value, place = _varint(frame, place + 1)
        if field == _DATA and wire_type == _LENGTH_DELIMITED and place + value == len(frame):
            data = memoryview(frame)[place:]
            return ChunkView(numbers[_WORKER], numbers[_PAYLOAD], numbers[_OFFSET], data)
        if field not in numbers or wire_type != _VARINT or value >= _LIMITS[field]:
            return None
        numbers[field] = value
    return None


def _varint(frame: bytes, place: int) -> tuple[int, int]:
    """The number at ``place`` and the place after it; beyond the frame's end if it is cut off."""
    value = 0
    for index in range(_LONGEST_VARINT):
        if place + index >= len(frame):
            break
        byte = frame[place + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    return 0, len(frame) + 1
