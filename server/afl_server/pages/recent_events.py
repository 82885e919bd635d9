"""The last events of the server's log, for people who look at the status page."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

KEPT = 100

LONGEST_MESSAGE = 4000
"""Characters; a worker's traceback is part of its message."""

_ELSEWHERE = frozenset({"evaluation"})
"""What comes so often, and is shown by curves, that it would push everything else out."""


@dataclass(frozen=True)
class Event:
    """A line of the log.

    Attributes:
        number: counts up from 1; :attr:`RecentEvents.count` is the last one's.
        time: in Unix time.
    """

    number: int
    time: float
    level: str
    name: str
    message: str


class RecentEvents(logging.Handler):
    """Keeps them while it is entered; read from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._guard = threading.Lock()
        self.count = 0

    def __enter__(self) -> Self:
        logging.getLogger("afl.server").addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("afl.server").removeHandler(self)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, if it is an event's."""
        name = getattr(record, "event", "error" if record.levelno >= logging.ERROR else "")
        if not name or name in _ELSEWHERE:
            return
        message = record.getMessage()
        if len(message) > LONGEST_MESSAGE:
            message = message[:LONGEST_MESSAGE] + " ..."
        with self._guard:
            self.count += 1
            self._events.append(
                Event(self.count, record.created, record.levelname.lower(), str(name), message)
            )

    def newest_first(self) -> list[Event]:
        """What is kept."""
        with self._guard:
            return list(reversed(self._events))
