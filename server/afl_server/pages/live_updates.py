"""What open pages are sent: documents made at most once a second however many people look, and streams of
server-sent events, one for each page; never on the run's event loop."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from afl.daemon.http import Body

MOST_VIEWERS = 32
"""Streams at once: each has a thread. A page that gets none asks every few seconds instead."""

PERIOD_S = 1.0
"""Between two states; a page that hears nothing for ten times as long takes the connection for lost."""

FAREWELL_S = 2.0
"""How long streams may take to send the last state when the server ends."""


class Document:
    """A body that is made again when it is older than ``max_age`` and somebody asks.

    Args:
        make: what it says.
        max_age: in seconds.
    """

    def __init__(self, make: Callable[[], bytes], max_age: float = 1.0) -> None:
        self._make = make
        self._max_age = max_age
        self._lock = threading.Lock()
        self._body = Body(b"")
        self._made_at: float | None = None

    def current(self, *, fresh: bool = False) -> Body:
        """The body; made now if ``fresh``. Who asks while it is being made waits for it."""
        with self._lock:
            now = time.monotonic()
            if fresh or self._made_at is None or now - self._made_at >= self._max_age:
                self._body = Body.of(self._make())
                self._made_at = now
            return self._body


def encoded(value: Any) -> bytes:
    """As JSON in UTF-8, without spaces; JSON has no infinity and no NaN, which become null."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


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
