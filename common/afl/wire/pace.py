"""How much may be under way on a connection that may be cut at any moment."""

from __future__ import annotations

from collections import deque

CAREFUL_BYTES = 64 * 1024
"""What may be under way on a connection after another, as long as it has carried little."""

SHARE = 8
"""At most an eighth of what a connection has carried may be under way, and be lost if it is cut."""

ALIGNED_BYTES = 64

UNPACED_BYTES = 4 * 1024 * 1024
"""Where so much may be under way, gRPC's own window is the limit, and nothing is asked any more."""


class Pace:
    """Grows with what has come through: a link that carries a megabyte before something cuts it loses little,
    and one that is not cut is not held up after its first megabytes. Pure.

    The sender asks its peer, now and then, whether all before the question has come (a ``Heartbeat`` that
    wants a reply).

    Args:
        chunk_bytes: the largest piece of a payload.
        is_careful: whether the connection follows one that was cut.
    """

    def __init__(self, chunk_bytes: int, *, is_careful: bool) -> None:
        self._chunk_bytes = chunk_bytes
        self._least = min(CAREFUL_BYTES, chunk_bytes) if is_careful else chunk_bytes
        self._arrived = 0
        self._unasked = 0
        self._asked: deque[int] = deque()

    def piece_bytes(self) -> int:
        """The largest piece of a payload to send now: whole values, whatever their type."""
        if self._window >= self._chunk_bytes:
            return self._chunk_bytes
        return self._window // ALIGNED_BYTES * ALIGNED_BYTES

    def is_question_due(self, size: int) -> bool:
        """Whether to ask, before a message of ``size`` bytes is sent, if what was sent has come."""
        return 0 < self._unasked > self._window // 2 - size and self._window < UNPACED_BYTES

    def must_wait(self, size: int) -> bool:
        """Whether a message of ``size`` bytes has to wait for an answer."""
        under_way = self._unasked + sum(self._asked)
        return bool(self._asked) and self._window < min(under_way + size, UNPACED_BYTES)

    def sent(self, size: int) -> None:
        """A message has been sent."""
        self._unasked += size

    def asked(self) -> None:
        """The peer has been asked whether all that was sent has come."""
        self._asked.append(self._unasked)
        self._unasked = 0

    def answered(self) -> None:
        """The peer has answered the oldest question."""
        if self._asked:
            self._arrived += self._asked.popleft()

    def all_arrived(self) -> None:
        """What has come of the peer shows that all that was sent has come."""
        self._arrived += self._unasked + sum(self._asked)
        self._asked.clear()
        self._unasked = 0

    @property
    def _window(self) -> int:
        return max(self._least, self._arrived // SHARE)
