"""What a run does about workers that do not report, and when it has gone wrong. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from afl.errors import DivergedError

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
    """

    def __init__(self, max_loss: float, evaluations: int) -> None:
        self._max_loss = max_loss
        self._evaluations = evaluations
        self._in_a_row = 0
        self._last = ""
        self._other_remedy = ""

    def see(
        self,
        round_: int,
        metrics: Sequence[Mapping[str, float]],
        non_finite: Sequence[int] = (),
        smooth_worst: float | None = None,
    ) -> None:
        """Take the next evaluation.

        Args:
            metrics: of each worker; those of an absent one are empty and say nothing.
            non_finite: workers whose metrics were not finite, which exceeds every bound.
            smooth_worst: the smooth worst loss, where the workers' own are not told.
        """
        own = {worker: entry["loss"] for worker, entry in enumerate(metrics) if entry}
        own.update(dict.fromkeys(non_finite, math.inf))
        losses = {f"the loss of worker {worker}": loss for worker, loss in own.items()}
        if smooth_worst is not None:
            losses["the smooth worst loss"] = smooth_worst
        worst = max(losses, key=lambda whose: losses[whose])
        self._in_a_row = self._in_a_row + 1 if losses[worst] > self._max_loss else 0
        is_finite = math.isfinite(losses[worst])
        shown = f"is {losses[worst]:g}" if is_finite else "is not finite"
        self._other_remedy = ", or raise max_loss if such a loss is right" if is_finite else ""
        self._last = f"after round {round_} {worst} {shown}"

    def require(self) -> None:
        """All is well, or else:

        Raises:
            DivergedError: if the last evaluation was one too many.
        """
        if self._in_a_row < self._evaluations:
            return
        raise DivergedError(
            f"the run has diverged: {self._last}; the highest was above faults.divergence.max_loss "
            f"({self._max_loss:g}) at {self._in_a_row} evaluation{'s' if self._in_a_row > 1 else ''} in "
            f"a row; lower algorithm.eta_w or algorithm.eta_q{self._other_remedy}"
        )
