"""The evaluations of a run as points of a curve; needs neither data nor PyTorch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from afl.runs.files import METRICS_FILE, metrics_entries, of_event
from afl.runs.metrics import RANKING, Ranked, ranked, worst_loss

Ranking: TypeAlias = tuple[Ranked, Mapping[int, float | None]]
"""How a run's last evaluation stands in its metric, and the worst worker's value after each round."""

Measure: TypeAlias = Literal["worst_accuracy", "max_loss"]

COSTS = {
    "round": "update rounds",
    "synchronization": "synchronization rounds",
    "float_equivalents": "float equivalents sent",
    "wire_bytes": "bytes on the wire",
}
"""What a curve is drawn against, and what reaching a target is measured in."""


@dataclass(frozen=True)
class Point:
    """An evaluation; what was sent is cumulative, up and down.

    Attributes:
        round: update rounds.
        synchronization: synchronization rounds.
        worst_accuracy: ``None`` for a task without accuracy, as ``mean_accuracy``, and with hidden losses.
        max_loss: with hidden losses the smooth worst loss.
        float_equivalents: the paper's accounting.
        wire_bytes: gRPC messages with their prefixes, the first models and evaluations with them.
    """

    round: int
    synchronization: int
    worst_accuracy: float | None
    max_loss: float
    mean_accuracy: float | None
    mean_loss: float
    float_equivalents: float
    wire_bytes: int


def ranking_of(file: Path) -> Ranking | None:
    """Of a metrics file, where ``evaluation.rank_by`` names another metric than accuracy and loss."""
    entries, _ = metrics_entries(file)
    lines = of_event(entries, "evaluation")
    if not lines or (last := ranked(lines[-1])).metric in RANKING:
        return None
    each = {line["round"]: by.worst for line in lines if (by := ranked(line)).metric == last.metric}
    return last, each


def hides_losses(file: Path) -> bool:
    """Whether the evaluations of a metrics file have no loss of a worker's own."""
    entries, _ = metrics_entries(file)
    return any("smooth_worst_loss" in line for line in of_event(entries, "evaluation"))


def points_of(path: Path) -> list[Point]:
    """The evaluations of a run directory, or of its metrics file; DataError if they are damaged."""
    entries, _ = metrics_entries(path / METRICS_FILE if path.is_dir() else path)
    # A round that restarted servers made again stands there once more; the last is right.
    closed = of_event(entries, "round")
    rounds = [line["round"] for line in closed]
    points = []
    for line in of_event(entries, "evaluation"):
        before = bisect_right(rounds, line["round"])
        mean_accuracy = line["mean_accuracy"]
        points.append(
            Point(
                line["round"],
                closed[before - 1]["synchronization"] if before else 0,
                line["worst_accuracy"],
                round(worst_loss(line)[1], 6),
                None if mean_accuracy is None else round(mean_accuracy, 6),
                round(line["mean_loss"], 6),
                round(line["uplink_float_equivalents"] + line["downlink_float_equivalents"], 3),
                line["uplink_bytes"] + line["downlink_bytes"],
            )
        )
    return points
