"""Pages made at most once a second, however many people look, and never on the run's event loop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from afl.http_pages import Body


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
    """As JSON in UTF-8, without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
