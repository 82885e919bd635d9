"""An evaluation in a few figures: as the worst worker saw it, or what is known where losses are hidden."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afl.core.rounds.patience import Patience
from afl.core.rounds.policy import DivergenceWatch
from afl.core.rounds.results import Evaluation, RoundSummary
from afl.runs.metrics import OwnMetrics, own_means, own_metrics, settled


@dataclass(frozen=True)
class EvaluationSummary:
    """An evaluation, seen from its worst worker; with hidden losses that one is not known, nor its figures.

    Attributes:
        worst_worker: of lowest accuracy, or of highest loss where the task has no accuracy.
        worst_accuracy: its accuracy, if there is one.
        own_metrics: what the task measures besides.
        smooth_worst_loss: with hidden losses only; at most ln(m)/50 above the largest.
    """

    round: int
    worst_worker: int | None
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float | None
    mean_loss: float
    own_metrics: OwnMetrics = field(default_factory=dict)
    smooth_worst_loss: float | None = None

    @classmethod
    def of(cls, evaluation: Evaluation) -> EvaluationSummary:
        """Rank the workers that took part."""
        means = evaluation.means
        if means is not None:
            return cls(
                evaluation.round,
                worst_worker=None,
                worst_accuracy=None,
                mean_accuracy=means.get("accuracy"),
                max_loss=None,
                mean_loss=means["loss"],
                own_metrics=own_means(means),
                smooth_worst_loss=evaluation.smooth_worst,
            )
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
            None if accuracies is None else mean_of(accuracies),
            float(losses.max()),
            mean_of(losses),
            own_metrics(evaluation.metrics, worst),
        )

    @property
    def highest_loss(self) -> float:
        """The largest loss, or the smooth worst: what is known of it."""
        highest = self.max_loss if self.smooth_worst_loss is None else self.smooth_worst_loss
        assert highest is not None
        return highest

    def is_better_than(self, other: EvaluationSummary | None) -> bool:
        """Whether its worst worker is served better."""
        if other is None:
            return True
        if self.worst_accuracy is not None and other.worst_accuracy is not None:
            # On small test sets accuracies tie; the loss then says which is better.
            return (self.worst_accuracy, -self.highest_loss) > (other.worst_accuracy, -other.highest_loss)
        return self.highest_loss < other.highest_loss


class Ranking:
    """The evaluations of a run so far, in order.

    Attributes:
        evaluations: all of them.
        best: the one whose worst worker was served best.

    Args:
        watch: notices a loss that stays too high.
        patience: what chooses the best, in place of the metrics on test data.
    """

    def __init__(self, watch: DivergenceWatch | None = None, patience: Patience | None = None) -> None:
        self.evaluations: list[EvaluationSummary] = []
        self.best: EvaluationSummary | None = None
        self._watch = watch
        self._patience = patience

    @property
    def last(self) -> EvaluationSummary | None:
        """The last one."""
        return self.evaluations[-1] if self.evaluations else None

    def see(self, evaluation: Evaluation) -> bool:
        """Take the next one; whether it is the best so far."""
        summary = EvaluationSummary.of(evaluation)
        self.evaluations.append(summary)
        if self._watch is not None:
            self._watch.see(summary.round, evaluation.metrics, evaluation.non_finite, evaluation.smooth_worst)
        # Who was absent may be the one that is served worst.
        is_best = not evaluation.absent and summary.is_better_than(self.best)
        if self._patience is not None:
            is_best = self._patience.see(summary.round, evaluation.metrics)
        if is_best:
            self.best = summary
        return is_best

    def require_convergence(self) -> None:
        """Raise a DivergedError where ``faults.divergence`` says so."""
        if self._watch is not None:
            self._watch.require()


def train_loss_of(summary: RoundSummary) -> float:
    """The mean minibatch loss of the workers that took part in a round."""
    if summary.mean_loss is not None:
        return summary.mean_loss
    return mean_of(summary.losses[~np.isnan(summary.losses)])


def mean_of(values: NDArray[np.float64]) -> float:
    """The mean of finite values, also where their sum overflows."""
    with np.errstate(over="ignore"):
        mean = float(values.mean())
    return settled(mean, values.tolist())
