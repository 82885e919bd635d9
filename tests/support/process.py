"""One process of a federation, and what it has logged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from support import commands

KIT = Path(__file__).parent
"""Where ``tests_tasks`` lies: every process finds it."""

START_S = 90.0
"""A process that imports torch takes three seconds; on a machine busy with others, many more."""

END_S = 90.0

Line = dict[str, Any]


class Process:
    """One command, with its standard error read as it comes.

    A traceback there fails the test, unless it has called :meth:`expect_traceback`.

    Args:
        name: for messages.
        arguments: after ``python``.
        environment: added to this process's own.
    """

    unexpected: ClassVar[list[str]] = []
    """What processes that were closed should not have said; ``conftest`` fails the test for it."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        paths = [str(KIT), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        read, write = os.pipe()
        self._log = os.fdopen(read, encoding="utf-8", errors="replace")
        self._command = commands.start(
            arguments,
            folder=folder,
            environment={**inherited, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            error=write,
        )
        os.close(write)
        self._lines: list[str] = []
        self._own: str | None = None
        """Of one that was killed, what it had written until then."""
        self._expected: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The operating system's number for it."""
        return self._command.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._command.wait(0.0) is None

    @property
    def text(self) -> str:
        """All that it has written to standard error."""
        with self._changed:
            return "".join(self._lines)

    @property
    def events(self) -> list[Line]:
        """The log lines, parsed; what is no JSON object is left out."""
        with self._changed:
            parsed = [_parsed(line) for line in self._lines]
        return [line for line in parsed if line is not None]

    def logged(self, event: str, **fields: Any) -> list[Line]:
        """The log lines of one event, with these fields."""
        wanted = {"event": event, **fields}.items()
        return [line for line in self.events if wanted <= {k: _frozen(v) for k, v in line.items()}.items()]

    def wait_for(
        self, event: str, *, timeout: float = START_S, count: int = 1, saying: str = "", **fields: Any
    ) -> Line:
        """The ``count``-th log line of ``event`` with these fields, as soon as it is there.

        Args:
            saying: what its message must contain.

        Raises:
            AssertionError: if it does not come in time, or the process ends without it.
        """

        def found_lines() -> list[Line]:
            return [line for line in self.logged(event, **fields) if saying in line["message"]]

        with self._changed:
            found = self._changed.wait_for(lambda: len(found_lines()) >= count or self._ended, timeout)
        lines = found_lines()
        assert found, f"{self.name}: no {event!r} ({fields}) within {timeout:g} s; it logged:\n{self.text}"
        assert len(lines) >= count, f"{self.name} ended without {event!r} ({fields}); it logged:\n{self.text}"
        return lines[count - 1]

    def wait(self, timeout: float = END_S) -> int:
        """The exit status.

        Raises:
            AssertionError: if it does not end in time.
        """
        status = self._command.wait(timeout)
        assert status is not None, f"{self.name} did not end within {timeout:g} s; it logged:\n{self.text}"
        self._reader.join(timeout)
        return status

    def expect(self, status: int, timeout: float = END_S) -> None:
        """Wait for the end, which must be with this exit status."""
        found = self.wait(timeout)
        assert found == status, f"{self.name} ended with {found}, not {status}; it logged:\n{self.text}"

    def expect_traceback(self, saying: str) -> None:
        """It shows one, of a fault that the test makes, and this text with it."""
        self._expected.append(saying)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._command.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once (SIGKILL), and wait for that. What it leaves may complain before it ends too."""
        self._own = self.text
        self.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Make sure that nothing of it is left."""
        if self.is_running:
            self.send_signal(signal.SIGKILL)
        self._command.wait(END_S)
        self._reader.join(END_S)
        if not self._log.closed:
            self._log.close()
            self._check_tracebacks()

    def _check_tracebacks(self) -> None:
        text = self.text if self._own is None else self._own
        missing = [saying for saying in self._expected if saying not in text]
        if missing:
            self.unexpected.append(f"{self.name} did not say {missing}:\n{text}")
        elif "Traceback" in text and not self._expected:
            self.unexpected.append(f"{self.name} shows a traceback that no test expects:\n{text}")

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self._log:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _parsed(line: str) -> Line | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _frozen(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
