"""How good a trial is: by the worst worker's value on records that are held out, evaluation by evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from afl.config import Config
from afl.core.rounds.patience import HELD_OUT
from afl.core.rounds.policy import RankBy

WINDOW: Final = 5
"""Evaluations that are averaged: a single one is noisy, and dual weights swing within a block."""

Metrics: TypeAlias = Sequence[Mapping[str, float]]
"""An evaluation's, by worker and name; those of an absent worker are empty."""


@dataclass(frozen=True)
class Judge:
    """By which held-out metric trials are judged.

    Attributes:
        by: the metric, without the prefix ``held_out_``; ``None`` for accuracy where the task has it, else
            loss.
    """

    by: RankBy | None

    @classmethod
    def of(cls, config: Config) -> Judge:
        """That of ``evaluation.rank_by``."""
        own = config.evaluation.ranking
        return cls(None if own is None else RankBy(own.metric.removeprefix(HELD_OUT), own.higher_is_better))

    def ranking(self, metrics: Metrics) -> RankBy:
        """The metric, for workers that report these."""
        if self.by is not None:
            return self.by
        has_accuracy = all("accuracy" in own for own in metrics if own)
        return RankBy("accuracy", True) if has_accuracy else RankBy("loss", False)

    def score(self, metrics: Metrics, *, on_test: bool = False) -> float | None:
        """The worst worker's value, negated where less is better; ``None`` if somebody's is not known."""
        by = self.ranking(metrics)
        name = by.metric if on_test else f"{HELD_OUT}{by.metric}"
        values = [own.get(name) for own in metrics]
        sign = 1 if by.higher_is_better else -1
        known = [sign * value for value in values if value is not None]
        return min(known) if len(known) == len(values) else None


@dataclass
class Curve:
    """A trial's scores so far.

    Attributes:
        means: by round, over the last :data:`WINDOW` evaluations.
        is_whole: whether only the last round's model is there to be taken: step sizes look at the run's
            length, so that its first rounds are no shorter run.
        best: the best mean of :data:`WINDOW` evaluations in a row.
        round: of the last of them.
    """

    is_whole: bool = False
    scores: list[float] = field(default_factory=list)
    means: list[tuple[int, float]] = field(default_factory=list)
    best: float | None = None
    round: int = 0

    @classmethod
    def of(cls, judge: Judge, evaluations: Iterable[Mapping[str, Any]], *, is_whole: bool = False) -> Curve:
        """Of evaluations' lines of a run's metrics."""
        curve = cls(is_whole)
        for line in evaluations:
            curve.see(line["round"], judge.score(line["workers"]))
        return curve

    def see(self, round_: int, score: float | None) -> float | None:
        """Take the next evaluation; returns the mean over the last few, if there are enough."""
        if score is None:
            return None
        self.scores.append(score)
        if len(self.scores) < WINDOW:
            return None
        mean = sum(self.scores[-WINDOW:]) / WINDOW
        self.means.append((round_, mean))
        if self.best is None or self.is_whole or mean > self.best:
            self.best, self.round = mean, round_
        return mean
