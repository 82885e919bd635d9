"""What a person watches: a live view while the run goes, and a table at its end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from afl.config.quantities import shown_bytes, shown_seconds
from afl_server.coordinator import Coordinator
from afl_server.status import snapshot

REFRESH_S = 0.25


class LiveView:
    """Redraws the run's state until it is over."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._live = Live(console=Console(), auto_refresh=False, redirect_stderr=True)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._live.start()
        self._task = asyncio.create_task(self._redraw())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._live.update(view(snapshot(self._coordinator)), refresh=True)
        self._live.stop()

    async def _redraw(self) -> None:
        while True:
            self._live.update(view(snapshot(self._coordinator)), refresh=True)
            await asyncio.sleep(REFRESH_S)


def view(state: dict[str, Any]) -> RenderableType:
    """The state as a few lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("run", f"{state['run_id']}  {state['algorithm']} on {state['task']}, {state['state']}")
    left = state["seconds_left"]
    grid.add_row(
        "round",
        f"{state['round']} of {state['rounds']}" + (f", {shown_seconds(left)} left" if left else ""),
    )
    grid.add_row("workers", _workers(state))
    grid.add_row("worst worker", describe_standing(state["last"]))
    grid.add_row("best so far", describe_standing(state["best"]))
    sent = f"up {shown_bytes(state['uplink_bytes'])}, down {shown_bytes(state['downlink_bytes'])}"
    grid.add_row("on the wire", sent)
    bar = ProgressBar(total=state["rounds"], completed=state["round"], width=60)
    return Group(grid, bar, Text(""))


def describe_standing(standing: dict[str, Any] | None) -> str:
    """An evaluation in a few words."""
    if standing is None:
        return "not evaluated yet"
    if standing["worst_accuracy"] is None:
        return (
            f"worker {standing['worst_worker']} at round {standing['round']}: loss {standing['max_loss']:.5g}"
            f" (mean over workers {standing['mean_loss']:.5g})"
        )
    return (
        f"worker {standing['worst_worker']} at round {standing['round']}: "
        f"accuracy {standing['worst_accuracy']:.3f} (mean over workers {standing['mean_accuracy']:.3f}, "
        f"largest loss {standing['max_loss']:.3f})"
    )


def print_summary(summary: dict[str, Any], directory: Path) -> None:
    """The table at the end of a run."""
    table = Table(title=f"Run {summary['run_id']}: {summary['reason']}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("rounds", f"{summary['rounds']} in {shown_seconds(summary['seconds'])}")
    table.add_row("worst worker, last model", describe_standing(summary["last"]))
    table.add_row("worst worker, best model", describe_standing(summary["best"]))
    for direction, words in (("uplink", "workers to server"), ("downlink", "server to workers")):
        count = summary["communication"][direction]
        table.add_row(
            words,
            f"{shown_bytes(count['wire_bytes'])} on the wire; "
            f"the paper's accounting: {shown_bytes(count['float_equivalents_as_bytes'])}",
        )
    table.add_row("results", str(directory))
    Console().print(table)


def _workers(state: dict[str, Any]) -> str:
    missing, late = state["workers_missing"], state["reports_missing"]
    if missing:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"{state['workers'] - len(missing)} of {state['workers']} ready; waiting for {names}"
    if state["open_step_seconds"] > 5 and late:
        return f"all {state['workers']} ready; slowest: {', '.join(map(str, late[:8]))}"
    return f"all {state['workers']} ready"
