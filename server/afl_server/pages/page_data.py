"""What the status page shows, as plain values: computed from a snapshot of the run whenever somebody looks.

Everything is bounded, whatever the number of workers and rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from afl._version import __version__
from afl.names import with_names
from afl.runs.metrics import Ranked, own_metrics_line, ranked
from afl.runs.sites import SiteTable
from afl_server.federation.evaluation_summary import EvaluationSummary
from afl_server.federation.snapshot import Snapshot
from afl_server.network.door import Strangers
from afl_server.pages.dual_window import DualWindow
from afl_server.pages.history import SPREAD, History, Point, View
from afl_server.pages.progress import Rate, phase_of, seconds_left
from afl_server.pages.recent_events import RecentEvents

MOST_ROWS = 2000  # rows of the table; of more workers, those that are served worst
MOST_CURVES = 6  # workers with curves of their own in the first view: as many colours as can be told apart
_MODEL_VALUE_BYTES: Final = 4


@dataclass(frozen=True)
class Sources:
    """Where what is shown comes from; all of it may be asked from any thread."""

    snapshot: Callable[[], Snapshot]  # the run now
    certificate_expiry: Callable[[], float | None]  # of the server's, in Unix time; None in plaintext
    history: History
    dual_window: DualWindow
    events: RecentEvents
    sites: SiteTable
    strangers: Callable[[], Strangers]  # at the port of gRPC
    rate: Rate = field(default_factory=Rate)


class PageData:
    """Of one run; asked from the HTTP server's threads."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._history = sources.history

    def state(self) -> dict[str, Any]:
        """The run in a few lines; durations in seconds."""
        snapshot, now = self._sources.snapshot(), time.monotonic()
        run, last, counters = snapshot.run, snapshot.last, snapshot.counters
        phase, headline = phase_of(snapshot, now)
        return {
            "run_id": run.run_id,
            "afl_version": __version__,
            "task": run.task,
            "algorithm": run.algorithm,
            "phase": phase,
            "headline": with_names(headline, snapshot.names),
            "round": snapshot.closed,
            "rounds": run.rounds,
            "seconds": now - snapshot.began_at,
            "seconds_left": None if snapshot.is_over else seconds_left(snapshot, now),
            "rounds_a_second": self._sources.rate.after(snapshot, now),
            "workers": run.workers,
            "missing_count": len(snapshot.missing),
            "hides_losses": run.hides_losses,
            "last": _summary(last),
            "best": _summary(snapshot.best),
            **{
                f"{name}_site": _site_of(each, snapshot)
                for name, each in (("last", last), ("best", snapshot.best))
            },
            "own_metrics": own_metrics_line(last.own_metrics) if last else "",
            "worst_weight": (
                None
                if last is None or last.worst_worker is None
                else float(snapshot.dual_weights[last.worst_worker])
            ),
            "up": counters.uplink.total,
            "down": counters.downlink.total,
            "uncompressed": _uncompressed(snapshot),
            "paper": _MODEL_VALUE_BYTES
            * (counters.uplink.float_equivalents + counters.downlink.float_equivalents),
            "integers": snapshot.integers,
            "events": self._sources.events.count,
            "stamp": self._stamp(snapshot, now),
        }

    def _stamp(self, snapshot: Snapshot, now: float) -> str:
        """Changes with what table and curves show: a page sees by it whether those that it has are of now.

        It is made before they are: what is added to the history meanwhile has another.
        """
        phase, _ = phase_of(snapshot, now)
        return f"{self._history.version} {phase} {len(snapshot.missing)} {bool(snapshot.step.awaited)}"

    def ending(self) -> dict[str, Any]:
        """All that a page draws, once nothing of it changes any more."""
        events = self._sources.events.newest_first()
        return {"workers": self.workers(), "history": self.history(), "events": events}

    def workers(self) -> dict[str, Any]:
        """The table: a column of values for each thing that is known, those that are served worst first."""
        snapshot = self._sources.snapshot()
        stamp = self._stamp(snapshot, time.monotonic())
        missing, awaited = set(snapshot.missing), set(snapshot.step.awaited)
        evaluation = snapshot.evaluation
        metrics = evaluation.metrics if evaluation else [{}] * snapshot.run.workers
        by, sites = _ranked(snapshot.last), [] if snapshot.run.hides_losses else self._sources.sites.rows
        value, loss = ([entry.get(name, math.nan) for entry in metrics] for name in (by.metric, "loss"))
        rows = _worst_first(value, loss, higher_is_better=by.higher_is_better)[:MOST_ROWS]

        def state(worker: int) -> str:
            if snapshot.is_over and worker in snapshot.known:
                return "over"
            if worker in missing:
                return "gone" if worker in snapshot.known else "new"
            return "late" if worker in awaited else "ready"

        return {
            "stamp": stamp,
            "workers": snapshot.run.workers,
            "evaluated": evaluation and evaluation.round,
            "id": rows,
            "site": [snapshot.names.get(row) for row in rows] if snapshot.names else None,
            "rank_by": by.metric,
            "higher_is_better": by.higher_is_better,
            "value": _short(value[row] for row in rows),
            "loss": _short(loss[row] for row in rows),
            "first": _short(sites[row].first if row < len(sites) else None for row in rows),
            "best": _short(sites[row].best if row < len(sites) else None for row in rows),
            "records": [sites[row].records if row < len(sites) else None for row in rows],
            "first_weight": _short(sites[row].weights[0] if row < len(sites) else None for row in rows),
            "best_round": [sites[row].best_round if row < len(sites) else None for row in rows],
            "weight": _short(snapshot.dual_weights[rows]),
            "seconds": _short(snapshot.report_seconds[row] for row in rows),
            "state": [state(worker) for worker in rows],
        }

    def worker(self, worker: int) -> dict[str, Any]:
        """One worker, with its curves as in :meth:`history`; ``KeyError`` if there is no such worker."""
        snapshot = self._sources.snapshot()
        if not 0 <= worker < snapshot.run.workers:
            raise KeyError(worker)
        connection = snapshot.connections.get(worker)
        evaluation, last = snapshot.evaluation, snapshot.last_round
        metrics = evaluation.metrics[worker] if evaluation else {}
        now = time.monotonic()
        ready = None if connection is None else connection.seconds(now)
        found = {
            "id": worker,
            "site": snapshot.names.get(worker),
            "peer": connection and connection.peer,
            "hosted_with": connection and len(connection.workers),
            "version": connection and connection.version,
            "ready_seconds": None if ready is None else round(ready),
            "missing_seconds": snapshot.missing_for(worker, now),
            "examples": evaluation.examples[worker] if evaluation and evaluation.examples else None,
            "metrics": {name: _number(value) for name, value in metrics.items()},
            "train_loss": last and _number(last.losses[worker]),
            "weight": _number(snapshot.dual_weights[worker]),
            "seconds": _number(snapshot.report_seconds[worker]),
        }
        return found | self._curves(self._history.view(), [worker]) if self._history.follows else found

    def history(self) -> dict[str, Any]:
        """The curves of the first view."""
        snapshot = self._sources.snapshot()
        stamp = self._stamp(snapshot, time.monotonic())
        view, whole = self._history.view(), _uncompressed(snapshot)
        buckets, points = view.buckets, view.points
        averages = ("max_loss", "mean_loss", "smooth_worst_loss")
        standings = [ranked(vars(point.summary)) for point in points]
        return {
            "stamp": stamp,
            "workers": snapshot.run.workers,
            "block": snapshot.run.restart_length,
            "follows": self._history.follows,
            "rounds_a_point": view.width,
            "evaluations_a_point": view.spacing,
            "weight_max": _short(bucket.weight_max for bucket in buckets),
            "bytes": [bucket.sent for bucket in buckets],
            "uncompressed": whole and [round(whole * bucket.round / snapshot.closed) for bucket in buckets],
            "worst_site": _site_of(points[-1].summary, snapshot) if points else None,
            "worst_worker": [point.summary.worst_worker for point in points],
            **{name: _short(getattr(point.summary, name) for point in points) for name in averages},
            "rank_by": _ranked(points[-1].summary if points else None).metric,
            "worst_value": _short(by.worst for by in standings),
            "mean_value": _short(by.mean for by in standings),
            "spread": {
                name: [_short(point.spread[kind, place] for point in points) for place in range(len(SPREAD))]
                for kind, name in enumerate(("value", "loss"))
            },
            **self._curves(view, self._shown_workers(points)),
        }

    def _curves(self, view: View, workers: Sequence[int]) -> dict[str, Any]:
        """Of some workers, with their axes; none of a run with too many to follow."""
        followed = workers if self._history.follows else []
        names = self._sources.snapshot().names
        recent_rounds, recent = self._sources.dual_window.curves(followed)
        return {
            "round": [bucket.round for bucket in view.buckets],
            "recent_round": recent_rounds,
            "evaluation_round": [point.summary.round for point in view.points],
            "curves": [
                {
                    "worker": worker,
                    "site": names.get(worker),
                    "weight_low": _short(bucket.low[worker] for bucket in view.buckets),
                    "weight_high": _short(bucket.high[worker] for bucket in view.buckets),
                    "recent_weight": _short(recent[:, place]),
                    "value": _short(point.value[worker] for point in view.points),
                    "loss": _short(point.loss[worker] for point in view.points),
                }
                for place, worker in enumerate(followed)
            ],
        }

    def _shown_workers(self, points: Sequence[Point]) -> list[int]:
        if self._sources.snapshot().run.hides_losses:
            return []
        if self._history.workers <= MOST_CURVES:
            return list(range(self._history.workers))
        last = points[-1].summary.worst_worker if points else None
        worst = [] if last is None else [last]
        others = [worker for worker in self._history.heaviest(MOST_CURVES) if worker not in worst]
        return [*worst, *others][:MOST_CURVES]


def _summary(summary: EvaluationSummary | None) -> dict[str, Any] | None:
    """Without the task's own metrics, of which there may be many: this is sent every second."""
    if summary is None:
        return None
    by = ranked(vars(summary))
    kept = {name: value for name, value in vars(summary).items() if name != "own_metrics"}
    return kept | {"rank_by": by.metric, "worst_value": by.worst, "mean_value": by.mean}


def _site_of(summary: EvaluationSummary | None, snapshot: Snapshot) -> str | None:
    """The name of the worst worker's site."""
    worst = None if summary is None else summary.worst_worker
    return None if worst is None else snapshot.names.get(worst)


def _ranked(last: EvaluationSummary | None) -> Ranked:
    """By what the last evaluation is ranked; before the first, accuracy is what most tasks report."""
    return Ranked("accuracy", True, None, None) if last is None else ranked(vars(last))


def _uncompressed(snapshot: Snapshot) -> int | None:
    """Bytes that whole vectors would have taken so far; ``None`` where nothing is compressed, or no round is
    closed."""
    if not snapshot.run.is_compressed or snapshot.last_round is None:
        return None
    return snapshot.counters.uncompressed_bytes


def _worst_first(value: Sequence[float], loss: Sequence[float], *, higher_is_better: bool) -> list[int]:
    """By the worst value of what ranks, then by highest loss; who was not evaluated comes last."""
    rank = np.asarray(value) if higher_is_better else -np.asarray(value)
    # As keys of a sort, which is stable; NaN would be in no order.
    order = np.lexsort((-np.nan_to_num(loss, nan=-math.inf), np.nan_to_num(rank, nan=math.inf)))
    return [int(worker) for worker in order]


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Five significant digits, more than a screen shows; ``None`` for what is not finite: JSON lacks it."""
    return [None if value is None else _number(value) for value in values]


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
