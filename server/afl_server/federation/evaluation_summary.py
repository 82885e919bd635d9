"""An evaluation in a few figures: as the worst worker saw it, or what is known where losses are hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.rounds.patience import Patience
from afl.core.rounds.phases import rounds_since_restart
from afl.core.rounds.policy import DivergenceWatch, RankBy
from afl.core.rounds.results import Evaluation, RoundSummary
from afl.runs.metrics import OwnMetrics, own_means, own_metrics, ranked, settled


@dataclass(frozen=True)
class EvaluationSummary:
    """An evaluation, seen from its worst worker; with hidden losses that one is not known, nor its figures.

    Attributes:
        worst_worker: of the worst value of ``rank_by``; without one, of lowest accuracy, or of highest loss
            where the task has no accuracy.
        worst_accuracy: the lowest, if all workers report one.
        own_metrics: what the task measures besides.
        smooth_worst_loss: with hidden losses only; at most ln(m)/50 above the largest.
        rank_by: the metric of ``evaluation.rank_by``; ``None`` where none is given, or no worker reports it.
        better: which values of it are: ``higher`` or ``lower``.
        worst_value: the worst worker's of it; of hidden losses ``None``.
        mean_value: over the workers that report it.
        rounds_since_restart: of its block; ``None`` where the dual weights never restart.
    """

    round: int
    worst_worker: int | None
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float | None
    mean_loss: float
    own_metrics: OwnMetrics = field(default_factory=dict)
    smooth_worst_loss: float | None = None
    rank_by: str | None = None
    better: str | None = None
    worst_value: float | None = None
    mean_value: float | None = None
    rounds_since_restart: int | None = None

    @classmethod
    def of(cls, evaluation: Evaluation, by: RankBy | None = None, block: int = 0) -> EvaluationSummary:
        """Rank the workers that took part, by that metric if any of them reports it.

        Args:
            block: B; 0 where the dual weights never restart.
        """
        means = evaluation.means
        since_restart = rounds_since_restart(evaluation.round, block) if block else None
        if means is not None:
            by = by if by is not None and by.metric in means else None
            metric = None if by is None else by.metric
            return cls(
                evaluation.round,
                worst_worker=None,
                worst_accuracy=None,
                mean_accuracy=means.get("accuracy"),
                max_loss=None,
                mean_loss=means["loss"],
                own_metrics=own_means(means, metric),
                smooth_worst_loss=evaluation.smooth_worst,
                rank_by=metric,
                better=None if by is None else by.better,
                worst_value=evaluation.smooth_worst if metric == "loss" else None,
                mean_value=None if metric is None else means[metric],
                rounds_since_restart=since_restart,
            )
        present = [worker for worker, metrics in enumerate(evaluation.metrics) if metrics]
        losses = np.array([evaluation.metrics[worker]["loss"] for worker in present])
        accuracies = None
        if all("accuracy" in evaluation.metrics[worker] for worker in present):
            accuracies = np.array([evaluation.metrics[worker]["accuracy"] for worker in present])
        worst = present[losses.argmax() if accuracies is None else accuracies.argmin()]
        metric = better = values = None
        if by is not None and (
            measured := [worker for worker in present if by.metric in evaluation.metrics[worker]]
        ):
            metric, better = by.metric, by.better
            values = np.array([evaluation.metrics[worker][metric] for worker in measured])
            worst = measured[values.argmin() if by.higher_is_better else values.argmax()]
        return cls(
            evaluation.round,
            worst,
            None if accuracies is None else float(accuracies.min()),
            None if accuracies is None else mean_of(accuracies),
            float(losses.max()),
            mean_of(losses),
            own_metrics(evaluation.metrics, worst, metric),
            rank_by=metric,
            better=better,
            worst_value=None if metric is None else evaluation.metrics[worst][metric],
            mean_value=None if values is None else mean_of(values),
            rounds_since_restart=since_restart,
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
        mine, its = ranked(vars(self)), ranked(vars(other))
        if mine.metric == its.metric and mine.worst is not None and its.worst is not None:
            sign = 1 if mine.higher_is_better else -1
            # On small test sets accuracies tie; the loss then says which is better.
            return (sign * mine.worst, -self.highest_loss) > (sign * its.worst, -other.highest_loss)
        return self.highest_loss < other.highest_loss


class Ranking:
    """The evaluations of a run so far, in order.

    Attributes:
        evaluations: all of them.
        best: the one whose worst worker was served best.

    Args:
        watch: notices a loss that stays too high.
        by: the metric that ranks; ``None`` for accuracy, or loss where the task has none.
        patience: what chooses the best by held-out records, in place of the metrics on test data.
        block: B; 0 where the dual weights never restart.
    """

    def __init__(
        self,
        watch: DivergenceWatch | None = None,
        by: RankBy | None = None,
        patience: Patience | None = None,
        block: int = 0,
    ) -> None:
        self.by = by
        self._block = block
        self.evaluations: list[EvaluationSummary] = []
        self.best: EvaluationSummary | None = None
        self._watch = watch
        self._patience = patience

    @property
    def last(self) -> EvaluationSummary | None:
        """The last one."""
        return self.evaluations[-1] if self.evaluations else None

    def summary_of(self, evaluation: Evaluation) -> EvaluationSummary:
        """An evaluation of the run in a few figures."""
        return EvaluationSummary.of(evaluation, self.by, self._block)

    def see(self, evaluation: Evaluation) -> bool:
        """Take the next one; whether it is the best so far."""
        summary = self.summary_of(evaluation)
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


def evaluation_of_line(line: Mapping[str, Any]) -> Evaluation:
    """What a line of the metrics has of an evaluation: all that it is ranked by."""
    return Evaluation(
        line["round"],
        synchronization=0,
        metrics=tuple(line.get("workers", ())),
        examples=(),
        diverged=(),
        absent=tuple(line.get("absent", ())),
        non_finite=tuple(line.get("non_finite", ())),
        means=line.get("means"),
        smooth_worst=line.get("smooth_worst_loss"),
        warnings=tuple(line.get("warnings", ())),
    )


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
