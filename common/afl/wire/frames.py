"""Frames to bytes and back.

Outgoing frames are built here as byte strings, once; incoming ones are parsed and checked into
:mod:`afl.core.messages`. Nothing here knows of sockets.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from afl.core.codecs.indices import MAX_DIM
from afl.core.messages import (
    EVALUATION_PHASE,
    MAX_METRICS,
    MOST_JOINED,
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
from afl.outside import MOST_OF_REASON, words
from afl.security.identity import MOST_WORKERS_A_SESSION
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent, Traffic
from afl.wire.fast_chunk import lone_chunk_of_server, lone_chunk_of_worker

PROTOCOL = 4
"""The newest version of the protocol that this program speaks."""

OLDEST_PROTOCOL = 4
"""The oldest; CONTRIBUTING.md says when either changes."""

METHOD = "/afl.v1.Federation/Session"
SERVICE = "afl.v1.Federation"

JOIN_BELOW_BYTES = 256 * 1024
"""Frames that together are below this go out as one message: a copy is cheaper than a message."""

MAX_FRAME_OVERHEAD = 1 << 20
"""What a frame may hold besides one chunk's data."""

MOST_CHUNKS = 1024
"""In one frame, and :data:`CHUNKS_A_WORKER` besides for each worker of its session."""

CHUNKS_A_WORKER = 4

MOST_PAYLOADS = 16
"""Of one report; no step asks for as many."""

_SCALAR_BYTES = 8
_LENGTH_DELIMITED = 2
_E = TypeVar("_E", bound=enum.IntEnum)
_Sent = TypeVar("_Sent", pb.ServerFrame, pb.WorkerFrame)

Sender: TypeAlias = type[pb.ServerFrame | pb.WorkerFrame]
"""Whose frame it is."""


@dataclass(frozen=True)
class Frame:
    """Bytes ready to be sent, and what they hold."""

    data: bytes
    content: FrameContent


def traffic_of_kind(kind: Kind) -> Traffic:
    """What a step of this kind, its commit and its reports are for."""
    if kind.is_of_evaluation:
        return Traffic.EVALUATION
    return Traffic.MODEL if kind is Kind.MODEL else Traffic.GRADIENT


def spoken_protocol(newest: int, oldest: int) -> int:
    """The newest protocol that this program has in common with one that speaks ``oldest`` to ``newest``; 0 if
    there is none."""
    spoken = min(newest, PROTOCOL)
    return spoken if spoken >= max(oldest, OLDEST_PROTOCOL) else 0


# Building.


def control(frame: pb.ServerFrame | pb.WorkerFrame) -> Frame:
    """A frame of control parts."""
    return Frame(frame.SerializeToString(), FrameContent(Traffic.CONTROL))


def step_frame(step: Step, *, goes_on: bool = False) -> Frame:
    """The opening of a step.

    Args:
        goes_on: whether its chunks go on where the session's Ready said that it was cut.
    """
    message = pb.Step(
        position=position_message(step.position),
        kind=number(step.kind),
        payloads=[_payload(header) for header in step.payloads],
        goes_on=goes_on,
    )
    return Frame(pb.ServerFrame(step=message).SerializeToString(), FrameContent(traffic_of_kind(step.kind)))


def commit_frame(
    position: Position, kind: Kind, dual_weights: Sequence[float], workers: Sequence[int] = ()
) -> Frame:
    """The closing of a step for one session, of which ``workers`` answer; none stands for all of them."""
    message = pb.Commit(position=position_message(position), dual_weights=dual_weights, workers=workers)
    content = FrameContent(traffic_of_kind(kind), scalars=_SCALAR_BYTES * len(dual_weights))
    return Frame(pb.ServerFrame(commit=message).SerializeToString(), content)


def report_frame(report: Report, kind: Kind) -> Frame:
    """The opening of a report."""
    parts: dict[str, Any] = {
        **vars(report),
        "position": position_message(report.position),
        "payloads": [_payload(header) for header in report.payloads],
        "metrics": [pb.Metric(name=name, value=value) for name, value in report.metrics.items()],
        "others": [pb.Share(**vars(share)) for share in report.others],
    }
    del parts["history"]
    content = FrameContent(traffic_of_kind(kind), scalars=_SCALAR_BYTES * _scalars(report))
    return Frame(pb.WorkerFrame(reports=[pb.Report(**parts)]).SerializeToString(), content)


def report_frames(
    report: Report,
    kind: Kind,
    payloads: Sequence[Payload],
    chunk_bytes: int,
    first: tuple[int, int] = (0, 0),
) -> Iterator[Frame]:
    """A report: one frame if it is small, else its opening and its payloads in chunks.

    Each frame is made when it is taken; until then its bytes are the payloads' own.

    Args:
        first: the payload, and the byte of it, from which on they are sent.
    """
    opening = report_frame(report, kind)
    chunks = (
        frame
        for index, payload in enumerate(payloads[first[0] :], first[0])
        for frame in chunk_frames(
            pb.WorkerFrame,
            payload,
            chunk_bytes,
            worker=report.worker,
            index=index,
            first=first[1] if index == first[0] else 0,
        )
    )
    if sum(payload.header.total_bytes for payload in payloads) < JOIN_BELOW_BYTES:
        yield joined([opening, *chunks])
        return
    yield opening
    yield from chunks


def ack_frame(ack: Ack, kind: Kind) -> Frame:
    """The server's answer to a report."""
    return Frame(_ack(ack), FrameContent(traffic_of_kind(kind)))


def receipt_frame(worker: int, position: Position) -> Frame:
    """Tells a worker that its report counted, where no step does."""
    return Frame(_ack(Ack(worker, position, AckStatus.ACCEPTED)), FrameContent(Traffic.CONTROL))


def chunk_frames(
    sender: Sender, payload: Payload, chunk_bytes: int, *, worker: int = 0, index: int = 0, first: int = 0
) -> Iterator[Frame]:
    """A payload in chunks, from byte ``first`` on."""
    offset = 0
    for section in payload.sections:
        begin = min(max(0, first - offset), len(section))
        offset += begin
        for start in range(begin, len(section), chunk_bytes):
            piece = section[start : start + chunk_bytes]
            yield chunk_frame(sender, payload.header, offset, piece, worker=worker, index=index)
            offset += len(piece)


def chunk_frame(
    sender: Sender, header: PayloadHeader, offset: int, data: memoryview, *, worker: int = 0, index: int = 0
) -> Frame:
    """One chunk.

    The fields around the data are serialized by protobuf; the data is joined to them in its wire format
    (a tag, a length, the bytes), because a message object would copy it twice more.
    """
    head = chunk_head(sender, offset, len(data), worker=worker, index=index)
    return Frame(b"".join((head, data)), chunk_content(header, offset, len(data)))


def chunk_head(sender: Sender, offset: int, size: int, *, worker: int = 0, index: int = 0) -> bytes:
    """What comes before a chunk's ``size`` bytes of data in its frame."""
    small = pb.Chunk(worker=worker, payload=index, offset=offset).SerializeToString()
    data_prefix = _tag(pb.Chunk.DATA_FIELD_NUMBER) + _varint(size)
    length = len(small) + len(data_prefix) + size
    return b"".join((_tag(sender.CHUNKS_FIELD_NUMBER), _varint(length), small, data_prefix))


def chunk_content(header: PayloadHeader, offset: int, size: int) -> FrameContent:
    """What a chunk's frame holds."""
    in_indices = max(0, min(size, header.index_bytes - offset))
    traffic = _TRAFFIC_OF_ROLE.get(header.role, Traffic.GRADIENT)
    return FrameContent(traffic, values=size - in_indices, indices=in_indices)


_TRAFFIC_OF_ROLE = {
    Role.MODEL: Traffic.MODEL,
    Role.FROZEN: Traffic.MODEL,
    Role.OPTIMIZER: Traffic.MODEL,
    Role.BUFFERS: Traffic.EVALUATION,
    Role.METRICS: Traffic.EVALUATION,
}


def pieces(frame: Frame, most: int, first: tuple[int, int] = (0, 0)) -> Iterator[Frame]:
    """A frame, in smaller ones where it is a chunk of more than ``most`` bytes.

    Args:
        first: the payload, and the byte of it, before which a chunk's bytes are left out.
    """
    sender: Sender = pb.ServerFrame
    chunk = lone_chunk_of_server(frame.data)
    if chunk is None:
        sender, chunk = pb.WorkerFrame, lone_chunk_of_worker(frame.data)
    if chunk is None:
        yield frame
        return
    skipped = max(0, first[1] - chunk.offset) if chunk.payload == first[0] else 0
    length = len(chunk.data)
    if chunk.payload < first[0] or skipped >= length:
        return
    if not skipped and length <= most:
        yield frame
        return
    for start in range(skipped, length, most):
        data = chunk.data[start : start + most]
        head = chunk_head(sender, chunk.offset + start, len(data), worker=chunk.worker, index=chunk.payload)
        indices = max(0, min(len(data), frame.content.indices - start))
        content = FrameContent(frame.content.traffic, len(data) - indices, indices)
        yield Frame(b"".join((head, data)), content)


def joined(frames: Sequence[Frame]) -> Frame:
    """One frame with the parts of all."""
    content = joined_content([frame.content for frame in frames])
    return Frame(b"".join(frame.data for frame in frames), content)


def joined_content(contents: Sequence[FrameContent]) -> FrameContent:
    """What a joined frame holds; it is for what its payload is for, or else its last part."""
    payloads = (content for content in contents if content.values or content.indices)
    return FrameContent(
        next(payloads, contents[-1]).traffic,
        sum(content.values for content in contents),
        sum(content.indices for content in contents),
        sum(content.scalars for content in contents),
    )


# Parsing.


def _parsed(sender: type[_Sent], data: bytes) -> _Sent:
    try:
        return sender.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"a frame of {len(data)} bytes that cannot be parsed") from error


parse_worker_frame = functools.partial(_parsed, pb.WorkerFrame)
"""A worker's frame; raises a :class:`ProtocolError` if the bytes are not one."""

parse_server_frame = functools.partial(_parsed, pb.ServerFrame)
"""A server's frame; raises a :class:`ProtocolError` if the bytes are not one."""


def check_parts(frame: pb.WorkerFrame, workers: int) -> None:
    """Raise ProtocolError for a frame with more parts than a session of so many workers can have anything to
    say with: each costs the receiver more time than it costs the sender."""

    def check(whose: str, parts: Sized, what: str, most: int) -> None:
        if len(parts) > most:
            raise ProtocolError(f"{whose} {len(parts)} {what}; {most} are the most")

    # Looked at by number alone before there are as many objects of them.
    check("out of range: a Join of", frame.join.workers, "workers", MOST_WORKERS_A_SESSION)
    check("a Ready of", frame.ready.workers, "workers", MOST_WORKERS_A_SESSION)
    check("an offer of", frame.ready.keys.workers, "workers", MOST_WORKERS_A_SESSION)
    check("an offer of", frame.ready.keys.public_keys, "keys", MOST_WORKERS_A_SESSION)
    if len(frame.reports) > max(1, workers):
        raise ProtocolError(f"a frame of {len(frame.reports)} reports in a session of {workers} workers")
    check("a frame of", frame.chunks, "chunks", MOST_CHUNKS + CHUNKS_A_WORKER * workers)
    for report in frame.reports:
        check(f"worker {report.worker}:", report.payloads, "payloads", MOST_PAYLOADS)
        check(f"worker {report.worker}:", report.metrics, "metrics", MAX_METRICS)
        check(f"worker {report.worker}:", report.others, "others in its report", MOST_JOINED - 1)


def position_of(message: pb.Position) -> Position:
    """A position from its message."""
    return Position(message.round, message.phase)


def step_of(message: pb.Step) -> Step:
    """A step's opening. Raises ProtocolError if it is not one this version knows."""
    kind, position = member(Kind, message.kind, "kind of step"), position_of(message.position)
    if position.phase > EVALUATION_PHASE or position.round >= 1 << 63:
        raise ProtocolError(f"a step of round {position.round}, phase {position.phase}; there is none")
    return Step(position, kind, tuple(map(payload_header_of, message.payloads)))


def report_of(message: pb.Report) -> Report:
    """A report's opening. Raises ProtocolError if it is malformed."""
    metrics = {metric.name: metric.value for metric in message.metrics}
    if len(metrics) != len(message.metrics):
        raise ProtocolError(f"worker {message.worker} reports a metric twice")
    for norm in (message.residual_norm, *message.tensor_residual_norms):
        if not 0 <= norm < math.inf:
            raise ProtocolError(f"worker {message.worker} reports a residual of norm {norm}")
    return Report(
        worker=message.worker,
        position=position_of(message.position),
        loss=message.loss,
        examples=message.examples,
        payloads=tuple(map(payload_header_of, message.payloads)),
        metrics=metrics,
        model_digest=message.model_digest,
        weight=message.weight,
        missing=words(message.missing, MOST_OF_REASON),
        residual_norm=message.residual_norm,
        tensor_residual_norms=tuple(message.tensor_residual_norms),
        others=tuple(Share(share.worker, share.loss, share.examples) for share in message.others),
    )


def ack_of(message: pb.Ack) -> Ack:
    """An Ack. Raises ProtocolError if its status is unknown."""
    status = member(AckStatus, message.status, "status of an ack")
    others = tuple(message.others)
    reason = words(message.reason, MOST_OF_REASON)
    return Ack(message.worker, position_of(message.position), status, reason, others)


def payload_header_of(message: pb.Payload) -> PayloadHeader:
    """A payload's header; nothing is allocated for what it claims. Raises ProtocolError if an enumeration is
    unknown or the dimension beyond what the schema allows."""
    if message.dim > MAX_DIM:
        raise ProtocolError(f"a payload of dimension {message.dim}; {MAX_DIM} is the largest")
    return PayloadHeader(
        role=member(Role, message.role, "role of a payload"),
        encoding=member(Encoding, message.encoding, "encoding of a payload"),
        dim=message.dim,
        count=message.count,
        value_bytes=message.value_bytes,
        value_type=member(ValueType, message.value_type, "value type of a payload"),
        index_coding=message.index_coding,
        index_parameter=message.index_parameter,
        index_bytes=message.index_bytes,
        bits=message.bits,
    )


def content_of_worker_frame(
    frame: pb.WorkerFrame, header_of: Callable[[int, int], PayloadHeader | None]
) -> FrameContent:
    """What a worker's frame holds; reports and chunks count as training.

    Args:
        header_of: by worker and number, a payload of the last report before this frame's own.
    """
    if not (frame.reports or frame.chunks):
        return FrameContent(Traffic.CONTROL)
    scalars = sum(_SCALAR_BYTES * _scalars(report) for report in frame.reports)
    values = indices = 0
    own = {
        (report.worker, number_): header
        for report in frame.reports
        for number_, header in enumerate(report.payloads)
    }
    for chunk in frame.chunks:
        place = chunk.worker, chunk.payload
        header = own.get(place) or header_of(*place)
        in_indices = max(0, min(len(chunk.data), (header.index_bytes if header else 0) - chunk.offset))
        indices += in_indices
        values += len(chunk.data) - in_indices
    return FrameContent(Traffic.GRADIENT, values, indices, scalars)


def is_sent(number: float) -> bool:
    """Whether protobuf writes a double: all but positive zero."""
    return number != 0 or math.copysign(1, number) < 0


def _scalars(report: Report | pb.Report) -> int:
    """How many doubles travel: of the losses, the weight, the norm and the metrics."""
    metrics = (
        report.metrics.values() if isinstance(report, Report) else (metric.value for metric in report.metrics)
    )
    losses = (report.loss, *(share.loss for share in report.others))
    single = sum(map(is_sent, (*losses, report.weight, report.residual_norm, *metrics)))
    # In a list a zero travels too.
    return single + len(report.tensor_residual_norms)


def position_message(position: Position) -> pb.Position:
    """The message of a position."""
    return pb.Position(round=position.round, phase=position.phase)


def _payload(header: PayloadHeader) -> pb.Payload:
    return pb.Payload(**vars(header))


def _ack(ack: Ack) -> bytes:
    parts: dict[str, Any] = {**vars(ack), "position": position_message(ack.position)}
    return pb.ServerFrame(acks=[pb.Ack(**parts)]).SerializeToString()


def member(kind: type[_E], number: int, what: str) -> _E:
    """The member that the protocol numbers so; a :class:`ProtocolError` that names ``what`` if none is."""
    try:
        return kind(number)
    except ValueError:
        raise ProtocolError(f"unknown {what}: {number}") from None


def number(member: int) -> Any:
    """The protocol's number of an enumeration member, whose generated type is neither int nor ours."""
    return int(member)


def _tag(field_number: int) -> bytes:
    return _varint(field_number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
