"""A run as it goes: redrawn on a terminal, a line where something changed elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from rich.console import Console
from rich.live import Live

from afl.terminal.view import RunView, run_line

REFRESH_S: Final = 0.25  # seconds between two states
# Of the time that a run has been shown: how long its last line stands, where lines are not redrawn.
LINE_SHARE: Final = 1 / 30
LONGEST_LINE_S: Final = 60.0  # the longest that this last line stands, in seconds


def can_redraw() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}


class RunDisplay:
    """Shows one state after the other; ``hint`` is the last line of a view that is redrawn."""

    def __init__(self, console: Console, *, hint: str = "", is_transient: bool = False) -> None:
        self._console = console
        self._hint = hint
        # What somebody sent into a file stays out of the view.
        to_view = sys.stderr.isatty()
        live = Live(console=console, auto_refresh=False, redirect_stderr=to_view, transient=is_transient)
        self._live = live if console.is_terminal and not console.is_dumb_terminal else None
        self._last_line = ""
        self._last_missing: object = None
        self._since = time.monotonic()
        self._due = self._since

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: Mapping[str, Any]) -> None:
        """Show a state of the server.

        Where lines are not redrawn, they come ever less often, but for who is missing: a log would fill.
        """
        if self._live is not None:
            self._live.update(RunView(state, self._hint), refresh=True)
            return
        line, missing, now = run_line(state), state["workers_missing"], time.monotonic()
        if line != self._last_line and (now >= self._due or missing != self._last_missing):
            self.say(line)
            self._last_line, self._last_missing = line, missing
            self._due = now + min(LONGEST_LINE_S, LINE_SHARE * (now - self._since))

    def say(self, text: str) -> None:
        """Print something that stays, above the view."""
        self._console.print(text, soft_wrap=True)
