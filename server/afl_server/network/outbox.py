"""What waits to be written to one peer: frames, and steps that are followed to their end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from afl.core.messages import GoodbyeStatus
from afl.daemon.fault_points import reached
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, control, number, pieces, step_frame
from afl.wire.pace import Pace
from afl_server.federation.counters import Counters
from afl_server.federation.effects import Follow

MOST_QUEUED = 1024
"""Frames and steps that may wait for a peer to take them, and :data:`QUEUED_A_WORKER` for each of its workers
besides: what a step sends, with its acks, is far less."""

QUEUED_A_WORKER = 8


HEARTBEAT = control(pb.ServerFrame(heartbeat=pb.Heartbeat()))
QUESTION = control(pb.ServerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)))
REPLY = control(pb.ServerFrame(heartbeat=pb.Heartbeat(is_reply=True)))


class Outbox:
    """The frames for one peer, in order; replies to its questions go before all others.

    Attributes:
        ended: set once nothing more is queued.
        is_given_up: whether the peer is not even waited for to take its goodbye.

    Args:
        counters: charge what the paper does for a step once it is sent.
        chunk_bytes: the largest piece of a payload.
    """

    def __init__(self, counters: Counters, chunk_bytes: int) -> None:
        self.ended = asyncio.Event()
        self.is_given_up = False
        self._counters = counters
        self._queue: deque[Frame | Follow] = deque()
        self._chunk_bytes = chunk_bytes
        self._pace = Pace(chunk_bytes, is_careful=False)
        self._urgent: deque[Frame] = deque()
        """What goes before the queue."""
        self._is_held_up = False
        """Whether the queue waits for the peer's answer."""
        self._workers = 0
        self._woken = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the peer has long taken nothing."""
        return len(self._queue) + len(self._urgent) > MOST_QUEUED + QUEUED_A_WORKER * self._workers

    def put(self, frame: Frame) -> None:
        """Queue a frame."""
        if not self.ended.is_set():
            self._queue.append(frame)
            self.wake()

    def follow(self, step: Follow) -> None:
        """Queue a step."""
        if not self.ended.is_set():
            self._workers = len(step.workers)
            self._queue.append(step)
            self.wake()

    # What the peer says of what is under way.

    def be_careful(self) -> None:
        """An earlier connection of the peer was cut."""
        self._pace = Pace(self._chunk_bytes, is_careful=True)

    def reply(self) -> None:
        """The peer asks whether all that it has sent has come."""
        self._urgent.append(REPLY)
        self.wake()

    def answered(self) -> None:
        """The peer has answered the oldest question."""
        self._pace.answered()
        self.wake()

    def all_arrived(self) -> None:
        """The peer has reported of what it was sent."""
        self._pace.all_arrived()
        self.wake()

    def beat(self) -> None:
        """Queue a heartbeat, unless something waits to be taken."""
        if self._is_held_up:
            self._urgent.append(HEARTBEAT)
            self.wake()
        elif not self._queue:
            self.put(HEARTBEAT)

    def end(self, status: GoodbyeStatus, reason: str, run_id: str) -> None:
        """Queue a goodbye, and nothing more."""
        told = run_id if status is GoodbyeStatus.FINISHED else ""
        self.put(
            control(pb.ServerFrame(goodbye=pb.Goodbye(status=number(status), reason=reason, run_id=told)))
        )
        self.ended.set()

    def give_up(self) -> None:
        """End without a goodbye, which the peer does not take."""
        self.is_given_up = True
        self.ended.set()

    def wake(self) -> None:
        """There is more to write, or a step that is followed has changed."""
        self._woken.set()

    async def frames(self) -> AsyncIterator[Frame]:
        """What to write, until the end."""
        async for frame in self._queued():
            size = len(frame.data)
            if self._pace.is_question_due(size):
                self._pace.asked()
                yield QUESTION
            while self._pace.must_wait(size):
                self._is_held_up = True
                await self._wait()
                for urgent in self._taken_urgent():
                    yield urgent
            self._is_held_up = False
            self._pace.sent(size)
            yield frame

    async def _queued(self) -> AsyncIterator[Frame]:
        while True:
            for urgent in self._taken_urgent():
                yield urgent
            if not self._queue:
                if self.ended.is_set():
                    return
                await self._wait()
                continue
            item = self._queue.popleft()
            if isinstance(item, Frame):
                yield item
                continue
            async for frame in self._followed(item):
                yield frame

    def _taken_urgent(self) -> list[Frame]:
        taken = list(self._urgent)
        self._urgent.clear()
        return taken

    async def _followed(self, step: Follow) -> AsyncIterator[Frame]:
        broadcast, sent, first = step.broadcast, 0, (0, 0)
        if step.first is not None:
            yield step_frame(broadcast.step, goes_on=True)
            sent, first = 1, step.first
        while not broadcast.is_closed:
            if broadcast.is_abandoned:
                return
            if sent < len(broadcast.frames):
                sent += 1
                for piece in pieces(broadcast.frames[sent - 1], self._pace.piece_bytes(), first):
                    yield piece
            else:
                await self._wait()
                for urgent in self._taken_urgent():
                    yield urgent
        *rest, commit = broadcast.ending(sent, step.workers, may_join=step.first is None)
        for frame in rest:
            for piece in pieces(frame, self._pace.piece_bytes(), first):
                yield piece
        reached("server.mid-broadcast")
        yield commit
        answering = len(broadcast.asked_of(step.workers))
        has_weights = bool(broadcast.dual_weights)
        self._counters.charge_step(broadcast.step.payloads, answering, has_weights=has_weights)

    async def _wait(self) -> None:
        """Until something has changed, or there is something urgent: it may have come while a frame was
        being written."""
        if not self._urgent:
            self._woken.clear()
            await self._woken.wait()
