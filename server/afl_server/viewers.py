"""Streams of server-sent events: one for each open page, few enough, and none that holds anything up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Self

from afl.daemon.http import Body
from afl_server.documents import Document

MOST_VIEWERS = 32
"""Streams at once: each has a thread. A page that gets none asks every few seconds instead."""

PERIOD_S = 1.0
"""Between two states; a page that hears nothing for ten times as long takes the connection for lost."""

FAREWELL_S = 2.0
"""How long streams may take to send the last state when the server ends."""


class Viewers:
    """All streams of one server.

    Args:
        state: what they send, as JSON.
        ending: what they send at the end, as JSON: all that a page could ask for no more.
        period: between two states, in seconds.
    """

    def __init__(self, state: Document, ending: Document, period: float = PERIOD_S) -> None:
        self.state = state
        self.ending = ending
        self.period = period
        self.closing = threading.Event()
        self._open: set[Stream] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self) -> Stream | None:
        """A new stream; ``None`` if there are enough."""
        with self._changed:
            if len(self._open) >= MOST_VIEWERS or self.closing.is_set():
                return None
            stream = Stream(self)
            self._open.add(stream)
            self._changed.notify_all()
            return stream

    def leave(self, stream: Stream) -> None:
        """A stream is closed."""
        with self._changed:
            self._open.discard(stream)
            self._changed.notify_all()

    def close(self) -> None:
        """Let every stream send the last state, and wait for that, bounded."""
        self.closing.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, FAREWELL_S)


class Stream(Iterator[bytes]):
    """What one page is sent: the state now and once a period, and what is left when the server ends. Whoever
    sends it closes it."""

    def __init__(self, viewers: Viewers) -> None:
        self._viewers = viewers
        self._has_begun = False
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if self._has_ended:
            raise StopIteration
        viewers = self._viewers
        if self._has_begun:
            viewers.closing.wait(viewers.period)
        self._has_begun = True
        self._has_ended = viewers.closing.is_set()
        data = _event("state", viewers.state.current(fresh=self._has_ended))
        return data + _event("end", viewers.ending.current()) if self._has_ended else data

    def close(self) -> None:
        """Make room for another."""
        self._viewers.leave(self)


def _event(name: str, data: Body) -> bytes:
    return f"event: {name}\ndata: ".encode() + data.plain + b"\n\n"
