"""Processes that a command starts, follows by their JSON logs, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from afl.errors import ConfigError, why_unwritable
from afl.terminal.children import end_with

END_GRACE_S = 5.0
"""How long a process may take to end after SIGTERM before it is killed."""

TAIL_LINES = 15
"""Last lines of a log that a failure shows."""


@dataclass(frozen=True)
class Event:
    """Something that a child logged, with the fields of its JSON object, or its end, without."""

    child: Child
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The field ``event``, or nothing."""
        return str(self.fields.get("event", ""))


class Child:
    """One process ``python -m MODULE ARGUMENTS``, its standard error added to a file; it ends by SIGTERM with
    the thread that starts it.

    Args:
        events: gets an :class:`Event` for each JSON line, and one without fields at the end.

    Raises:
        ConfigError: if the file cannot be written.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        events: queue.SimpleQueue[Event | signal.Signals],
    ) -> None:
        self.name = name
        self.log = log
        try:
            self._file = log.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{log} cannot be written: {why_unwritable(error)}") from error
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._unkept = ""
        self._events = events
        self.process = subprocess.Popen(  # noqa: S603  # our own modules, arguments checked
            # -P: as the installed command would, it finds no module of the folder that it is started in;
            # a task that is named by its module is looked for there.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A session of its own: a terminal's Ctrl-C reaches the command alone, which then ends its
            # children in order instead of racing with them.
            start_new_session=True,
            # So nothing of ours reaches them when the command is killed.
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509  # takes no lock
        )
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    @property
    def tail(self) -> str:
        """The last lines of its log, as messages where they are JSON."""
        return "\n".join([self._unkept, *self._tail] if self._unkept else self._tail)

    def wait(self) -> int:
        """Its exit code, once it has ended and its log has been read."""
        code = self.process.wait()
        self._reader.join()
        return code

    @property
    def ending(self) -> str:
        """How it ended: by a signal, or with an exit code."""
        code = self.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} process {how}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines, self._file:
            for line in lines:
                try:
                    self._file.write(b"" if self._unkept else line.encode())
                except OSError as error:
                    # A full disk is no reason to stop reading: the child would wait for it.
                    self._unkept = f"(the file has less: {why_unwritable(error)})"
                fields = _parsed(line)
                self._tail.extend(_readable(line, fields))
                if fields:
                    self._events.put(Event(self, fields))
        self._events.put(Event(self))


class Children(contextlib.ExitStack):
    """The processes of one command; none outlives the ``with`` block.

    Within the block SIGINT and SIGTERM do not interrupt the code wherever it is, which could lose a process
    that has just been made. They are events: :meth:`next_event` raises ``KeyboardInterrupt`` with the signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: queue.SimpleQueue[Event | signal.Signals] = queue.SimpleQueue()
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Ignored signals stay ignored: of a job in the background, or under nohup.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, lambda came, _: self._events.put(signal.Signals(came)))
                self.callback(signal.signal, number, before)
        self.callback(self.end)
        return self

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event of any child; ``None`` if there is none within ``timeout`` seconds."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, signal.Signals):
            raise KeyboardInterrupt(event)
        return event

    def start(self, name: str, module: str, arguments: Sequence[str], log: Path) -> Child:
        """Start one; raises ConfigError if its log cannot be written."""
        child = Child(name, module, arguments, log, self._events)
        self._children.append(child)
        return child

    def kill(self) -> None:
        """End those that still run at once."""
        for child in self._children:
            child.process.kill()

    def end(self) -> None:
        """End those that still run, by their process ids: SIGTERM, and SIGKILL after a grace."""
        running = [child.process for child in self._children if child.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + END_GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for child in self._children:
            child.wait()
        self._children.clear()


def _parsed(line: str) -> dict[str, Any]:
    """A JSON log line's object; empty for any other line."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _readable(line: str, fields: dict[str, Any]) -> list[str]:
    """A log line as a person reads it; what was wrong comes last, for that is what a tail shows."""
    if "message" not in fields:
        return [line.rstrip()]
    said = f"{fields.get('level', '')}: {fields['message']}"
    return [*fields.get("traceback", "").splitlines(), *said.splitlines()]
