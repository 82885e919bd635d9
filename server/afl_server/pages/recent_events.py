"""The last events of the server's log, for people who look at the status page."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from pathlib import Path
from typing import Any, Final, Self

from afl.outside import plain
from afl.paths import read_plain
from afl.runs.durable import write_whole

KEPT = 100
_FIELDS: Final = {"time": float, "level": str, "name": str, "message": str}
LONGEST_MESSAGE = 4000  # characters; a worker's traceback is part of its message


def _stored(path: Path) -> list[dict[str, Any]]:
    """What a server has kept there, newest first; nothing if there is none, or it is damaged."""
    try:
        events = plain(json.loads(read_plain(path)))
        return [
            event for event in events if _FIELDS.items() <= {key: type(v) for key, v in event.items()}.items()
        ]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


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

    def keep(self, path: Path) -> None:
        """Write them for who was not there (``afl report``), and for :meth:`restore`.

        The log has them too: a disk that does not take them is no reason to fail.
        """
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps(self.newest_first()).encode())

    def restore(self, path: Path) -> None:
        """Put what earlier processes of the server have kept, if anything, before what there is."""
        older = _stored(path)
        with self.lock or contextlib.nullcontext():
            found = [*older[::-1], *self._events]
            self._events.clear()
            self._events.extend({**event, "number": number} for number, event in enumerate(found, 1))
            self.count = len(found)

    def newest_first(self) -> list[dict[str, Any]]:
        """What is kept: its number, Unix time, level, name and message."""
        # One call, during which nothing is added.
        return list(self._events)[::-1]
