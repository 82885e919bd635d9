"""What people are shown of a run, on the server's terminal and by ``afl``: pure, from plain values."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from afl.config.quantities import shown_bytes, shown_seconds

NARROWEST = 100
"""Columns where there is no terminal: a table in a log is not squeezed into the customary 80."""

SLOW_STEP_S = 5.0
"""How long a step is open before the workers that it waits for are named."""

MOST_NAMED = 8
"""Workers named in one line."""


def make_console() -> Console:
    """A console that neither colours digits nor squeezes what goes into a file."""
    is_terminal = sys.stdout.isatty()
    return _Console(
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else max(NARROWEST, shutil.get_terminal_size().columns),
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command: a reader that has seen enough is no failure."""
        raise  # noqa: PLE0704  # rich calls this while it handles the BrokenPipeError


def facts(rows: Mapping[str, RenderableType], title: str | None = None) -> Table:
    """Names and what is said of each."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def run_view(state: Mapping[str, Any]) -> RenderableType:
    """The state of a run (the server's ``/status``) as a few lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("run", f"{state['run_id']}  {state['algorithm']} on {state['task']}, {state['state']}")
    left = state["seconds_left"]
    grid.add_row(
        "round",
        f"{state['round']} of {state['rounds']}" + (f", {shown_seconds(left)} left" if left else ""),
    )
    grid.add_row("workers", describe_workers(state))
    grid.add_row("worst worker", describe_standing(state["last"]))
    grid.add_row("best so far", describe_standing(state["best"]))
    sent = f"up {shown_bytes(state['uplink_bytes'])}, down {shown_bytes(state['downlink_bytes'])}"
    grid.add_row("on the wire", sent)
    bar = ProgressBar(total=state["rounds"], completed=state["round"], width=60)
    return Group(grid, bar, Text(""))


def describe_workers(state: Mapping[str, Any]) -> str:
    """Who is there, and who is waited for."""
    missing, late = state["workers_missing"], state["reports_missing"]
    if missing:
        waiting = [
            str(worker) if seconds is None else f"{worker} (lost {shown_seconds(seconds)} ago)"
            for worker, seconds in zip(missing, state["workers_missing_seconds"], strict=True)
        ]
        return f"{state['workers'] - len(missing)} of {state['workers']} ready; waiting for {_named(waiting)}"
    if state["open_step_seconds"] > SLOW_STEP_S and late:
        return f"all {state['workers']} ready; slowest: {_named(list(map(str, late)))}"
    return f"all {state['workers']} ready"


def describe_standing(standing: Mapping[str, Any] | None) -> str:
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


def summary_table(summary: Mapping[str, Any], directory: Path) -> Table:
    """A run's end (its ``summary.json``)."""
    rows: dict[str, RenderableType] = {
        "rounds": f"{summary['rounds']} in {shown_seconds(summary['seconds'])}",
        "worst worker, last model": describe_standing(summary["last"]),
        "worst worker, best model": describe_standing(summary["best"]),
    }
    for direction, words in (("uplink", "workers to server"), ("downlink", "server to workers")):
        count = summary["communication"][direction]
        rows[words] = (
            f"{shown_bytes(count['wire_bytes'])} on the wire; "
            f"the paper's accounting: {shown_bytes(count['float_equivalents_as_bytes'])}"
        )
    rows["results"] = str(directory)
    return facts(rows, title=f"Run {summary['run_id']}: {summary['reason']}")


def _named(workers: list[str]) -> str:
    return ", ".join(workers[:MOST_NAMED]) + (", ..." if len(workers) > MOST_NAMED else "")
