"""When a run ends before its last round: its worst site's held-out metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from afl.core.rounds.policy import RankBy

HELD_OUT = "held_out_"
"""What the names of metrics on held-out examples begin with."""


class Patience:
    """Counts evaluations without a better worst site: ``evaluation.patience``.

    One that workers were absent from says nothing, since any of them may be the worst. A site that does not
    report the metric is not ranked; if none does at the first that counts, the loss counts from there on.

    Attributes:
        best: the best of the worst sites' values so far; ``None`` before the first.
        best_round: after how many update rounds that was.
        since: how many evaluations have followed it.

    Args:
        evaluations: how many may follow the best.
        by: the metric that ranks the workers, whose value on held-out examples counts; ``None`` for the loss.
    """

    def __init__(self, evaluations: int, by: RankBy | None = None) -> None:
        self._evaluations = evaluations
        self._metric = HELD_OUT + ("loss" if by is None else by.metric.removeprefix(HELD_OUT))
        self._higher_is_better = by is not None and by.higher_is_better
        self._is_ranked_otherwise = False
        self.best: float | None = None
        self.best_round = 0
        self.since = 0

    @property
    def is_over(self) -> bool:
        """Whether the last evaluation was one too many."""
        return self.since >= self._evaluations

    @property
    def reason(self) -> str:
        """Why the run ends, in words."""
        return (
            f"{self.since} evaluations brought no better worst {self._metric} than {self.best:.4g} after "
            f"round {self.best_round} (evaluation.patience)"
        )

    def see(self, round_: int, metrics: Sequence[Mapping[str, float]]) -> bool:
        """Take the next evaluation, after so many update rounds; whether it is the best so far.

        Args:
            metrics: of each worker; those of an absent one are empty.
        """
        if not all(metrics):
            return False
        if self.best is None and not any(self._metric in site for site in metrics):
            self._go_by_loss()
        values = [site[self._metric] for site in metrics if self._metric in site]
        if not values:
            return False
        worst = min(values) if self._higher_is_better else max(values)
        sign = -1.0 if self._higher_is_better else 1.0
        if sign * worst < (math.inf if self.best is None else sign * self.best):
            self.best, self.best_round, self.since = worst, round_, 0
            return True
        self.since += 1
        return False

    def _go_by_loss(self) -> None:
        self._metric, self._higher_is_better, self._is_ranked_otherwise = HELD_OUT + "loss", False, True

    def state(self) -> list[float | int | None]:
        """For :meth:`restore`, as JSON; with a 1 more where the loss counts for an unreported metric."""
        return [self.best, self.best_round, self.since, *[1] * self._is_ranked_otherwise]

    def restore(self, state: Sequence[float | int | None]) -> None:
        """Go on from a :meth:`state`."""
        best, round_, since, *otherwise = state
        if otherwise:
            self._go_by_loss()
        self.best, self.best_round, self.since = best, int(round_ or 0), int(since or 0)
