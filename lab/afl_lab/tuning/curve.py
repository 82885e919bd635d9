"""How good a trial is: by the worst worker's value on records that are held out, evaluation by evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from afl.config import Config
from afl.core.rounds.patience import HELD_OUT
from afl.core.rounds.policy import RankBy

PENALTY: Final = 10.0
"""How much a site's loss below its floor counts against a gain of the worst one's."""

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
        floor: what each worker should have at least, ``[m]``, negated where less is better; empty for none.
    """

    by: RankBy | None
    floor: tuple[float, ...] = ()

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

    def values(self, metrics: Metrics) -> list[float]:
        """Each worker's held-out value, negated where less is better; empty if somebody's is not known."""
        by = self.ranking(metrics)
        sign = 1 if by.higher_is_better else -1
        known = [sign * own[name] for own in metrics if (name := f"{HELD_OUT}{by.metric}") in own]
        return known if len(known) == len(metrics) else []

    def score(self, values: Sequence[float]) -> float:
        """The worst worker's value, less what any lacks to its floor, times :data:`PENALTY`."""
        lacks = (least - value for least, value in zip(self.floor, values, strict=False))
        return min(values) - PENALTY * max(0.0, *lacks, 0.0)

    def with_floor(self, evaluations: Sequence[Mapping[str, Any]], end: int, most_lost: float) -> Judge:
        """With a floor of what each worker has in a run up to round ``end``, less ``most_lost``: so much of a
        share, such as accuracy or AUC, and of any other metric that share of its value."""
        if all(line["round"] != end for line in evaluations):
            return self
        means = self.means_at(evaluations, end)
        if all(0 <= mean <= 1 for mean in means):
            return replace(self, floor=tuple(mean - most_lost for mean in means))
        return replace(self, floor=tuple(mean - most_lost * abs(mean) for mean in means))

    def means_at(self, evaluations: Sequence[Mapping[str, Any]], round_: int) -> list[float]:
        """Each worker's mean of :meth:`values` over the last :data:`WINDOW` evaluations up to that of a
        round, which there must be."""
        last = [line["round"] for line in evaluations].index(round_) + 1
        return means_of([self.values(line["workers"]) for line in evaluations[max(0, last - WINDOW) : last]])


@dataclass
class Curve:
    """A trial's scores so far.

    Attributes:
        judge: gives scores, to the mean of each worker's values: a floor must not count their noise.
        means: by multiple of ``spacing``, the score over the last :data:`WINDOW` evaluations at the first one
            from there on.
        is_whole: whether only the last round's model is there to be taken: step sizes look at the run's
            length, so that its first rounds are no shorter run.
        spacing: rounds, at least those between two evaluations; trials whose evaluations come at different
            rounds are compared at its multiples.
        best: the best score of :data:`WINDOW` evaluations in a row.
        round: of the last of them.
    """

    judge: Judge
    is_whole: bool = False
    spacing: int = 1
    values: list[list[float]] = field(default_factory=list)
    means: list[tuple[int, float]] = field(default_factory=list)
    best: float | None = None
    round: int = 0

    @classmethod
    def of(
        cls,
        judge: Judge,
        evaluations: Iterable[Mapping[str, Any]],
        *,
        is_whole: bool = False,
        spacing: int = 1,
    ) -> Curve:
        """Of evaluations' lines of a run's metrics."""
        curve = cls(judge, is_whole, spacing)
        for line in evaluations:
            curve.see(line["round"], line["workers"])
        return curve

    def see(self, round_: int, metrics: Metrics) -> bool:
        """Take the next evaluation; returns whether ``means`` has one more."""
        values = self.judge.values(metrics)
        if not values:
            return False
        self.values.append(values)
        if len(self.values) < WINDOW:
            return False
        mean = self.judge.score(means_of(self.values[-WINDOW:]))
        if self.best is None or self.is_whole or mean > self.best:
            self.best, self.round = mean, round_
        compared = round_ // self.spacing * self.spacing
        is_next = not self.means or compared > self.means[-1][0]
        if is_next:
            self.means.append((compared, mean))
        return is_next


def means_of(evaluations: Sequence[Sequence[float]]) -> list[float]:
    """Each worker's mean, of its values in several evaluations."""
    return [sum(own) / len(own) for own in zip(*evaluations, strict=True)]
