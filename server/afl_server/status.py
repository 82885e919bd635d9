"""The run at a glance, as one JSON object: for ``/status``, ``afl status`` and the live view."""

from __future__ import annotations

import time
from typing import Any

from afl._version import __version__
from afl_server.coordinator import Coordinator


def snapshot(coordinator: Coordinator) -> dict[str, Any]:
    """The present state; durations in seconds.

    ``workers_missing_seconds`` goes with ``workers_missing``: how long ago each was lost, ``None`` for one
    that has not come yet.
    """
    engine, records = coordinator.engine, coordinator.records
    tallies, config = coordinator.tallies, coordinator.config
    last = records.evaluations[-1] if records.evaluations else None
    closed = records.round.round if records.round else 0
    missing = coordinator.roster.missing()
    return {
        "run_id": coordinator.run_id,
        "afl_version": __version__,
        "state": state_of(coordinator),
        "task": config.task.name,
        "algorithm": config.algorithm.name,
        "round": closed,
        "rounds": engine.rounds,
        "step": "evaluation" if engine.step.kind.is_of_evaluation else "training",
        "open_round": engine.open_round,
        "workers": engine.workers,
        "workers_missing": missing,
        "workers_missing_seconds": [coordinator.roster.absence(worker) for worker in missing],
        "reports_missing": engine.missing(),
        "open_step_seconds": time.monotonic() - coordinator.step_opened_at,
        "seconds": coordinator.seconds,
        "seconds_left": _seconds_left(coordinator, closed),
        "last": last.__dict__ if last else None,
        "best": records.best.__dict__ if records.best else None,
        "uplink_bytes": tallies.uplink.total,
        "downlink_bytes": tallies.downlink.total,
        "uncompressed_bytes": tallies.uncompressed_bytes,
        "uplink_float_equivalents": tallies.uplink.float_equivalents,
        "downlink_float_equivalents": tallies.downlink.float_equivalents,
        "dual_weights": engine.dual_weights.tolist(),
        "dual_history": coordinator.dual_window.view(),
        "directory": str(records.directory),
    }


STATES = ("waiting for workers", "running", "over")


def state_of(coordinator: Coordinator) -> str:
    """One of ``STATES``."""
    if coordinator.is_over:
        return "over"
    if coordinator.records.round is None and coordinator.roster.missing():
        return "waiting for workers"
    return "running"


def _seconds_left(coordinator: Coordinator, closed: int) -> float | None:
    if coordinator.first_round is None or coordinator.roster.missing():
        return None
    since, first = coordinator.first_round
    if closed <= first:
        return None
    per_round = (time.monotonic() - since) / (closed - first)
    return per_round * (coordinator.engine.rounds - closed)
