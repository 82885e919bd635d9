"""What a run does about workers that do not report, and when it has gone wrong. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from afl.errors import DivergedError

if TYPE_CHECKING:
    from afl.engine import Evaluation

DEFAULT_QUORUM = 0.5


@dataclass(frozen=True)
class AbsencePolicy:
    """Which participants a step may close without.

    Attributes:
        skips_late: those that have not reported at the step's deadline.
        skips_non_finite: those that have nothing finite to report.
        quorum: the share of a step's participants, in (0, 1], whose reports it takes in any case.
    """

    skips_late: bool = False
    skips_non_finite: bool = False
    quorum: float = DEFAULT_QUORUM

    @property
    def leaves_out(self) -> bool:
        """Whether a step may close without one of its participants."""
        return self.skips_late or self.skips_non_finite

    def needed(self, participants: int) -> int:
        """``ceil(quorum * participants)``, the quorum as it is written: 0.55 of 20 are 11, not 12."""
        return math.ceil(Fraction(repr(self.quorum)) * participants)


class DivergenceWatch:
    """Notices a loss that stays too high: ``faults.divergence``.

    Args:
        max_loss: the highest loss of a worker in an evaluation that is still right.
        evaluations: how many evaluations in a row must exceed it.

    Attributes:
        in_a_row: the evaluations until now that exceeded it, without one between that did not.
    """

    def __init__(self, max_loss: float, evaluations: int) -> None:
        self.max_loss = max_loss
        self.evaluations = evaluations
        self.in_a_row = 0

    def require(self, evaluation: Evaluation) -> None:
        """Take the next evaluation.

        A worker whose metrics were not finite exceeds every bound; one that was late says nothing.

        Raises:
            DivergedError: if this is one too many.
        """
        losses = {
            worker: metrics["loss"] for worker, metrics in enumerate(evaluation.metrics) if "loss" in metrics
        } | dict.fromkeys(evaluation.non_finite, math.inf)
        worst = max(losses, key=lambda worker: losses[worker])
        if losses[worst] <= self.max_loss:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row < self.evaluations:
            return
        shown = f"is {losses[worst]:g}" if math.isfinite(losses[worst]) else "is not finite"
        raise DivergedError(
            f"the run has diverged: after round {evaluation.round} the loss of worker {worst} {shown}; the "
            f"highest was above faults.divergence.max_loss ({self.max_loss:g}) at {self.in_a_row} "
            f"evaluation{'s' if self.in_a_row > 1 else ''} in a row"
        )
