"""Pages made at most once a second, however many people look, and never on the run's event loop."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from afl.daemon.http import Body


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
