"""Table 1 of the paper: rounds and communication for an epsilon-stationary model, by method.

Orders, not counts: constants are dropped, so the numbers compare methods and predict nothing. ``log`` is the
natural logarithm, taken as 1 where it is smaller (m = 2): a compressor keeps no more than all coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Order:
    """An order of growth.

    Attributes:
        formula: what is inside ``O(...)``, with m, d and epsilon.
        value: its value.
    """

    formula: str
    value: float


@dataclass(frozen=True)
class Complexity:
    """A row of Table 1: what an algorithm needs for a target.

    Attributes:
        algorithm: its name here.
        technique: how it saves, if it does.
        rounds: synchronization rounds.
        per_round: entries (float equivalents) that a round communicates.
        total: entries in all.
    """

    algorithm: str
    technique: str
    rounds: Order
    per_round: Order
    total: Order


_Value = Callable[[float, float, float], float]
"""Of m, log m (at least 1) and 1/epsilon."""

_ROWS: Final[tuple[tuple[str, str, str, _Value, str, _Value, str], ...]] = (
    (
        "sgda",
        "",
        "m^(7/2) eps^-8",
        lambda m, _, e: m**3.5 * e**8,
        "d m",
        lambda m, *_: m,
        "d m^(9/2) eps^-8",
    ),
    (
        "drfa",
        "local updates",
        "eps^-12 + m^2 eps^-8",
        lambda m, _, e: e**12 + m**2 * e**8,
        "d m",
        lambda m, *_: m,
        "d m eps^-12 + d m^3 eps^-8",
    ),
    (
        "drfa",
        "fully synchronized",
        "m^2 eps^-8",
        lambda m, _, e: m**2 * e**8,
        "d m",
        lambda m, *_: m,
        "d m^3 eps^-8",
    ),
    (
        "afl-br",
        "",
        "(log m)^2 eps^-8",
        lambda _, log, e: log**2 * e**8,
        "d m",
        lambda m, *_: m,
        "d m (log m)^2 eps^-8",
    ),
    (
        "afl-com",
        "top-k",
        "(log m)^2 eps^-8",
        lambda _, log, e: log**2 * e**8,
        "d m (log m)^(-1/4)",
        lambda m, log, _: m * log**-0.25,
        "d m (log m)^(7/4) eps^-8",
    ),
    (
        "afl-com",
        "rand-k",
        "(log m)^2 eps^-8",
        lambda _, log, e: log**2 * e**8,
        "d m (log m)^(-1/2)",
        lambda m, log, _: m * log**-0.5,
        "d m (log m)^(3/2) eps^-8",
    ),
)


def complexities(workers: int, dim: int, epsilon: float) -> tuple[Complexity, ...]:
    """The rows of Table 1, in its order, for m workers, d parameters and a target of epsilon > 0."""
    assert workers >= 1
    assert dim >= 1
    assert epsilon > 0
    arguments = float(workers), max(1.0, math.log(workers)), 1 / epsilon
    rows = []
    for algorithm, technique, rounds, rounds_of, per_round, entries_of, total in _ROWS:
        count, entries = rounds_of(*arguments), dim * entries_of(*arguments)
        rows.append(
            Complexity(
                algorithm,
                technique,
                Order(rounds, count),
                Order(per_round, entries),
                Order(total, count * entries),
            )
        )
    return tuple(rows)
