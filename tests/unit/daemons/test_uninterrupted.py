"""Work goes on to its end when who waits for it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from afl_server.uninterrupted import uninterrupted


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_cancelled_caller_ends_only_after_the_work(times: int) -> None:
    async def scene() -> list[str]:
        seen: list[str] = []
        started = asyncio.Event()

        async def work() -> None:
            started.set()
            await asyncio.sleep(0.05)
            seen.append("worked")

        async def caller() -> None:
            try:
                await uninterrupted(work())
            finally:
                seen.append("gone")

        task = asyncio.create_task(caller())
        await started.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(scene()) == ["worked", "gone"]


def test_results_and_errors_come_through() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    async def scene() -> int:
        with pytest.raises(ValueError, match="broken"):
            await uninterrupted(fails())
        return await uninterrupted(asyncio.sleep(0, 5))

    assert asyncio.run(scene()) == 5
