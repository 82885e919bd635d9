"""A run as it goes: redrawn on a terminal, a line where something changed elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.live import Live

from afl.cli.view import RunView, run_line

REFRESH_S: Final = 0.25
"""Between two states."""


def can_redraw() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}


class RunDisplay:
    """Shows one state after the other.

    Args:
        hint: the last line of a view that is redrawn.
        is_transient: whether the view goes when it ends.
    """

    def __init__(self, console: Console, *, hint: str = "", is_transient: bool = False) -> None:
        self._console = console
        self._hint = hint
        self._live = (
            Live(console=console, auto_refresh=False, redirect_stderr=True, transient=is_transient)
            if console.is_terminal and not console.is_dumb_terminal
            else None
        )
        self._last_line = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: Mapping[str, Any]) -> None:
        """Show a state of the server."""
        if self._live is not None:
            self._live.update(RunView(state, self._hint), refresh=True)
            return
        line = run_line(state)
        if line != self._last_line:
            self.say(line)
            self._last_line = line

    def say(self, text: str) -> None:
        """Print something that stays, above the view."""
        self._console.print(text, soft_wrap=True)
