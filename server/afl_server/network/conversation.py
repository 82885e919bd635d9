"""A peer's frames as the federation's events: parsed, checked for what costs too much, and counted."""

from __future__ import annotations

from collections.abc import Iterator

from afl.core.messages import Kind, PayloadHeader
from afl.errors import ProtocolError
from afl.outside import MOST_OF_REASON, MOST_OF_TRACEBACK, paragraph, words
from afl.security.identity import MOST_WORKERS_A_SESSION
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent, Traffic
from afl.wire.fast_chunk import lone_chunk_of_worker
from afl.wire.frames import check_parts, content_of_worker_frame, parse_worker_frame, position_of, report_of
from afl.wire.keys import key_offer_of
from afl_server.federation import events
from afl_server.network.outbox import Outbox


class Conversation:
    """What one peer says; nothing of it is believed yet.

    Args:
        member: the stream's number.
        outbox: what is sent to the peer, which hears what has come of it.
    """

    def __init__(self, member: int, outbox: Outbox) -> None:
        self._member = member
        self._outbox = outbox
        self._workers = 0
        """How many the peer has asked to speak for."""
        self._payloads: dict[int, tuple[PayloadHeader, ...]] = {}
        """Of each worker's last report."""

    def events_of(self, data: bytes) -> Iterator[events.MemberEvent]:
        """What a frame says, in order; a lone piece of a payload without copying it."""
        member, size = self._member, len(data)
        chunk = lone_chunk_of_worker(data)
        if chunk is not None:
            worker, payload, offset, content = chunk
            header = self._header(worker, payload)
            indices = 0 if header is None else max(0, min(len(content), header.index_bytes - offset))
            held = FrameContent(Traffic.GRADIENT, len(content) - indices, indices)
            yield events.FrameCame(member, size, held)
            yield events.Piece(member, worker, payload, offset, content)
            return
        try:
            frame = parse_worker_frame(data)
            check_parts(frame, self._workers)
        except ProtocolError as error:
            yield events.Malformed(member, str(error), size)
            return
        held = content_of_worker_frame(frame, self._header)
        yield events.FrameCame(member, size, held, has_join=frame.HasField("join"))
        if frame.HasField("join"):
            yield self._join(frame.join)
        if frame.HasField("ready"):
            try:
                yield self._ready(frame.ready)
            except ProtocolError as error:
                yield events.Malformed(member, str(error))
                return
        for message in frame.reports:
            try:
                report = report_of(message)
            except ProtocolError as error:
                yield events.Malformed(member, str(error))
                return
            self._payloads[report.worker] = report.payloads
            self._outbox.all_arrived()
            yield events.ReportBegan(member, report)
        for piece in frame.chunks:
            yield events.Piece(member, piece.worker, piece.payload, piece.offset, piece.data)
        if frame.heartbeat.reply_wanted:
            self._outbox.reply()
        if frame.heartbeat.is_reply:
            self._outbox.answered()
        if frame.HasField("failure"):
            failure = frame.failure
            yield events.FailureTold(
                member,
                failure.worker,
                position_of(failure.position),
                int(failure.cause),
                paragraph(failure.message, MOST_OF_REASON),
                paragraph(failure.traceback, MOST_OF_TRACEBACK),
            )
        if frame.HasField("goodbye"):
            yield events.GoodbyeSaid(member, words(frame.goodbye.reason))

    def _header(self, worker: int, payload: int) -> PayloadHeader | None:
        known = self._payloads.get(worker, ())
        return known[payload] if payload < len(known) else None

    def _join(self, join: pb.Join) -> events.Joined:
        self._workers = len(join.workers)
        if join.run_id:
            self._outbox.be_careful()
        return events.Joined(
            self._member,
            workers=tuple(join.workers),
            incarnation=join.incarnation,
            protocol=join.protocol,
            package_version=words(join.package_version),
            run_id=words(join.run_id),
            applied=position_of(join.applied),
            layout_hash=join.layout_hash,
            task=words(join.task),
            sites=tuple(map(words, join.sites[: MOST_WORKERS_A_SESSION + 1])),
            oldest_protocol=join.oldest_protocol or join.protocol,
        )

    def _ready(self, ready: pb.Ready) -> events.Ready:
        return events.Ready(
            self._member,
            layout_hash=ready.layout_hash,
            frozen_digest=ready.frozen_digest,
            dim=ready.dim,
            realization_digest=ready.realization_digest,
            reported=tuple((entry.worker, position_of(entry.reported)) for entry in ready.workers),
            partial=_partial(ready.partial),
            keys=key_offer_of(ready.keys),
        )


def _partial(message: pb.PartialStep) -> events.PartialStep:
    try:
        kind = Kind(message.kind)
    except ValueError:
        # None, or of a kind that is not known here: such a step is not sent.
        return events.NO_STEP
    position = position_of(message.position)
    return events.PartialStep(position, kind, message.payload, message.offset, message.digest)
