"""What a run's metrics say, from plain values: means, growth of the loss, a task's own metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from afl.core.record_privacy import EPSILONS
from afl.core.rounds.phases import FEWEST_PHASES

# How many times as large as at the beginning the largest loss is when a run is said to have diverged. Runs
# that go well also end above their first evaluation now and then, by a third, and at up to three times their
# lowest: the largest loss over the workers goes up and down while the dual weights follow it.
GROWN_TIMES: Final = 5.0
HIDDEN: Final = (
    "hidden: only means, and the smooth worst loss (at most ln(m)/50 above the largest), are known"
)
ADVICE_GROWN: Final = "begin again with a smaller algorithm.eta_w, in a new run.directory"
# Of these a line of an evaluation has the worst and the mean under names of their own.
RANKING: Final = frozenset({"loss", "accuracy"})
# In the line only where evaluation.rank_by names a metric.
RANK_KEYS: Final = ("rank_by", "better", "worst_value", "mean_value")
MOST_SHOWN: Final = 4  # own metrics in one line; a task may have 62
# By name: the value of the `worst_worker`, if it has one, and the `mean` over the workers that have one; with
# hidden losses the mean alone. Of what records have been exposed to also the `largest`.
OwnMetrics: TypeAlias = Mapping[str, Mapping[str, float | None]]


class Ranked(NamedTuple):
    """By what an evaluation's workers are ranked, and how they stand in it.

    Attributes:
        worst: of the worst worker; with hidden losses the smooth worst loss, or ``None`` of another metric.
    """

    metric: str
    higher_is_better: bool
    worst: float | None
    mean: float | None

    @property
    def better(self) -> str:
        """Which values are: ``higher`` or ``lower``."""
        return "higher" if self.higher_is_better else "lower"

    def shown(self, value: float | None, digits: int = 3) -> str:
        """A value as people read it; accuracies with so many decimals."""
        return number_of(self.metric, value, digits)


class OverBlocks(NamedTuple):
    """The evaluations in the last ``rounds`` of a run, which are whole blocks, together."""

    rounds: int
    evaluations: int
    by: Ranked

    def __str__(self) -> str:
        worst, mean = self.by.shown(self.by.worst), self.by.shown(self.by.mean)
        counted = f"mean of {self.evaluations} evaluations in the last {self.rounds} rounds, whole blocks"
        return f"worst {self.by.metric} {worst} (mean over workers {mean}), {counted}"


def over_blocks(evaluations: Sequence[Mapping[str, Any]]) -> OverBlocks | None:
    """How workers were served at the end of a run, whatever the place in a block that its last round has.

    Of as few last blocks as have four evaluations; ``None`` where there are not as many, where weights never
    restart, and where the worst is not known.
    """
    last = evaluations[-1]
    by, block = ranked(last), last.get("block", 0)
    for rounds in range(block, last["round"] + 1, block) if block else ():
        there = [ranked(line) for line in evaluations if line["round"] > last["round"] - rounds]
        worst = [each.worst for each in there if each.metric == by.metric and each.worst is not None]
        mean = [each.mean for each in there if each.metric == by.metric and each.mean is not None]
        if len(worst) == len(mean) == len(there) >= FEWEST_PHASES:
            worst_mean, mean_mean = (settled(sum(values) / len(values), values) for values in (worst, mean))
            return OverBlocks(rounds, len(there), by._replace(worst=worst_mean, mean=mean_mean))
    return None


def number_of(metric: str, value: float | None, digits: int = 3) -> str:
    """A metric's value as people read it; accuracies with so many decimals, others with five digits."""
    is_plain = value is not None and metric.removeprefix("held_out_") == "accuracy"
    return f"{value:.{digits}f}" if is_plain else own_number(value)


def ranked(standing: Mapping[str, Any]) -> Ranked:
    """By what a standing, or an evaluation's line in the metrics, is ranked: ``evaluation.rank_by``, else
    accuracy where all workers report it, else loss."""
    if standing.get("rank_by") is not None:
        is_higher = standing["better"] == "higher"
        return Ranked(standing["rank_by"], is_higher, standing["worst_value"], standing["mean_value"])
    known = "worst_accuracy" if standing.get("smooth_worst_loss") is None else "mean_accuracy"
    if standing[known] is not None:
        return Ranked("accuracy", True, standing["worst_accuracy"], standing["mean_accuracy"])
    return Ranked("loss", False, worst_loss(standing)[1], standing["mean_loss"])


def settled(mean: float, values: Sequence[float]) -> float:
    """``mean`` as it was computed; where its sum has overflowed, the mean of the finite ``values``."""
    if math.isfinite(mean):
        return mean
    half = math.fsum(value / (2 * len(values)) for value in values)
    # Rounding must not lead out of the values' own range.
    return min(max(2 * half, min(values)), max(values))


def growth(
    first_round: Mapping[str, Any] | None, first: Mapping[str, Any] | None, last: Mapping[str, Any] | None
) -> str:
    """What to say of a largest loss that has grown; empty if it has not, or if that is not known.

    The last evaluation is compared with the first, or with the line of the first round, whose loss is of the
    model that nobody has trained, whichever was lower. A loss below 0 has grown if it has risen by four times
    its absolute value, as one above 0 has that is five times as large. With hidden losses these are the
    smooth worst losses, and of the first round the mean, which is compared with the mean.
    """
    if last is None:
        return ""
    beginnings = []
    if first_round is not None:
        when = f"in round {first_round['round']}"
        if first_round["loss_max"] is None:
            beginnings.append((first_round["loss_mean"], when, "mean loss", last["mean_loss"]))
        else:
            beginnings.append((first_round["loss_max"], when, *worst_loss(last)))
    if first is not None and first["round"] < last["round"]:
        beginnings.append((worst_loss(first)[1], f"after round {first['round']}", *worst_loss(last)))
    if not beginnings:
        return ""
    lowest, when, name, end = min(beginnings)
    if end - lowest <= (GROWN_TIMES - 1) * abs(lowest):
        return ""
    return (
        f"the {name} has grown from {lowest:.5g} {when} to {end:.5g} after round {last['round']}; "
        f"{ADVICE_GROWN}"
    )


def worst_loss(standing: Mapping[str, Any]) -> tuple[str, float]:
    """What is known of the largest loss at an evaluation, by its name: itself, or the smooth worst."""
    smooth = standing.get("smooth_worst_loss")
    return ("largest loss", standing["max_loss"]) if smooth is None else ("smooth worst loss", smooth)


def hidden_figures(standing: Mapping[str, Any]) -> str:
    """All that is known of an evaluation with hidden losses, in a few words; empty if they are shown."""
    if standing.get("smooth_worst_loss") is None:
        return ""
    by = ranked(standing)
    figures = [
        "{} {:.4g}".format(*worst_loss(standing)),
        f"mean loss {standing['mean_loss']:.4g}",
        *([] if by.metric == "loss" else [f"mean {by.metric} {by.shown(by.mean, 4)}"]),
    ]
    own = own_metrics_line(standing.get("own_metrics", {}))
    return ", ".join(figures + [own] * bool(own))


def own_metrics(
    metrics: Sequence[Mapping[str, float]], worst_worker: int, rank_by: str | None = None
) -> OwnMetrics:
    """The task's own metrics of one evaluation, by name: all but the loss and what ranks the workers.

    Which end of such a metric is the worse one is not known: the worst worker is that of the ranking.
    ``metrics`` are of each worker, ``[m]``; those of an absent worker are empty.
    """
    found: dict[str, dict[str, float | None]] = {}
    for name in sorted({name for entry in metrics for name in entry} - _shown_apart(rank_by)):
        values = [entry[name] for entry in metrics if name in entry]
        mean = settled(sum(values) / len(values), values)
        found[name] = {"worst_worker": metrics[worst_worker].get(name), "mean": mean}
        if name in EPSILONS:
            found[name]["largest"] = max(values)
    return found


def own_means(means: Mapping[str, float], rank_by: str | None = None) -> OwnMetrics:
    """The same with hidden losses, of the ``means`` of all metrics: nothing is known of the worst worker."""
    return {name: {"mean": means[name]} for name in sorted(means.keys() - _shown_apart(rank_by))}


def _shown_apart(rank_by: str | None) -> frozenset[str]:
    return RANKING if rank_by is None else frozenset({"loss", rank_by})


def own_metrics_line(own: OwnMetrics) -> str:
    """``mae 0.52 (mean 0.31)``, or ``mean mae 0.31``, and so on; empty if there are none."""
    shown = [
        f"{name} at most {own_number(own[name]['largest'])}"
        if "largest" in own[name]
        else f"{name} {own_number(own[name]['worst_worker'])} (mean {own_number(own[name]['mean'])})"
        if "worst_worker" in own[name]
        else f"mean {name} {own_number(own[name]['mean'])}"
        for name in sorted(own, key=lambda name: (name not in EPSILONS, name))[:MOST_SHOWN]
    ]
    left = len(own) - len(shown)
    return ", ".join(shown) + (f", and {left} more" if left else "")


def own_number(value: float | None) -> str:
    """Five significant digits."""
    return "not measured" if value is None else f"{value:.5g}"
