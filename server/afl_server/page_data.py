"""What the status page shows, as plain values: computed from the run's state whenever somebody looks.

Everything is bounded, whatever the number of workers and rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from afl.config.quantities import shown_seconds
from afl.errors import ExitCode
from afl_server.coordinator import Coordinator
from afl_server.history import SPREAD, History, View
from afl_server.page_words import facts, named
from afl_server.recent_events import RecentEvents
from afl_server.status import snapshot

STALLED_AFTER_S = 5.0
"""A step that is open for less is not called stalled, however short the steps before it were."""

STALLED_TIMES = 5
"""Nor is one that is open for less than so many times as long as the last of its kind."""

MOST_NAMED = 20
"""Workers named in the state; the table has all of them."""

MOST_ROWS = 2000
"""Rows of the table; of more workers, those that are served worst."""

MOST_CURVES = 6
"""Workers with curves of their own in the first view: as many colours as can be told apart."""

_MODEL_VALUE_BYTES: Final = 4


class PageData:
    """Of one run; asked from the HTTP server's threads."""

    def __init__(self, run: Coordinator, history: History, events: RecentEvents) -> None:
        self._run = run
        self._history = history
        self._events = events
        self._rate: _Rate = _Rate()

    # The run at a glance.

    def state(self) -> dict[str, Any]:
        """The run in a few lines; durations in seconds, times in Unix time."""
        run, everything = self._run, snapshot(self._run)
        last, weights = everything["last"], everything["dual_weights"]
        everything["worst_weight"] = weights[last["worst_worker"]] if last else None
        for name in (
            "dual_weights",
            "dual_history",
            "directory",
            "uplink_float_equivalents",
            "downlink_float_equivalents",
        ):
            del everything[name]
        missing, late = everything["workers_missing"], everything["reports_missing"]
        phase, headline = self._phase(missing, late, everything["open_step_seconds"])
        everything |= {
            "phase": phase,
            "headline": headline,
            "time": time.time(),
            "workers_missing": missing[:MOST_NAMED],
            "workers_missing_seconds": everything["workers_missing_seconds"][:MOST_NAMED],
            "missing_count": len(missing),
            "reports_missing": late[:MOST_NAMED],
            "late_count": len(late),
            "rounds_a_second": self._rate.after(everything["round"], run.first_round, is_over=run.is_over),
            "block": self._run.config.algorithm.restart_length,
            "dim": run.vector.dim,
            "restarts": run.tallies.starts - 1,
            "traffic": self._traffic(),
            "events": self._events.count,
            "stamp": self._stamp(phase, missing, late),
        }
        words = facts(everything)
        # They are in the words; a task may have many, and this is sent every second.
        for name in ("last", "best"):
            standing = everything[name]
            everything[name] = standing and {key: standing[key] for key in standing if key != "own_metrics"}
        return {**everything, "words": words}

    def _stamp(self, phase: str, missing: Sequence[int], late: Sequence[int]) -> str:
        """Changes with what table and curves show: a page sees by it whether those that it has are of now."""
        return f"{self._history.version} {phase} {len(missing)} {bool(late)}"

    def _stamp_now(self) -> str:
        run = self._run
        missing, late = run.roster.missing(), run.engine.missing()
        phase, _ = self._phase(missing, late, time.monotonic() - run.step_opened_at)
        return self._stamp(phase, missing, late)

    def _phase(self, missing: Sequence[int], late: Sequence[int], open_seconds: float) -> tuple[str, str]:
        """Its name, and a sentence where people should know more."""
        run = self._run
        if run.is_over:
            return self._end()
        workers = run.config.workers
        if run.records.round is None and missing:
            here = workers - len(missing)
            return "waiting", f"Waiting for workers: {here} of {workers} are here."
        usual = run.step_seconds.get(run.engine.step.kind, 0.0)
        if not late or open_seconds < max(STALLED_AFTER_S, STALLED_TIMES * usual):
            return "running", ""
        gone = sorted(set(missing).intersection(late))
        whom, what = (gone, "not connected") if gone else (late, "still computing")
        verb = "is" if len(whom) == 1 else "are"
        since = shown_seconds(open_seconds)
        return "stalled", f"The round waits for {named(whom)}, which {verb} {what}; it is open for {since}."

    def _end(self) -> tuple[str, str]:
        code, reason = self._run.result.result()
        if code is ExitCode.OK:
            return "finished", "The run is complete."
        if self._run.can_go_on:
            return "stopped", f"The run stands still and can be gone on with: {reason}."
        return "aborted", f"The run has ended before its last round: {reason}."

    def _traffic(self) -> dict[str, Any]:
        tallies = self._run.tallies
        return {
            "up": tallies.uplink.total,
            "down": tallies.downlink.total,
            "paper_up": _MODEL_VALUE_BYTES * tallies.uplink.float_equivalents,
            "paper_down": _MODEL_VALUE_BYTES * tallies.downlink.float_equivalents,
            "uncompressed": self._uncompressed,
        }

    @property
    def _uncompressed(self) -> int | None:
        """Bytes that whole vectors would have taken so far; ``None`` where nothing is compressed, or no round
        is closed."""
        if not self._run.config.algorithm.takes("uplink") or self._run.records.round is None:
            return None
        return self._run.tallies.uncompressed_bytes

    def events(self) -> list[dict[str, Any]]:
        """The last events, newest first."""
        return [vars(event) for event in self._events.newest_first()]

    def ending(self) -> dict[str, Any]:
        """All that a page draws, once nothing of it changes any more."""
        return {"workers": self.workers(), "history": self.history(), "events": self.events()}

    # The workers.

    def workers(self) -> dict[str, Any]:
        """The table: a column of values for each thing that is known, those that are served worst first."""
        run, stamp = self._run, self._stamp_now()
        records, roster, engine = run.records, run.roster, run.engine
        missing = set(roster.missing())
        late = set(engine.missing())
        evaluated = records.last_evaluation
        metrics: Sequence[dict[str, float]] = evaluated.metrics if evaluated is not None else ()
        accuracy = [entry.get("accuracy", math.nan) for entry in metrics]
        loss = [entry.get("loss", math.nan) for entry in metrics]
        rows = _worst_first(run.config.workers, accuracy, loss)[:MOST_ROWS]
        train = [] if records.round is None else records.round.losses.tolist()
        weights = engine.dual_weights.tolist()

        def state(worker: int) -> str:
            if run.is_over and roster.was_known(worker):
                return "over"
            if worker in missing:
                return "gone" if roster.was_known(worker) else "new"
            return "late" if worker in late else "ready"

        return {
            "stamp": stamp,
            "workers": run.config.workers,
            "evaluated": evaluated.round if evaluated is not None else None,
            "id": rows,
            "accuracy": _picked(accuracy, rows),
            "loss": _picked(loss, rows),
            "train_loss": _picked(train, rows),
            "weight": _picked(weights, rows),
            "seconds": _picked(run.report_seconds, rows),
            "state": [state(worker) for worker in rows],
        }

    # The curves.

    def history(self) -> dict[str, Any]:
        """The curves of the first view."""
        run, stamp = self._run, self._stamp_now()
        shown = self._shown_workers()
        view = self._history.view(shown)
        whole, closed = self._uncompressed, self._run.records.round
        points = view.evaluations
        return {
            "stamp": stamp,
            "workers": run.config.workers,
            "block": self._run.config.algorithm.restart_length,
            "follows": self._history.follows,
            "rounds_a_point": view.width,
            "evaluations_a_point": view.spacing,
            "train_max": _short(bucket.loss_max for bucket in view.buckets),
            "train_mean": _short(bucket.loss_mean for bucket in view.buckets),
            "weight_max": _short(bucket.weight_max for bucket in view.buckets),
            "bytes": [bucket.up + bucket.down for bucket in view.buckets],
            "uncompressed": None
            if whole is None or closed is None
            else [round(whole * bucket.round / closed.round) for bucket in view.buckets],
            "worst_worker": [point.worst_worker for point in points],
            "worst_accuracy": _short(point.worst_accuracy for point in points),
            "mean_accuracy": _short(point.mean_accuracy for point in points),
            "max_loss": _short(point.max_loss for point in points),
            "mean_loss": _short(point.mean_loss for point in points),
            "spread": {
                name: [_short(view.spread[:, kind, place].tolist()) for place in range(len(SPREAD))]
                for kind, name in enumerate(("accuracy", "loss"))
            },
            **self._curves(view, shown),
        }

    def worker(self, worker: int) -> dict[str, Any]:
        """One worker, with its curves; they go with the rounds of :meth:`history`.

        Raises:
            KeyError: if there is no such worker.
        """
        run = self._run
        if not 0 <= worker < run.config.workers:
            raise KeyError(worker)
        owner = run.roster.owner(worker)
        evaluated, last = run.records.last_evaluation, run.records.round
        found: dict[str, Any] = {
            "id": worker,
            "peer": owner.peer if owner is not None else None,
            "hosted_with": len(owner.workers) if owner is not None else None,
            "missing_seconds": run.roster.absence(worker),
            "examples": evaluated.examples[worker] if evaluated is not None else None,
            "metrics": _finite(evaluated.metrics[worker]) if evaluated is not None else {},
            "train_loss": _number(last.losses[worker]) if last is not None else None,
            "weight": _number(run.engine.dual_weights[worker]),
            "seconds": _number(run.report_seconds[worker]),
        }
        if self._history.follows:
            found |= self._curves(self._history.view([worker]), [worker])
        return found

    def _curves(self, view: View, workers: Sequence[int]) -> dict[str, Any]:
        """Of the workers that the view is of, with their axes."""
        followed = workers if self._history.follows else []
        recent_rounds, recent = self._run.dual_window.curves(followed)
        return {
            "round": [bucket.round for bucket in view.buckets],
            "recent_round": recent_rounds,
            "evaluation_round": [point.round for point in view.evaluations],
            "curves": [
                {
                    "worker": worker,
                    "weight_low": _short(view.low[:, place].tolist()),
                    "weight_high": _short(view.high[:, place].tolist()),
                    "recent_weight": _short(recent[:, place].tolist()),
                    "accuracy": _short(view.accuracy[:, place].tolist()),
                    "loss": _short(view.loss[:, place].tolist()),
                }
                for place, worker in enumerate(followed)
            ],
        }

    def _shown_workers(self) -> list[int]:
        workers, history = self._run.config.workers, self._history
        if workers <= MOST_CURVES:
            return list(range(workers))
        points = history.view().evaluations
        worst = [points[-1].worst_worker] if points else []
        others = [worker for worker in history.heaviest(MOST_CURVES) if worker not in worst]
        return [*worst, *others][:MOST_CURVES]

    def worst_rows(self, count: int) -> list[dict[str, Any]]:
        """The first rows of the table."""
        table = self.workers()
        names = ("id", "accuracy", "loss", "weight", "seconds", "state")
        return [{name: table[name][row] for name in names} for row in range(min(count, len(table["id"])))]


class _Rate:
    """Rounds a second over the last half minute or so; a stall shows at once.

    Until somebody has looked for a second, it is over all rounds since the first that this process closed.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def after(self, round_: int, first_round: tuple[float, int] | None, *, is_over: bool) -> float | None:
        """The rate now; ``None`` before the second round is closed, and when the run is over.

        Args:
            first_round: when the first round was closed, in seconds of the monotonic clock, and which it was.
        """
        now = time.monotonic()
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen = [*self._seen[-30:], (now, round_)]
        since, first = self._seen[0]
        if is_over:
            return None
        if now - since < 1.0:
            if first_round is None or round_ <= first_round[1]:
                return None
            since, first = first_round
        # Two rounds may be closed within one tick of the clock.
        return max(0, round_ - first) / max(now - since, 1e-6)


def _worst_first(workers: int, accuracy: Sequence[float], loss: Sequence[float]) -> list[int]:
    """By lowest accuracy, then by highest loss; who was not evaluated comes last."""

    def key(worker: int) -> tuple[float, float, int]:
        own, lost = accuracy[worker], loss[worker]
        return (
            math.inf if math.isnan(own) else own,
            math.inf if math.isnan(lost) else -lost,
            worker,
        )

    return sorted(range(workers), key=key) if accuracy else list(range(workers))


def _picked(values: Sequence[float], rows: Sequence[int]) -> list[float | None]:
    return _short(values[row] for row in rows) if values else [None] * len(rows)


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Five significant digits, more than a screen shows; ``None`` for what is not finite: JSON lacks it."""
    return [None if value is None else _number(value) for value in values]


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}
