"""The run at a glance, as one JSON object: for ``/status``, ``afl status`` and the terminal of the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from afl._version import __version__
from afl.names import with_names
from afl.runs.sites import SiteTable
from afl.terminal.by_site import BySite
from afl.terminal.display import REFRESH_S, RunDisplay
from afl.terminal.view import make_console, summary_table
from afl_server.federation.snapshot import Snapshot
from afl_server.pages.dual_window import DualWindow
from afl_server.pages.history import History
from afl_server.pages.progress import Rate, phase_of, seconds_left

STATES = ("waiting for workers", "running", "over")


def run_status(
    snapshot: Snapshot, dual_window: DualWindow, history: History | None, rate: Rate
) -> dict[str, Any]:
    """The present state; durations in seconds, ``None`` for a missing worker that has not joined yet.

    Args:
        history: ``None`` where none is kept.
    """
    now, run, step, counters = time.monotonic(), snapshot.run, snapshot.step, snapshot.counters
    phase, headline = phase_of(snapshot, now)
    return {
        "run_id": run.run_id,
        "afl_version": __version__,
        "state": state_of(snapshot),
        "phase": phase,
        "headline": with_names(headline, snapshot.names),
        "task": run.task,
        "algorithm": run.algorithm,
        "round": snapshot.closed,
        "rounds": run.rounds,
        "step": "evaluation" if step.kind.is_of_evaluation else "training",
        "open_round": step.round,
        "workers": run.workers,
        "sites": snapshot.sites,
        "sessions": [
            {
                "workers": session.workers,
                "peer": session.peer,
                "version": session.version,
                "seconds": session.seconds(now),
            }
            for worker, session in snapshot.connections.items()
            if worker == session.workers[0]
        ],
        "workers_missing": snapshot.missing,
        "workers_missing_seconds": [snapshot.missing_for(worker, now) for worker in snapshot.missing],
        "reports_missing": step.awaited,
        "open_step_seconds": now - step.opened_at,
        "seconds": now - snapshot.began_at,
        "seconds_left": seconds_left(snapshot, now),
        "rounds_a_second": rate.after(snapshot, now),
        "losses": "hidden" if run.hides_losses else "shown",
        **({"record_privacy": run.record_privacy} if run.record_privacy else {}),
        "last": snapshot.last and vars(snapshot.last),
        "best": snapshot.best and vars(snapshot.best),
        "warnings": snapshot.evaluation.warnings if snapshot.evaluation else (),
        "uplink_bytes": counters.uplink.total,
        "downlink_bytes": counters.downlink.total,
        "uncompressed_bytes": counters.uncompressed_bytes,
        "uplink_float_equivalents": counters.uplink.float_equivalents,
        "downlink_float_equivalents": counters.downlink.float_equivalents,
        "integers": snapshot.integers,
        "dual_weights": None if run.hides_losses else snapshot.dual_weights.tolist(),
        "dual_history": dual_window.view(),
        "worst_history": history and history.worst(),
        "directory": str(run.directory),
    }


def state_of(snapshot: Snapshot) -> str:
    """One of ``STATES``."""
    if snapshot.is_over:
        return "over"
    return "waiting for workers" if snapshot.last_round is None and snapshot.missing else "running"


@contextlib.asynccontextmanager
async def live_view(state: Callable[[], dict[str, Any]]) -> AsyncIterator[None]:
    """Redraw the run's state on the terminal while the block runs, and once at its end."""

    async def redraw() -> None:
        while True:
            display.show(state())
            await asyncio.sleep(REFRESH_S)

    with RunDisplay(make_console()) as display:
        redrawing = asyncio.create_task(redraw())
        try:
            yield
        finally:
            redrawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await redrawing
            display.show(state())


def print_summary(summary: dict[str, Any], directory: Path, sites: SiteTable) -> None:
    """The tables at the end of a run; nothing of one that has closed no round."""
    if summary["rounds"]:
        console = make_console()
        console.print(summary_table(summary, directory))
        console.print(BySite(sites))
