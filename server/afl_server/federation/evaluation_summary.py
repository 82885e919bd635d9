"""An evaluation in a few figures, as the worst worker saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.engine import Evaluation
from afl.runs.metrics import OwnMetrics, own_metrics, settled


@dataclass(frozen=True)
class EvaluationSummary:
    """An evaluation, seen from its worst worker.

    Attributes:
        worst_worker: of lowest accuracy, or of highest loss where the task has no accuracy.
        worst_accuracy: its accuracy, if there is one.
        own_metrics: what the task measures besides.
    """

    round: int
    worst_worker: int
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float
    mean_loss: float
    own_metrics: OwnMetrics = field(default_factory=dict)

    @classmethod
    def of(cls, evaluation: Evaluation) -> EvaluationSummary:
        """Rank the workers that took part."""
        present = [worker for worker, metrics in enumerate(evaluation.metrics) if metrics]
        losses = np.array([evaluation.metrics[worker]["loss"] for worker in present])
        accuracies = None
        if all("accuracy" in evaluation.metrics[worker] for worker in present):
            accuracies = np.array([evaluation.metrics[worker]["accuracy"] for worker in present])
        worst = present[losses.argmax() if accuracies is None else accuracies.argmin()]
        return cls(
            evaluation.round,
            worst,
            None if accuracies is None else float(accuracies.min()),
            None if accuracies is None else _mean(accuracies),
            float(losses.max()),
            _mean(losses),
            own_metrics(evaluation.metrics, worst),
        )

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> EvaluationSummary:
        """From a line of the metrics."""
        values = {entry.name: line[entry.name] for entry in fields(cls) if entry.name != "own_metrics"}
        return cls(**values, own_metrics=own_metrics(line["workers"], line["worst_worker"]))

    def is_better_than(self, other: EvaluationSummary | None) -> bool:
        """Whether its worst worker is served better."""
        if other is None:
            return True
        if self.worst_accuracy is not None and other.worst_accuracy is not None:
            # On small test sets accuracies tie; the loss then says which is better.
            return (self.worst_accuracy, -self.max_loss) > (other.worst_accuracy, -other.max_loss)
        return self.max_loss < other.max_loss


def _mean(values: NDArray[np.float64]) -> float:
    with np.errstate(over="ignore"):
        mean = float(values.mean())
    return settled(mean, values.tolist())
