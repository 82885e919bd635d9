"""Work that is done to its end, whoever waits for it goes away or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_R = TypeVar("_R")


async def uninterrupted(work: Awaitable[_R]) -> _R:
    """The result of ``work``. A caller that is cancelled meanwhile, once or again, is so only once the work
    has ended.

    A session that ends must not leave half a step closed, or a thread in the engine whose turn is over.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        # Looked at, so that asyncio does not report it as forgotten.
        task.exception()
    raise cancellation
