"""What a person watches: a live view while the run goes, and a table at its end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from afl.terminal.display import REFRESH_S, RunDisplay
from afl.terminal.view import make_console, summary_table
from afl_server.coordinator import Coordinator
from afl_server.status import snapshot


class LiveView:
    """Redraws the run's state until it is over."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._display = RunDisplay(make_console())
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._display.__enter__()
        self._task = asyncio.create_task(self._redraw())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._display.show(snapshot(self._coordinator))
        self._display.__exit__(kind, error, trace)

    async def _redraw(self) -> None:
        while True:
            self._display.show(snapshot(self._coordinator))
            await asyncio.sleep(REFRESH_S)


def print_summary(summary: dict[str, Any], directory: Path) -> None:
    """The table at the end of a run; nothing of one that has closed no round."""
    if summary["rounds"]:
        make_console().print(summary_table(summary, directory))
