"""What waits to be written to one peer: frames, and steps that are followed to their end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from afl.core.messages import GoodbyeStatus
from afl.daemon.fault_points import reached
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, control, number
from afl_server.federation.broadcast import Broadcast
from afl_server.federation.counters import Counters
from afl_server.federation.membership import HEARTBEAT

MOST_QUEUED = 1024
"""Frames and steps that may wait for a peer to take them, and :data:`QUEUED_A_WORKER` for each of its workers
besides: what a step sends, with its acks, is far less."""

QUEUED_A_WORKER = 8


class Outbox:
    """The frames for one peer, in order.

    Attributes:
        ended: set once nothing more is queued.
        is_given_up: whether the peer is not even waited for to take its goodbye.

    Args:
        counters: charge what the paper does for a step once it is sent.
    """

    def __init__(self, counters: Counters) -> None:
        self.ended = asyncio.Event()
        self.is_given_up = False
        self._counters = counters
        self._queue: deque[Frame | tuple[Broadcast, tuple[int, ...]]] = deque()
        self._workers = 0
        self._woken = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether the peer has long taken nothing."""
        return len(self._queue) > MOST_QUEUED + QUEUED_A_WORKER * self._workers

    def put(self, frame: Frame) -> None:
        """Queue a frame."""
        if not self.ended.is_set():
            self._queue.append(frame)
            self.wake()

    def follow(self, broadcast: Broadcast, workers: tuple[int, ...]) -> None:
        """Queue a step, for these workers of the peer."""
        if not self.ended.is_set():
            self._workers = len(workers)
            self._queue.append((broadcast, workers))
            self.wake()

    def beat(self) -> None:
        """Queue a heartbeat, unless something waits to be taken."""
        if not self._queue:
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
        while True:
            while not self._queue:
                if self.ended.is_set():
                    return
                await self._wait()
            item = self._queue.popleft()
            if isinstance(item, Frame):
                yield item
                continue
            broadcast, workers = item
            sent = 0
            while not (broadcast.is_closed or broadcast.is_abandoned):
                if sent < len(broadcast.frames):
                    sent += 1
                    yield broadcast.frames[sent - 1]
                else:
                    await self._wait()
            if broadcast.is_closed:
                *rest, commit = broadcast.ending(sent, workers)
                for frame in rest:
                    yield frame
                reached("server.mid-broadcast")
                yield commit
                answering = sum(worker in broadcast.participants for worker in workers)
                has_weights = bool(broadcast.dual_weights)
                self._counters.charge_step(broadcast.step.payloads, answering, has_weights=has_weights)

    async def _wait(self) -> None:
        self._woken.clear()
        await self._woken.wait()
