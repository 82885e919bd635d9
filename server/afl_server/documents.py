"""Pages made at most once a second, however many people look, and never on the run's event loop."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPRESS_FROM = 1024
"""Bytes; shorter bodies gain nothing."""

_LEVEL = 5
"""Of gzip: a tenth of the time of the highest level, for a few per cent of the size."""


@dataclass(frozen=True)
class Body:
    """What is sent, as it is and, where that is worth it, compressed."""

    plain: bytes
    compressed: bytes | None = None

    @classmethod
    def of(cls, plain: bytes) -> Body:
        """Compress it, if it is long enough."""
        if len(plain) < COMPRESS_FROM:
            return cls(plain)
        return cls(plain, gzip.compress(plain, _LEVEL, mtime=0))


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
