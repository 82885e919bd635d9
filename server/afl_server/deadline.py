"""When a step is closed without those that are late (``faults.stragglers``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afl_server.coordinator import Coordinator


class Deadline:
    """The open step's; a timer closes steps, not the next message.

    It begins when the step is opened; this process's first step, when its first worker is ready.
    """

    def __init__(self, run: Coordinator) -> None:
        self._run = run
        self._after = run.config.faults.stragglers.deadline
        self._timer: asyncio.Task[None] | None = None

    def start_once(self) -> None:
        """Begin, unless it has begun."""
        if self._timer is None:
            self.start()

    def start(self) -> None:
        """A step has been opened."""
        if self._timer is not None and self._timer is not asyncio.current_task():
            self._timer.cancel()
        if self._after is not None:
            self._timer = asyncio.create_task(self._expire(self._after))

    def cancel(self) -> None:
        """The run is over."""
        if self._timer is not None:
            self._timer.cancel()

    async def _expire(self, after: float) -> None:
        await asyncio.sleep(after)
        run = self._run
        async with run.turn:
            if self._timer is not asyncio.current_task():
                return
            run.engine.expire()
        await run.close_if_complete()
