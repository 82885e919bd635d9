"""One way of a link, as a pure state machine: bytes in, the same bytes out, later. Reads no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What a link can do, the same both ways.

    Attributes:
        rate: bytes a second that it carries each way.
        delay: seconds from one end to the other; half a round trip.
    """

    rate: float
    delay: float


@dataclass
class Carried:
    """Bytes that have come out of links, to the server and to the workers."""

    up: int = 0
    down: int = 0


@dataclass
class _Piece:
    """Bytes that enter the link one after the other from ``start`` on."""

    start: float
    data: memoryview


class Pipe:
    """One way of a link.

    A byte enters the link when it is there and the byte before it has entered, takes ``1 / rate`` to do so,
    and comes out ``delay`` after that. Time is the caller's clock, in seconds; it does not go back.
    A caller that is late with :meth:`take` gets late what was due, and what follows is no later for it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pieces: deque[_Piece] = deque()
        self._entered_at = float("-inf")
        """When the last byte so far has entered, or will have."""
        self._has_ended = False

    def put(self, now: float, data: bytes) -> None:
        """Bytes are there to be carried."""
        assert not self._has_ended, "nothing comes after the end"
        if not data:
            return
        start = max(now, self._entered_at)
        self._pieces.append(_Piece(start, memoryview(data)))
        self._entered_at = start + len(data) / self._link.rate

    def end(self) -> None:
        """Nothing more will be there."""
        self._has_ended = True

    def backlog(self, now: float) -> float:
        """Bytes that have not entered the link yet."""
        return max(0.0, (self._entered_at - now) * self._link.rate)

    def take(self, now: float) -> bytes:
        """All that has come out since the last time."""
        out = []
        while self._pieces:
            piece = self._pieces[0]
            if self._out_at(piece, len(piece.data)) <= now:
                out.append(self._pieces.popleft().data)
                continue
            count = int((now - self._link.delay - piece.start) * self._link.rate)
            if count > 0:
                out.append(piece.data[:count])
                piece.data = piece.data[count:]
                piece.start += count / self._link.rate
            break
        return b"".join(out)

    def due(self, now: float, grain: float) -> float | None:
        """When to take next: once all has come out, or ``grain`` after the first of it, if that is earlier.

        Returns:
            None if nothing is under way.
        """
        if not self._pieces:
            return None
        first = max(now, self._pieces[0].start + self._link.delay)
        last = self._pieces[-1]
        return min(first + grain, self._out_at(last, len(last.data)))

    @property
    def is_over(self) -> bool:
        """Whether the end has come out too."""
        return self._has_ended and not self._pieces

    def _out_at(self, piece: _Piece, count: int) -> float:
        """When the first ``count`` bytes of a piece are out."""
        return piece.start + count / self._link.rate + self._link.delay
