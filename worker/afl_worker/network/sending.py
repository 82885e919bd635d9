"""What waits to be sent to the server, and when it may go."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from afl.daemon.fault_points import reached
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, control, pieces
from afl.wire.pace import Pace

QUESTION = control(pb.WorkerFrame(heartbeat=pb.Heartbeat(reply_wanted=True))).data
REPLY = control(pb.WorkerFrame(heartbeat=pb.Heartbeat(is_reply=True))).data


class Sending:
    """The messages of one stream, in order; replies to the server's questions go before all others.

    gRPC's thread takes them, others put them in.

    Args:
        failed: told what was raised while a frame was made; the rest of its message is left out.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._changed = threading.Condition()
        self._queue: deque[Iterable[Frame] | None] = deque()
        self._pace: Pace | None = None
        self._replies = 0
        self._is_stopped = False
        self.sent_bytes = 0
        """That gRPC has taken."""
        self._is_idle = True

    def put(self, frames: Iterable[Frame] | None) -> None:
        """Queue frames, which are made as they are taken; ``None`` ends the stream."""
        with self._changed:
            self._queue.append(frames)
            self._is_idle = False
            self._changed.notify_all()

    def keep_pace(self, pace: Pace) -> None:
        """From now on no more is under way than this allows."""
        with self._changed:
            self._pace = pace

    def reply(self) -> None:
        """The server asks whether all that it sent has come."""
        with self._changed:
            self._replies += 1
            self._changed.notify_all()

    def answered(self) -> None:
        """The server has answered this side's oldest question."""
        self._hear(Pace.answered)

    def all_arrived(self) -> None:
        """The server has gone on, so that all that was sent has come."""
        self._hear(Pace.all_arrived)

    def stop(self) -> None:
        """Nothing is taken any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait_taken(self, timeout_s: float) -> None:
        """Wait, bounded, until gRPC has taken what is queued."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle, timeout_s)

    def messages(self) -> Iterator[bytes]:
        """What to send, until the end."""
        while True:
            yield from self._wait(lambda: bool(self._queue))
            frames = None if self._is_stopped else self._queue.popleft()
            if frames is None:
                return
            try:
                yield from self._made(frames)
            except Exception as error:  # noqa: BLE001  # gRPC would only say that its iterator raised
                self._failed(error)
            with self._changed:
                self._is_idle = not self._queue
                self._changed.notify_all()

    def _made(self, frames: Iterable[Frame]) -> Iterator[bytes]:
        for frame in frames:
            most = len(frame.data) if self._pace is None else self._pace.piece_bytes()
            for piece in pieces(frame, most):
                yield from self._paced(len(piece.data))
                self.sent_bytes += len(piece.data)
                yield piece.data
                reached("worker.mid-chunk")

    def _paced(self, size: int) -> Iterator[bytes]:
        pace = self._pace
        if pace is None:
            return
        with self._changed:
            is_due = pace.is_question_due(size)
            if is_due:
                pace.asked()
        if is_due:
            yield QUESTION
        yield from self._wait(lambda: not pace.must_wait(size))
        with self._changed:
            pace.sent(size)

    def _wait(self, may_go: Callable[[], bool]) -> Iterator[bytes]:
        """Replies, until something else may go, or nothing will any more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._replies or self._is_stopped or may_go())
                replies, self._replies = self._replies, 0
                is_over = self._is_stopped or may_go()
            yield from [REPLY] * replies
            if is_over:
                return

    def _hear(self, what: Callable[[Pace], None]) -> None:
        with self._changed:
            if self._pace is not None:
                what(self._pace)
                self._changed.notify_all()
