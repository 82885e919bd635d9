"""What a task measures besides loss and accuracy, seen from the worst worker. Pure, from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from afl.runs.means import settled

RANKING: Final = frozenset({"loss", "accuracy"})
"""What workers are ranked by; it is shown in places of its own."""

MOST_SHOWN: Final = 4
"""Own metrics in one line; a task may have 62."""

OwnMetrics: TypeAlias = Mapping[str, Mapping[str, float | None]]
"""By name: ``worst_worker``, the worst worker's value, ``None`` if it has none; ``mean``, over the workers
that have one."""


def own_metrics(metrics: Sequence[Mapping[str, float]], worst_worker: int) -> OwnMetrics:
    """The task's own metrics of one evaluation, by name.

    Which end of such a metric is the worse one is not known, so the worst worker is that of loss or accuracy.

    Args:
        metrics: of each worker, ``[m]``; those of an absent worker are empty.
    """
    names = sorted({name for entry in metrics for name in entry} - RANKING)
    found = {}
    for name in names:
        values = [entry[name] for entry in metrics if name in entry]
        mean = settled(sum(values) / len(values), values)
        found[name] = {"worst_worker": metrics[worst_worker].get(name), "mean": mean}
    return found


def own_metrics_line(own: OwnMetrics) -> str:
    """``mae 0.52 (mean 0.31)`` and so on; empty if there are none."""
    shown = [
        f"{name} {own_number(own[name]['worst_worker'])} (mean {own_number(own[name]['mean'])})"
        for name in sorted(own)[:MOST_SHOWN]
    ]
    left = len(own) - len(shown)
    return ", ".join(shown) + (f", and {left} more" if left else "")


def own_number(value: float | None) -> str:
    """Five significant digits."""
    return "not measured" if value is None else f"{value:.5g}"
