"""A federation's events as JSON lines: a fault to look at twice.

The first line describes the run; each line after it is an event with its time. Bytes are base64. What the
engine computed is not written: ``afl_tools.replay`` computes it again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import IO, Any

from afl_server.federation import events

FORMAT = 3


class Recorder:
    """Writes events down as they come.

    Args:
        out: line by line, so that a server that is killed leaves all events that it has taken.
        config: as YAML, with its seed.
        began_at: the time at which the federation was made.
        is_resumed: whether it resumed from a checkpoint, which is not part of a recording.
    """

    def __init__(self, out: IO[str], *, run_id: str, config: str, began_at: float, is_resumed: bool) -> None:
        self._out = out
        beginning = {"run_id": run_id, "config": config, "began_at": began_at, "is_resumed": is_resumed}
        self._write({"format": FORMAT, **beginning})

    def add(self, event: events.Event, now: float) -> None:
        """An event that is about to be handled."""
        self._write({"event": type(event).__name__, "now": now, **_plain(event)})

    def _write(self, values: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(values, separators=(",", ":"), default=_plain) + "\n")

    def close(self) -> None:
        """Write no more."""
        self._out.close()


def _plain(value: Any) -> Any:
    """A dataclass or bytes as JSON has them; all else JSON knows by itself."""
    if is_dataclass(value):
        names = (entry.name for entry in fields(value) if entry.name not in {"error", "result"})
        return {name: getattr(value, name) for name in names}
    return base64.b64encode(value).decode()
