"""An evaluation in a few figures, as the worst worker saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from afl.engine import Evaluation


@dataclass(frozen=True)
class Standing:
    """An evaluation, seen from its worst worker.

    Attributes:
        worst_worker: of lowest accuracy, or of highest loss where the task has no accuracy.
        worst_accuracy: its accuracy, if there is one.
    """

    round: int
    worst_worker: int
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float
    mean_loss: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> Standing:
        """Rank the workers that took part."""
        present = [worker for worker, metrics in enumerate(evaluation.metrics) if metrics]
        losses = np.array([evaluation.metrics[worker]["loss"] for worker in present])
        has_accuracy = all("accuracy" in evaluation.metrics[worker] for worker in present)
        if not has_accuracy:
            return cls(
                evaluation.round,
                present[losses.argmax()],
                None,
                None,
                float(losses.max()),
                float(losses.mean()),
            )
        accuracies = np.array([evaluation.metrics[worker]["accuracy"] for worker in present])
        return cls(
            evaluation.round,
            present[accuracies.argmin()],
            float(accuracies.min()),
            float(accuracies.mean()),
            float(losses.max()),
            float(losses.mean()),
        )

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Standing:
        """From a line of the metrics."""
        return cls(**{entry.name: line[entry.name] for entry in fields(cls)})

    def is_better_than(self, other: Standing | None) -> bool:
        """Whether its worst worker is served better."""
        if other is None:
            return True
        if self.worst_accuracy is not None and other.worst_accuracy is not None:
            # On small test sets accuracies tie; the loss then says which is better.
            return (self.worst_accuracy, -self.max_loss) > (other.worst_accuracy, -other.max_loss)
        return self.max_loss < other.max_loss
