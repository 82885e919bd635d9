"""Frames against protobuf's own serializer, their content, and the account of bytes."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from afl.core.codecs.indices import MAX_DIM
from afl.core.messages import (
    EVALUATION_PHASE,
    Ack,
    AckStatus,
    Encoding,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
    Role,
    Share,
    Step,
    ValueType,
)
from afl.errors import ProtocolError
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent, Part, Traffic, WireCount, float_equivalents
from afl.wire.frames import (
    Frame,
    ack_frame,
    ack_of,
    chunk_frame,
    chunk_frames,
    commit_frame,
    content_of_worker_frame,
    control,
    joined,
    parse_server_frame,
    parse_worker_frame,
    payload_header_of,
    pieces,
    report_frame,
    report_frames,
    report_of,
    step_frame,
    step_of,
)

DENSE = PayloadHeader(Role.UPDATE, Encoding.DENSE, 25, 25, 100)
INDEXED = PayloadHeader(
    Role.UPDATE, Encoding.INDEXED, 1000, 20, 80, index_coding=3, index_parameter=5, index_bytes=19
)
SENDERS = [pb.ServerFrame, pb.WorkerFrame]
POSITION = Position(9, 3)

Sender = Any


# Chunks: built by hand, joined without a copy.


@given(
    sender=st.sampled_from(SENDERS),
    data=st.binary(max_size=300),
    offset=st.integers(0, 2**64 - 1),
    worker=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
@example(sender=pb.ServerFrame, data=b"", offset=0, worker=0, index=0)
@example(sender=pb.WorkerFrame, data=bytes(127), offset=127, worker=127, index=0)
@example(sender=pb.WorkerFrame, data=bytes(128), offset=128, worker=128, index=1)
@example(sender=pb.ServerFrame, data=bytes(1 << 14), offset=1 << 40, worker=0, index=0)
@example(sender=pb.ServerFrame, data=bytes((1 << 21) + 5), offset=1 << 40, worker=0, index=0)
def test_a_chunk_frame_is_what_protobuf_writes(
    sender: Sender, data: bytes, offset: int, worker: int, index: int
) -> None:
    frame = chunk_frame(sender, DENSE, offset, memoryview(data), worker=worker, index=index)
    right = sender(chunks=[pb.Chunk(worker=worker, payload=index, offset=offset, data=data)])
    assert sender.FromString(frame.data) == right
    # Nothing is written twice or needlessly (protobuf leaves out an empty field).
    assert len(frame.data) == right.ByteSize() + (0 if data else 2)


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3), chunk_bytes=st.integers(1, 60))
@settings(deadline=None)
def test_chunks_are_the_payload_end_to_end(lengths: list[int], chunk_bytes: int) -> None:
    data = bytes(index % 251 for index in range(sum(lengths)))
    sections, start = [], 0
    for length in lengths:
        sections.append(memoryview(data)[start : start + length])
        start += length
    payload = Payload(INDEXED, tuple(sections))
    chunks = [
        chunk
        for frame in chunk_frames(pb.WorkerFrame, payload, chunk_bytes, worker=4, index=1)
        for chunk in parse_worker_frame(frame.data).chunks
    ]
    assert b"".join(chunk.data for chunk in chunks) == data
    assert all(0 < len(chunk.data) <= chunk_bytes for chunk in chunks)
    assert all((chunk.worker, chunk.payload) == (4, 1) for chunk in chunks)
    place = 0
    for chunk in chunks:
        assert chunk.offset == place
        place += len(chunk.data)


@pytest.mark.parametrize(
    ("offset", "length", "indices"),
    [(0, 10, 10), (0, 19, 19), (10, 20, 9), (18, 1, 1), (19, 30, 0), (60, 3, 0)],
)
def test_a_chunk_knows_which_of_its_bytes_are_indices(offset: int, length: int, indices: int) -> None:
    frame = chunk_frame(pb.ServerFrame, INDEXED, offset, memoryview(bytes(length)))
    assert frame.content == FrameContent(Traffic.GRADIENT, values=length - indices, indices=indices)


@pytest.mark.parametrize(
    ("role", "traffic"),
    [
        (Role.UPDATE, Traffic.GRADIENT),
        (Role.MODEL, Traffic.MODEL),
        (Role.FROZEN, Traffic.MODEL),
        (Role.BUFFERS, Traffic.EVALUATION),
    ],
)
def test_a_chunk_counts_as_what_its_payload_is_for(role: Role, traffic: Traffic) -> None:
    header = PayloadHeader(role, Encoding.DENSE, 2, 2, 8)
    assert chunk_frame(pb.ServerFrame, header, 0, memoryview(bytes(8))).content.traffic is traffic


# Frames are sets of parts.


def test_concatenated_frames_are_the_frame_of_all_their_parts() -> None:
    step = Step(POSITION, Kind.TRAIN, (DENSE,))
    payload = Payload(DENSE, (memoryview(bytes(range(100))),))
    frames = [
        step_frame(step),
        *chunk_frames(pb.ServerFrame, payload, 30),
        commit_frame(POSITION, Kind.TRAIN, [0.25, 0.75]),
        ack_frame(Ack(1, POSITION, AckStatus.LATE, "closed"), Kind.TRAIN),
    ]
    whole = joined(frames)
    read = parse_server_frame(whole.data)
    assert step_of(read.step) == step
    assert [len(chunk.data) for chunk in read.chunks] == [30, 30, 30, 10]
    assert b"".join(chunk.data for chunk in read.chunks) == bytes(range(100))
    assert list(read.commit.dual_weights) == [0.25, 0.75]
    assert (read.commit.position.round, read.commit.position.phase) == POSITION
    assert [ack_of(ack) for ack in read.acks] == [Ack(1, POSITION, AckStatus.LATE, "closed")]
    assert whole.content == FrameContent(Traffic.GRADIENT, values=100, scalars=16)


def test_reports_of_several_workers_join_into_one_frame() -> None:
    reports = [Report(worker, POSITION, 0.5, 3, (DENSE,)) for worker in (2, 5)]
    whole = joined([report_frame(report, Kind.TRAIN) for report in reports])
    assert [report_of(entry) for entry in parse_worker_frame(whole.data).reports] == reports
    assert whole.content == FrameContent(Traffic.GRADIENT, scalars=16)


@given(
    worker=st.integers(0, 2**32 - 1),
    round_=st.integers(0, 2**64 - 1),
    phase=st.integers(0, EVALUATION_PHASE),
    loss=st.floats(allow_nan=False),
    examples=st.integers(0, 2**64 - 1),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=4),
    digest=st.binary(max_size=16),
    others=st.lists(
        st.builds(Share, st.integers(0, 2**32 - 1), st.floats(allow_nan=False), st.integers(0, 2**64 - 1)),
        max_size=3,
    ),
    norms=st.lists(st.floats(0, 1e300), max_size=4),
)
@settings(deadline=None)
def test_a_report_crosses_the_wire_unchanged(
    worker: int,
    round_: int,
    phase: int,
    loss: float,
    examples: int,
    metrics: dict[str, float],
    digest: bytes,
    others: list[Share],
    norms: list[float],
) -> None:
    position = Position(round_, phase)
    headers, own = (INDEXED, DENSE), {"others": tuple(others), "tensor_residual_norms": tuple(norms)}
    report = Report(worker, position, loss, examples, headers, metrics, digest, **own)
    frame = report_frame(report, Kind.EVALUATE)
    (read,) = parse_worker_frame(frame.data).reports
    assert report_of(read) == report
    # protobuf leaves a zero out, but not a negative one.
    losses = [loss, *(share.loss for share in others)]
    sent = [number for number in (*losses, *metrics.values()) if struct.pack("<d", number) != bytes(8)]
    scalars = 8 * (len(sent) + len(norms))
    assert content_of_worker_frame(parse_worker_frame(frame.data), lambda *_: None).scalars == scalars
    assert frame.content == FrameContent(Traffic.EVALUATION, scalars=scalars)


@given(
    role=st.sampled_from(Role),
    encoding=st.sampled_from(Encoding),
    value_type=st.sampled_from(ValueType),
    dim=st.integers(0, MAX_DIM),
    sizes=st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    coding=st.integers(0, 3),
    parameter=st.integers(0, 40),
)
@settings(deadline=None)
def test_a_step_and_its_headers_cross_the_wire_unchanged(
    role: Role,
    encoding: Encoding,
    value_type: ValueType,
    dim: int,
    sizes: list[int],
    coding: int,
    parameter: int,
) -> None:
    count, value_bytes, index_bytes = sizes
    header = PayloadHeader(
        role, encoding, dim, count, value_bytes, value_type, coding, parameter, index_bytes
    )
    step = Step(POSITION, Kind.MODEL, (header, DENSE))
    assert step_of(parse_server_frame(step_frame(step).data).step) == step


@pytest.mark.parametrize("status", AckStatus)
def test_an_ack_crosses_the_wire_unchanged(status: AckStatus) -> None:
    ack = Ack(3, POSITION, status, "why", (5, 6))
    frame = ack_frame(ack, Kind.EVALUATE)
    (read,) = parse_server_frame(frame.data).acks
    assert ack_of(read) == ack
    assert frame.content == FrameContent(Traffic.EVALUATION)


def test_control_frames_count_as_control() -> None:
    frame = control(pb.WorkerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)))
    assert parse_worker_frame(frame.data).heartbeat.reply_wanted
    assert frame.content == FrameContent(Traffic.CONTROL)


# What cannot be parsed, or means nothing.


@pytest.mark.parametrize("data", [b"\x00", b"\xff" * 9, b"\x1a\x05ab", b"\x0b", bytes(3)])
def test_garbage_is_refused_with_its_length(data: bytes) -> None:
    for parse in (parse_worker_frame, parse_server_frame):
        with pytest.raises(ProtocolError, match=f"a frame of {len(data)} bytes that cannot be parsed"):
            parse(data)


@given(data=st.binary(max_size=80))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for parse, sender in ((parse_worker_frame, pb.WorkerFrame), (parse_server_frame, pb.ServerFrame)):
        try:
            right = sender.FromString(data)
        except DecodeError:
            with pytest.raises(ProtocolError):
                parse(data)
        else:
            assert parse(data) == right


@pytest.mark.parametrize(
    ("field", "number", "message"),
    [
        ("role", 0, "unknown role of a payload: 0"),
        ("role", 5, "unknown role of a payload: 5"),
        ("encoding", 5, "unknown encoding of a payload: 5"),
        ("value_type", 5, "unknown value type of a payload: 5"),
        ("dim", MAX_DIM + 1, f"a payload of dimension {MAX_DIM + 1}; {MAX_DIM} is the largest"),
    ],
)
def test_a_header_that_this_version_does_not_know_is_refused(field: str, number: int, message: str) -> None:
    entry = pb.Payload(role=1, encoding=1, value_type=1, dim=3, count=3, value_bytes=12)  # type: ignore[arg-type]
    setattr(entry, field, number)
    with pytest.raises(ProtocolError) as caught:
        payload_header_of(entry)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", [0, 6, 99])
def test_a_step_of_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown kind of step: {kind}"):
        step_of(pb.Step(kind=kind))  # type: ignore[arg-type]


def test_an_ack_of_an_unknown_status_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown status of an ack: 0"):
        ack_of(pb.Ack())


def test_a_metric_reported_twice_is_refused() -> None:
    metrics = [pb.Metric(name="loss", value=1.0), pb.Metric(name="loss", value=2.0)]
    with pytest.raises(ProtocolError, match="worker 4 reports a metric twice"):
        report_of(pb.Report(worker=4, metrics=metrics))


# What a received frame holds.


def test_the_content_of_a_received_frame_is_that_of_the_frames_sent() -> None:
    payload = Payload(INDEXED, (memoryview(bytes(19)), memoryview(bytes(80))))
    report = Report(3, POSITION, 1.0, 2, (INDEXED,), {"loss": 1.0})
    frames = [report_frame(report, Kind.TRAIN), *chunk_frames(pb.WorkerFrame, payload, 25, worker=3)]
    whole = joined(frames)
    assert whole.content == FrameContent(Traffic.GRADIENT, values=80, indices=19, scalars=16)
    read = parse_worker_frame(whole.data)
    assert content_of_worker_frame(read, lambda worker: None) == whole.content
    # Apart, the chunks' header is what the server remembers of the report.
    for frame in frames[1:]:
        read = parse_worker_frame(frame.data)
        known = {3: INDEXED}.get
        assert content_of_worker_frame(read, known) == frame.content


def test_a_received_frame_without_report_or_chunk_is_control() -> None:
    read = pb.WorkerFrame(heartbeat=pb.Heartbeat())
    assert content_of_worker_frame(read, lambda _: None) == FrameContent(Traffic.CONTROL)


# The account.


@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from(Traffic),
            st.integers(0, 10**6),
            st.integers(0, 10**6),
            st.integers(0, 10**3),
            st.integers(0, 100),
        ),
        max_size=20,
    )
)
@settings(deadline=None)
def test_the_parts_of_what_was_counted_sum_to_the_wire(
    frames: list[tuple[Traffic, int, int, int, int]],
) -> None:
    count = WireCount()
    for traffic, values, indices, scalars, envelope in frames:
        count.add(values + indices + scalars + envelope, FrameContent(traffic, values, indices, scalars))
    assert count.frames == len(frames)
    assert count.total == sum(count.wire.values()) == sum(count.parts.values())
    # gRPC's prefix is five bytes a message, and part of the envelope.
    assert count.parts[Part.ENVELOPE] == sum(frame[4] + 5 for frame in frames)
    assert count.parts[Part.VALUES] == sum(frame[1] for frame in frames)
    for kind in Traffic:
        assert count.wire[kind] == sum(sum(frame[1:]) + 5 for frame in frames if frame[0] is kind)


def test_a_round_s_frames_by_hand() -> None:
    count = WireCount()
    data = struct.pack("<25f", *range(25))
    frames: list[Frame] = [
        report_frame(Report(0, Position(1, 0), 0.5, 8, (DENSE,)), Kind.TRAIN),
        *chunk_frames(pb.WorkerFrame, Payload(DENSE, (memoryview(data),)), 1000),
    ]
    for frame in frames:
        count.add(len(frame.data), frame.content)
    assert count.parts[Part.VALUES] == 100
    assert count.parts[Part.SCALARS] == 8
    assert count.parts[Part.INDICES] == 0
    assert [len(frame.data) for frame in frames] == [
        len(
            pb.WorkerFrame(
                reports=[
                    pb.Report(
                        position=pb.Position(round=1),
                        loss=0.5,
                        examples=8,
                        payloads=[
                            pb.Payload(role=1, encoding=1, value_type=1, dim=25, count=25, value_bytes=100)  # type: ignore[arg-type]
                        ],
                    )
                ]
            ).SerializeToString()
        ),
        104,
    ]
    assert count.total == sum(len(frame.data) for frame in frames) + 10


@pytest.mark.parametrize(
    ("dim", "count", "bits"),
    [
        (1, 1, 0),
        (2, 1, 1),
        (3, 1, 2),
        (1000, 10, 10),
        (1024, 10, 10),
        (1025, 10, 11),
        (6_603_710, 1_981_113, 23),
    ],
)
def test_top_k_is_charged_k_values_and_k_times_ceil_log2_d_bits(dim: int, count: int, bits: int) -> None:
    header = PayloadHeader(Role.UPDATE, Encoding.INDEXED, dim, count, 4 * count)
    assert bits == math.ceil(math.log2(dim))
    assert float_equivalents(header) == pytest.approx(count + count * bits / 32, rel=1e-15)


def test_rand_k_is_charged_k_and_a_dense_vector_d() -> None:
    assert float_equivalents(PayloadHeader(Role.UPDATE, Encoding.SEEDED, 1000, 100, 400)) == 100
    assert float_equivalents(PayloadHeader(Role.MODEL, Encoding.DENSE, 1000, 1000, 4000)) == 1000
    # A scale and a bit a coordinate, zero or not.
    assert float_equivalents(PayloadHeader(Role.UPDATE, Encoding.SIGNS, 1000, 900, 117)) == 1 + 1000 / 32
    assert float_equivalents(PayloadHeader(Role.BUFFERS, Encoding.DENSE, 9, 9, 36)) == 0
    raw = PayloadHeader(Role.FROZEN, Encoding.DENSE, 10, 10, 10, ValueType.BYTES)
    assert float_equivalents(raw) == 2.5


@given(
    indices=st.integers(0, 40),
    values=st.integers(1, 60),
    most=st.integers(1, 70),
    first=st.tuples(st.integers(0, 2), st.integers(0, 100)),
    sender=st.sampled_from([pb.ServerFrame, pb.WorkerFrame]),
)
def test_a_chunk_in_pieces_is_the_chunk_from_a_byte_on(
    indices: int, values: int, most: int, first: tuple[int, int], sender: Any
) -> None:
    data = bytes(range(indices + values))
    header = PayloadHeader(Role.UPDATE, Encoding.INDEXED, 900, 9, values, index_bytes=indices)
    worker = 5 if sender is pb.WorkerFrame else 0
    whole = chunk_frame(sender, header, 0, memoryview(data), worker=worker, index=1)
    found = list(pieces(whole, most, first))
    chunks = [chunk for piece in found for chunk in sender.FromString(piece.data).chunks]
    begin = {0: 0, 1: min(first[1], len(data)), 2: len(data)}[first[0]]
    assert b"".join(chunk.data for chunk in chunks) == data[begin:]
    assert all(len(chunk.data) <= most and (chunk.worker, chunk.payload) == (worker, 1) for chunk in chunks)
    offset = begin
    for chunk in chunks:
        assert chunk.offset == offset
        offset += len(chunk.data)
    assert sum(piece.content.indices for piece in found) == max(0, indices - begin)
    assert sum(piece.content.values for piece in found) == min(values, len(data) - begin)


def test_what_is_no_chunk_is_left_whole() -> None:
    frame = control(pb.WorkerFrame(heartbeat=pb.Heartbeat()))
    assert list(pieces(frame, 1)) == [frame]


@pytest.mark.parametrize("first", [(0, 0), (0, 24), (0, 36), (1, 0), (1, 8)])
def test_a_report_that_goes_on_leaves_out_what_has_come(first: tuple[int, int]) -> None:
    data = bytes(range(36)), bytes(range(100, 116))
    headers = [
        PayloadHeader(Role.ITERATE, Encoding.DENSE, len(one) // 4, len(one) // 4, len(one)) for one in data
    ]
    payloads = [Payload(header, (memoryview(one),)) for header, one in zip(headers, data, strict=True)]
    report = Report(3, Position(2, 0), 0.5, 8, tuple(headers))
    (frame,) = report_frames(report, Kind.TRAIN, payloads, 16, first)
    parsed = pb.WorkerFrame.FromString(frame.data)
    assert report_of(parsed.reports[0]) == report
    came: list[bytearray] = [bytearray(data[0][: first[1]]), bytearray()]
    if first[0] == 1:
        came = [bytearray(data[0]), bytearray(data[1][: first[1]])]
    for chunk in parsed.chunks:
        assert chunk.offset == len(came[chunk.payload])
        came[chunk.payload] += chunk.data
    assert tuple(map(bytes, came)) == data
