"""Step sizes that change from round to round: a pure function of the round, the same on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SHAPES: Final = ("constant", "cosine", "steps")
"""What may follow the warm-up."""

MOST_STEPS: Final = 64
LEAST_FACTOR: Final = 1e-3
"""So many steps of that factor are still far from 0 in float64."""


@dataclass(frozen=True)
class Schedule:
    """What a step size is multiplied by in each round, above 0 and at most 1.

    Attributes:
        warm_up: rounds in which it rises in equal steps to 1.
        then: one of :data:`SHAPES`.
        final: where a cosine ends: the share that it would have one round after the last.
        at: the rounds after which ``steps`` multiplies by ``factor`` once more, ascending.
        factor: of ``steps``.
        eta_q: whether the step size on the dual weights follows it too.
    """

    warm_up: int = 0
    then: str = "constant"
    final: float = 0.0
    at: tuple[int, ...] = ()
    factor: float = 0.1
    eta_q: bool = False

    def of_round(self, round_: int, rounds: int) -> float:
        """The factor in round t of T, 1-based.

        It is computed with IEEE 754's basic operations alone: a mathematical library's cosine is not the
        same number everywhere.
        """
        if round_ <= self.warm_up:
            return round_ / self.warm_up
        if self.then == "cosine":
            # (1 + cos(pi x)) / 2 is the square of this, which is above 0 in the last round of any run.
            root = _sine_of_quarter_turns((rounds - round_ + 1) / (rounds - self.warm_up))
            return self.final + (1.0 - self.final) * root * root
        factor = 1.0
        if self.then == "steps":
            for at in self.at:
                factor *= self.factor if round_ > at else 1.0
        return factor


CONSTANT: Final = Schedule()


def _sine_of_quarter_turns(x: float) -> float:
    """sin(pi x / 2), x from 0 to 1, within 1e-15: its series."""
    angle = 0.5 * math.pi * x
    square = angle * angle
    series = 1.0
    for n in range(22, 0, -2):
        series = 1.0 - square / (n * (n + 1)) * series
    return angle * series
