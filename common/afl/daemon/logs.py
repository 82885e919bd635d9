"""Logs: plain lines for a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, TextIO

from afl.names import Names, with_names
from afl.outside import continued

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, message, what ``extra`` named, and :attr:`fields`."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: Mapping[str, Any] = {}
        """What every line has besides; what it names itself comes first."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        line.update((key, value) for key, value in self.fields.items() if key not in line)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Lines for people: printable, and those after a record's first are set in."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines of which the first alone begins with a time."""
        return continued(super().format(record))


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at that moment: a live view has a stand-in there, which puts lines
    above the view instead of into it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # of the base it is an attribute
        return sys.stderr


class Naming(logging.Filter):
    """Puts the sites' names into messages, and as ``site`` beside a line's ``worker``."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self._names = names

    def filter(self, record: logging.LogRecord) -> bool:
        """Every record passes."""
        if self._names:
            record.msg, record.args = with_names(record.getMessage(), self._names), ()
            if (worker := getattr(record, "worker", None)) is not None:
                record.site = self._names.get(worker)
        return True


class _EverMoreRarely(logging.Filter):
    """Of each line of OpenTelemetry's code the first, second, fourth, eighth and so on pass: while a
    collector is away it writes several of them every few seconds, for as long as the run lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Every other record passes."""
        if not record.name.startswith("opentelemetry."):
            return True
        self._counts[record.name, record.lineno] += 1
        count = self._counts[record.name, record.lineno]
        if count > 1:
            record.msg, record.args = f"{record.getMessage()} (no. {count} of its kind)", ()
        return count & (count - 1) == 0


def add_to_every_line(**fields: Any) -> None:
    """From now on every JSON line of this process has these fields: whose it is, and of which run."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.fields = {**handler.formatter.fields, **fields}


def set_up_logs(*, level: str = "info", as_json: bool | None = None) -> None:
    """Log to standard error: JSON unless it is a terminal, or as asked."""
    handler = _StandardError()
    handler.addFilter(_EverMoreRarely())
    if as_json if as_json is not None else not sys.stderr.isatty():
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":
        # Its own reports at exit say nothing of a run.
        logging.getLogger("torch").setLevel(logging.WARNING)
