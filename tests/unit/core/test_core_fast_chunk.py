from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.core.messages import Encoding, PayloadHeader, Role
from afl.v1 import federation_pb2 as pb
from afl.wire.fast_chunk import lone_chunk_of_server, lone_chunk_of_worker
from afl.wire.frames import chunk_frame

WORDS = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)


@given(worker=WORDS, payload=WORDS, offset=LONG, data=st.binary(min_size=1, max_size=300))
def test_it_reads_what_protobuf_writes(worker: int, payload: int, offset: int, data: bytes) -> None:
    chunk = pb.Chunk(worker=worker, payload=payload, offset=offset, data=data)
    for frame, read in (
        (pb.WorkerFrame(chunks=[chunk]), lone_chunk_of_worker),
        (pb.ServerFrame(chunks=[chunk]), lone_chunk_of_server),
    ):
        view = read(frame.SerializeToString())
        assert view is not None
        assert (view.worker, view.payload, view.offset, bytes(view.data)) == (worker, payload, offset, data)


@given(worker=WORDS, index=st.integers(0, 9), offset=LONG, data=st.binary(min_size=1, max_size=300))
def test_protobuf_and_it_read_what_we_write(worker: int, index: int, offset: int, data: bytes) -> None:
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, 1, 1, 4)
    frame = chunk_frame(pb.WorkerFrame, header, offset, memoryview(data), worker=worker, index=index)
    (chunk,) = pb.WorkerFrame.FromString(frame.data).chunks
    assert (chunk.worker, chunk.payload, chunk.offset, chunk.data) == (worker, index, offset, data)
    view = lone_chunk_of_worker(frame.data)
    assert view is not None
    assert (view.worker, view.payload, view.offset, bytes(view.data)) == (worker, index, offset, data)


def test_the_data_is_not_copied() -> None:
    frame = pb.WorkerFrame(chunks=[pb.Chunk(data=b"abc")]).SerializeToString()
    view = lone_chunk_of_worker(frame)
    assert view is not None
    assert view.data.obj is frame


@pytest.mark.parametrize(
    "frame",
    [
        pb.WorkerFrame(),
        pb.WorkerFrame(heartbeat=pb.Heartbeat()),
        pb.WorkerFrame(chunks=[pb.Chunk(data=b"a"), pb.Chunk(data=b"b")]),
        pb.WorkerFrame(reports=[pb.Report(worker=1)], chunks=[pb.Chunk(data=b"a")]),
        pb.WorkerFrame(chunks=[pb.Chunk(data=b"a")], heartbeat=pb.Heartbeat()),
        pb.WorkerFrame(chunks=[pb.Chunk(worker=3)]),
    ],
)
def test_any_other_frame_is_left_to_protobuf(frame: pb.WorkerFrame) -> None:
    assert lone_chunk_of_worker(frame.SerializeToString()) is None


@given(st.binary(max_size=60))
def test_what_it_accepts_of_any_bytes_protobuf_reads_alike(data: bytes) -> None:
    data = b"\x22" + data
    view = lone_chunk_of_worker(data)
    if view is None:
        return
    (chunk,) = pb.WorkerFrame.FromString(data).chunks
    assert (chunk.worker, chunk.payload, chunk.offset, chunk.data) == (
        view.worker,
        view.payload,
        view.offset,
        bytes(view.data),
    )


@given(st.integers(1, 40), st.integers(0, 2**64))
def test_a_frame_cut_anywhere_is_left_to_protobuf(cut: int, length: int) -> None:
    whole = pb.WorkerFrame(chunks=[pb.Chunk(worker=1, offset=2**60, data=bytes(30))]).SerializeToString()
    assert lone_chunk_of_worker(whole[: -min(cut, len(whole))]) is None
    assert lone_chunk_of_worker(b"\x22" + _varint(length) + b"\x22\x01") is None or length == 2


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
