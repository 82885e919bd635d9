"""Numbers from condensed runs: what each method reached, and what it took to reach targets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from afl_lab.plots.points import COSTS, Measure, Point
from afl_reproduction.condensed import CondensedRun
from afl_reproduction.experiment import Targets


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and one standard deviation (of the sample; 0 for one seed)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        found = np.array(list(values), dtype=np.float64)
        return cls(float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else 0.0)


def curve_of(runs: Sequence[CondensedRun], cost: str, measure: str) -> dict[str, Any]:
    """Mean and deviation of ``measure`` at each evaluation; diverged runs are left out if others are whole.

    Returns:
        ``x``, ``mean`` and ``deviation``, each ``[evaluations]``.
    """
    runs = [run for run in runs if run.about["result"] == "ok"] or runs
    count = min(len(run.points) for run in runs)
    x, y = (
        np.array([[getattr(point, name) for point in run.points[:count]] for run in runs], dtype=np.float64)
        for name in (cost, measure)
    )
    deviation = y.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(count)
    return {"x": x.mean(axis=0), "mean": y.mean(axis=0), "deviation": deviation}


def reached(run: CondensedRun, measure: Measure, target: float) -> Point | None:
    """The first evaluation that reaches a target: accuracy from below, loss from above."""
    sign = 1 if measure == "worst_accuracy" else -1
    return next((point for point in run.points if sign * getattr(point, measure) >= sign * target), None)


def standing(runs: Sequence[CondensedRun]) -> dict[str, Any]:
    """What a method reached: at the end, at best, and smoothed over the second half's evaluations."""
    rows: dict[str, Any] = {"seeds": len(runs), "whole": sum(run.about["result"] == "ok" for run in runs)}
    for measure, best in (("worst_accuracy", max), ("max_loss", min), ("mean_accuracy", max)):
        series = [[getattr(point, measure) for point in run.points] for run in runs]
        late = [
            [getattr(point, measure) for point in run.points if 2 * point.round > run.points[-1].round]
            for run in runs
        ]
        rows[measure] = {
            "second_half": Spread.of(np.mean(values) for values in late).__dict__,
            "last": Spread.of(values[-1] for values in series).__dict__,
            "best": Spread.of(best(values) for values in series).__dict__,
            # How much single evaluations of one run differ from each other.
            "within_run": float(np.mean([np.std(values) for values in late])),
        }
    rows["total"] = {cost: float(np.mean([getattr(run.points[-1], cost) for run in runs])) for cost in COSTS}
    rows["seconds"] = float(np.mean([run.about["seconds"] for run in runs]))
    return rows


def to_targets(runs: Sequence[CondensedRun], targets: Targets) -> list[dict[str, Any]]:
    """For each target: how many seeds reach it, and what it takes those that do."""
    rows = []
    measures: tuple[tuple[Measure, list[float]], ...] = (
        ("worst_accuracy", targets.worst_accuracy),
        ("max_loss", targets.max_loss),
    )
    for measure, values in measures:
        for target in values:
            points = [point for run in runs if (point := reached(run, measure, target)) is not None]
            rows.append(
                {
                    "measure": measure,
                    "target": target,
                    "seeds": len(runs),
                    "reached": len(points),
                    **{
                        cost: Spread.of(getattr(point, cost) for point in points).__dict__ if points else None
                        for cost in COSTS
                    },
                }
            )
    return rows


def table_of(
    runs: Mapping[str, Sequence[CondensedRun]], labels: Mapping[str, str], targets: Targets
) -> dict[str, Any]:
    """All numbers of a part, by run."""
    return {
        name: {"label": labels[name], **standing(own), "targets": to_targets(own, targets)}
        for name, own in runs.items()
    }


def markdown(table: Mapping[str, Any]) -> str:
    """A part's numbers as two tables."""
    columns = (
        "method",
        "worst accuracy, second half",
        "best",
        "last",
        "within a run",
        "max loss, second half",
        "best",
        "mean accuracy, second half",
    )
    lines = _head(columns)
    for row in table.values():
        accuracy, loss, mean = row["worst_accuracy"], row["max_loss"], row["mean_accuracy"]
        note = "" if row["whole"] == row["seeds"] else f" ({row['seeds'] - row['whole']} diverged)"
        lines.append(
            f"| {row['label']}{note} | {_spread(accuracy['second_half'])} | {_spread(accuracy['best'])} "
            f"| {_spread(accuracy['last'])} | {accuracy['within_run']:.3f} | {_spread(loss['second_half'])} "
            f"| {_spread(loss['best'])} | {_spread(mean['second_half'])} |"
        )
    costs = ("update rounds", "synchronizations", "10^6 float equivalents", "MB on the wire")
    lines += ["", *_head(("target", "method", "seeds", *costs))]
    sizes = {len(row["targets"]) for row in table.values()}
    for index in range(max(sizes, default=0)):
        for row in table.values():
            target = row["targets"][index]
            sign, name = (
                ("≥", "worst accuracy") if target["measure"] == "worst_accuracy" else ("≤", "max loss")
            )
            cells = [
                _cost(target["round"], 1),
                _cost(target["synchronization"], 1),
                _cost(target["float_equivalents"], 1e6),
                _cost(target["wire_bytes"], 1e6),
            ]
            lines.append(
                f"| {name} {sign} {target['target']:g} | {row['label']} "
                f"| {target['reached']}/{target['seeds']} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


def _head(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['mean']:.3f} ± {values['deviation']:.3f}"


def _cost(values: Mapping[str, float] | None, unit: float) -> str:
    if values is None:
        return "-"
    return f"{values['mean'] / unit:,.0f} ± {values['deviation'] / unit:,.0f}"
