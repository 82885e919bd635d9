"""One worker process's conversation with the server, without sockets: frames in, frames out."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from afl.core.messages import NOWHERE, Ack, AckStatus, GoodbyeStatus, Kind, Position
from afl.daemon.fault_points import reached
from afl.errors import ProtocolError
from afl.security.identity import MOST_WORKERS_A_SESSION, WorkerIds
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent, Traffic
from afl.wire.fast_chunk import lone_chunk_of_worker
from afl.wire.frames import (
    JOIN_BELOW_BYTES,
    Frame,
    ack_frame,
    check_parts,
    content_of_worker_frame,
    control,
    joined,
    number,
    parse_worker_frame,
    position_of,
    report_of,
    traffic_of_kind,
)
from afl_server.federation.broadcast import Broadcast
from afl_server.network.authentication import Identity

if TYPE_CHECKING:
    from afl_server.coordinator import Coordinator

HEARTBEAT = control(pb.ServerFrame(heartbeat=pb.Heartbeat()))
HEARTBEAT_WITH_REPLY = control(pb.ServerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)))


MOST_QUEUED = 1024
"""Frames and steps that may wait for a peer to take them, and :data:`QUEUED_A_WORKER` for each of its workers
besides: what a step sends, with its acks, is far less."""

QUEUED_A_WORKER = 8

PARTS_A_TURN = 64
"""Reports and chunks of one frame after which other sessions have their turn."""


class State(enum.Enum):
    """How far the conversation is."""

    NEW = "new"
    JOINED = "joined"
    READY = "ready"
    ENDED = "ended"


class SessionOverError(Exception):
    """The peer has said goodbye."""


class Session:
    """The server's side of one stream.

    Args:
        peer: the peer's address, for the log only.
        identity: which workers it may speak for; a Join says for which of them it does.
    """

    def __init__(self, coordinator: Coordinator, peer: str, identity: Identity) -> None:
        self.peer = peer
        self.identity = identity
        self.state = State.NEW
        self.workers: tuple[int, ...] = ()
        self.incarnation = b""
        self.applied: Position = NOWHERE
        self.reported: dict[int, Position] = {}
        self.told_held: set[int] = set()
        """Workers whose report was held when they were welcomed: they do not send it by themselves."""
        self.owes: set[int] = set()
        """Workers whose report for a step that is closed has not come: the session is sent no other step."""
        self.last_seen = time.monotonic()
        self.is_paused = False
        """Whether the server has stopped reading from it, because its turn in the sum has not come."""
        self.heard = asyncio.Event()
        """Set whenever a frame comes."""
        self.is_over = asyncio.Event()
        self.ended = asyncio.Event()
        """Set once nothing more is queued."""
        self.is_given_up = False
        """Whether the peer is not even waited for to take its goodbye."""
        self._coordinator = coordinator
        self._outbox: asyncio.Queue[Frame | Broadcast | None] = asyncio.Queue()

    @property
    def label(self) -> str:
        """How logs name it."""
        return f"{WorkerIds.of(self.workers).named} at {self.peer}" if self.workers else f"peer {self.peer}"

    # Outgoing.

    def send(self, item: Frame | Broadcast) -> None:
        """Queue a frame, or a step to follow to its end; give up a peer that has long taken none."""
        if self.state is State.ENDED:
            return
        if self._outbox.qsize() >= MOST_QUEUED + QUEUED_A_WORKER * len(self.workers):
            self.give_up()
            return
        self._outbox.put_nowait(item)

    def beat(self) -> None:
        """Queue a heartbeat, unless the peer has yet to take what is queued: it is alive or it is not."""
        if self._outbox.empty():
            self.send(HEARTBEAT)

    def end(self, status: GoodbyeStatus, reason: str) -> None:
        """Say goodbye and end after what is queued has been sent."""
        if self.state is State.ENDED:
            return
        run_id = self._coordinator.run_id if status is GoodbyeStatus.FINISHED else ""
        goodbye = pb.Goodbye(status=number(status), reason=reason, run_id=run_id)
        self._outbox.put_nowait(control(pb.ServerFrame(goodbye=goodbye)))
        self._outbox.put_nowait(None)
        self.state = State.ENDED
        self.ended.set()

    def give_up(self) -> None:
        """End without a goodbye, which the peer does not take."""
        self.state = State.ENDED
        self.is_given_up = True
        self.ended.set()

    async def outgoing(self) -> AsyncIterator[Frame]:
        """The frames to write, in order, until the end."""
        while (item := await self._outbox.get()) is not None:
            if isinstance(item, Frame):
                yield item
                continue
            async for frame in self._follow(item):
                yield frame

    async def _follow(self, broadcast: Broadcast) -> AsyncIterator[Frame]:
        sent = 0
        while not broadcast.is_closed:
            if broadcast.is_abandoned:
                return
            while sent < len(broadcast.frames):
                yield broadcast.frames[sent]
                sent += 1
            if not broadcast.is_closed:
                await broadcast.change()
        commit = broadcast.commit(self.workers)
        rest = broadcast.frames[sent:]
        if rest and len(rest[-1].data) < JOIN_BELOW_BYTES:
            commit = joined([rest.pop(), commit])
        for frame in rest:
            yield frame
        reached("server.mid-broadcast")
        yield commit
        answering = sum(worker in broadcast.participants for worker in self.workers)
        has_weights = bool(broadcast.dual_weights)
        self._coordinator.counters.charge_step(broadcast.headers, answering, has_weights=has_weights)

    # Incoming.

    async def receive(self, data: bytes) -> None:
        """Handle one frame.

        Raises:
            ProtocolError: if the conversation does not allow it; the session must end.
            NonFiniteError: if it carries a number that is not finite; the session must end.
            SessionOverError: if the peer says goodbye.
        """
        self.last_seen = time.monotonic()
        self.heard.set()
        chunk = lone_chunk_of_worker(data)
        if chunk is not None and self.state is State.READY:
            engine = self._coordinator.engine
            header = engine.incoming_header(chunk.worker)
            self._coordinator.counters.count_chunk(len(data), chunk, header, engine.step.kind)
            self._must_host(chunk.worker)
            await self._answer(await self._coordinator.add_piece(chunk))
            return
        try:
            frame = parse_worker_frame(data)
            check_parts(frame, len(self.workers))
        except ProtocolError:
            self._coordinator.counters.uplink.add(len(data), FrameContent(Traffic.CONTROL))
            raise
        self._count(len(data), frame)
        if self.state is State.ENDED:
            return
        if self.state is State.NEW and not frame.HasField("join"):
            raise ProtocolError("the first frame of a session must be a Join")
        if frame.HasField("join"):
            if self.state is not State.NEW:
                raise ProtocolError("a second Join in one session")
            await self._coordinator.reception.join(self, frame.join)
        if frame.HasField("ready"):
            if self.state is not State.JOINED:
                raise ProtocolError("a Ready that does not follow a Join")
            await self._coordinator.reception.make_ready(self, frame.ready)
        if frame.reports or frame.chunks:
            await self._reports(frame)
        if frame.HasField("heartbeat") and frame.heartbeat.reply_wanted:
            self.send(HEARTBEAT)
        if frame.HasField("failure"):
            self._coordinator.reception.fail(self, frame.failure)
        if frame.HasField("goodbye"):
            raise SessionOverError(frame.goodbye.reason)

    async def _reports(self, frame: pb.WorkerFrame) -> None:
        if self.state is not State.READY:
            raise ProtocolError("a report before the session is ready")
        for count, message in enumerate(frame.reports, 1):
            if await self._goes_on(count):
                self._must_host(message.worker)
                await self._answer(await self._coordinator.begin_report(report_of(message)))
        for count, chunk in enumerate(frame.chunks, 1):
            if await self._goes_on(count):
                self._must_host(chunk.worker)
                await self._answer(await self._coordinator.add_piece(chunk))

    async def _goes_on(self, count: int) -> bool:
        """Let others have their turn, after so many parts of a frame; whether the session still lasts."""
        if count % PARTS_A_TURN == 0:
            await asyncio.sleep(0)
        return self.state is not State.ENDED

    async def _answer(self, ack: Ack | None) -> None:
        """Send what is not plain acceptance: the next commit is the acknowledgement of what counts."""
        if ack is not None and ack.reason:
            self.send(ack_frame(ack, Kind.TRAIN))
            if ack.status is AckStatus.LATE:
                await self._coordinator.answered_late(self, ack)

    def _must_host(self, worker: int) -> None:
        if not self._coordinator.is_owner(self, worker):
            raise ProtocolError(
                f"worker {worker} is not one of this session's ({WorkerIds.of(self.workers)})"
            )

    def _count(self, length: int, frame: pb.WorkerFrame) -> None:
        engine = self._coordinator.engine
        content = content_of_worker_frame(frame, engine.incoming_header, traffic_of_kind(engine.step.kind))
        self._coordinator.counters.uplink.add(length, content)


def read_join(message: pb.Join) -> tuple[int, ...]:
    """The workers of a Join, ascending as they came.

    Raises:
        ProtocolError: if there are none, too many, or one twice.
    """
    workers = tuple(message.workers)
    if not workers:
        raise ProtocolError("a Join that names no worker")
    if len(workers) > MOST_WORKERS_A_SESSION:
        raise ProtocolError(f"a Join of {len(workers)} workers; {MOST_WORKERS_A_SESSION} are the most")
    if list(workers) != sorted(set(workers)):
        raise ProtocolError("the workers of a Join must be ascending and each named once")
    return workers


def read_standings(message: pb.Ready, workers: tuple[int, ...]) -> dict[int, Position]:
    """Where each worker of the session stands.

    Raises:
        ProtocolError: if that is not told of exactly these workers.
    """
    if tuple(standing.worker for standing in message.workers) != workers:
        raise ProtocolError("a Ready must say where each worker of its Join stands, in the same order")
    return {standing.worker: position_of(standing.reported) for standing in message.workers}
