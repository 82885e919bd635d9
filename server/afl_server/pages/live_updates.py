"""What open pages are sent: documents made at most once a second however many people look, and streams of
server-sent events, one for each page; never on the run's event loop."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from afl.daemon.http import JSON, Answer, Environ

MOST_VIEWERS = 32  # streams at once: each has a thread. A page that gets none asks every few seconds instead.
# Between two states; a page that hears nothing for ten times as long takes the connection for lost.
PERIOD_S = 1.0
FAREWELL_S = 2.0  # how long streams may take to send the last state when the server ends


class Document:
    """JSON that is made again when it is older than ``max_age`` seconds and somebody asks."""

    def __init__(self, make: Callable[[], object], max_age: float = 1.0) -> None:
        self._make = make
        self._max_age = max_age
        self._lock = threading.Lock()
        self._body = b""
        self._made_at = -math.inf

    def current(self, *, fresh: bool = False) -> bytes:
        """It now; made anew if ``fresh``. Who asks while it is being made waits for it."""
        with self._lock:
            if fresh or time.monotonic() - self._made_at >= self._max_age:
                self._body = encoded(self._make())
                self._made_at = time.monotonic()
            return self._body

    def answer(self, _: Environ) -> Answer:
        """It now, as a page."""
        return Answer("200 OK", JSON, self.current())


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
    """All streams of one server: the state every ``period`` seconds, and the rest when it ends."""

    def __init__(self, state: Document, ending: Document, period: float = PERIOD_S) -> None:
        self.state = state
        self.ending = ending
        self.period = period
        self._closing = threading.Event()
        self._open = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return self._open

    def stream(self) -> Iterator[bytes] | None:
        """What one page is sent: the state now and once a period, and what is left when the server ends.

        ``None`` if there are enough. Whoever takes the first piece closes it.
        """
        with self._changed:
            if self._open >= MOST_VIEWERS or self._closing.is_set():
                return None
            self._open += 1
        return self._pieces()

    def _pieces(self) -> Iterator[bytes]:
        try:
            while not self._closing.is_set():
                yield _event("state", self.state.current())
                self._closing.wait(self.period)
            yield _event("state", self.state.current(fresh=True)) + _event("end", self.ending.current())
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let every stream send the last state, and wait for that, bounded."""
        self._closing.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, FAREWELL_S)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
