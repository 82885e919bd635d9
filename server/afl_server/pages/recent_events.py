"""The last events of the server's log, for people who look at the status page."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Self

KEPT = 100
LONGEST_MESSAGE = 4000  # characters; a worker's traceback is part of its message


class RecentEvents(logging.Handler):
    """Keeps them while it is entered; read from any thread.

    Attributes:
        count: how many there have been; the number of the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.count = 0

    def __enter__(self) -> Self:
        logging.getLogger("afl.server").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("afl.server").removeHandler(self)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, if it is an event's; the logger calls it under the handler's lock."""
        name = getattr(record, "event", "error" if record.levelno >= logging.ERROR else "")
        # Evaluations come so often, and are shown by curves, that they would push everything else out.
        if name in {"", "evaluation"}:
            return
        message = record.getMessage()
        if len(message) > LONGEST_MESSAGE:
            message = message[:LONGEST_MESSAGE] + " ..."
        self.count += 1
        level = record.levelname.lower()
        self._events.append(
            {"number": self.count, "time": record.created, "level": level, "name": name, "message": message}
        )

    def newest_first(self) -> list[dict[str, Any]]:
        """What is kept: its number, Unix time, level, name and message."""
        # One call, during which nothing is added.
        return list(self._events)[::-1]
