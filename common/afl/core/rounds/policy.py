"""What a run does about workers that do not report, and when it has gone wrong. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from afl.errors import DivergedError

if TYPE_CHECKING:
    # Commands that only read a configuration start without PyTorch.
    from afl.core.algorithms.base import Arrays

DEFAULT_QUORUM = 0.5

BETTER: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("loss", "error", "mae", "mse", "rmse", "mape", "perplexity", "brier", "ece"), False),
    **dict.fromkeys(("accuracy", "auc", "auroc", "auprc", "f1", "precision", "recall"), True),
    **dict.fromkeys(("sensitivity", "specificity", "dice", "iou", "r2", "kappa", "mcc"), True),
}
"""Of metrics with well-known names: whether more is better."""


@dataclass(frozen=True)
class RankBy:
    """The metric by which workers, and models by their worst worker, are ranked."""

    metric: str
    higher_is_better: bool

    @property
    def better(self) -> str:
        """As the configuration says it."""
        return "higher" if self.higher_is_better else "lower"


def is_higher_better(metric: str) -> bool | None:
    """Whether more of a metric is better, by its name, such as ``auc`` or ``held_out_loss``; ``None`` if that
    does not say."""
    words = metric.lower().replace("-", "_").split("_")
    return BETTER.get(words[-1])


@dataclass(frozen=True)
class AbsencePolicy:
    """Which participants a step may close without.

    Attributes:
        skips_late: those that have not reported at the step's deadline.
        skips_non_finite: those that have nothing finite to report.
        update_norm: how many times the others' median an update's norm may be; ``None`` for any norm.
        quorum: the share of a step's participants, in (0, 1], whose reports it takes in any case.
    """

    skips_late: bool = False
    skips_non_finite: bool = False
    update_norm: float | None = None
    quorum: float = DEFAULT_QUORUM

    @property
    def leaves_out(self) -> bool:
        """Whether a step may close without one of its participants."""
        return self.skips_late or self.skips_non_finite or self.update_norm is not None

    def update_bound(self, workers: int) -> UpdateBound | None:
        """What holds a run of so many workers to :attr:`update_norm`."""
        return None if self.update_norm is None else UpdateBound(workers, self.update_norm)

    def needed(self, participants: int) -> int:
        """``ceil(quorum * participants)``, the quorum as it is written: 0.55 of 20 are 11, not 12."""
        return math.ceil(Fraction(repr(self.quorum)) * participants)


@dataclass(frozen=True)
class LargeUpdate:
    """An update that is left out: its norm, and the largest that would not have been."""

    norm: float
    limit: float


class UpdateBound:
    """Which updates are too large beside the others': ``faults.update_norm``.

    An update is a gradient times a dual weight, so norms are compared for each unit of weight: each worker's
    gradient is the norm of its last update that had at least half of the weight 1/m, divided by the weight. A
    worker may send ``times`` the median of the others' gradients, times its largest weight of late, which is
    never less than 1/m: what was not sent at once comes later.

    Args:
        workers: m.
    """

    DECAY = 0.99
    """A round's, of the largest weight of late."""

    def __init__(self, workers: int, times: float) -> None:
        self._times = times
        self.gradients: NDArray[np.float64] = np.full(workers, np.nan)
        """By worker; NaN before its first."""
        self.reach: NDArray[np.float64] = np.full(workers, 1.0 / workers)
        """Largest weights of late, ``[m]``."""
        self.norms: dict[int, float] = {}
        """Of the open round's updates, by worker; once they are judged, of those that count."""
        self._joint: list[list[int]] = []
        self._judged: dict[int, LargeUpdate] | None = None

    def add(self, norms: Mapping[int, float]) -> None:
        """An update of the open round: its norm; of a joint one, each worker's part of it."""
        self.norms.update(norms)
        self._joint.append(list(norms))

    def judge(self, weights: NDArray[np.float64]) -> Mapping[int, LargeUpdate]:
        """The open round's updates, which are all there, that are too large, by worker."""
        if self._judged is None:
            gradients, reach = self._with(self.norms, weights)
            known = np.sort(gradients[np.isfinite(gradients)])
            self._judged = {}
            for workers in self._joint:
                norm = sum(self.norms[worker] for worker in workers)
                limit = sum(self._limit(worker, known, gradients, reach) for worker in workers)
                # Where most send nothing, nothing can be told.
                if limit > 0 and not norm <= limit:
                    self._judged.update(dict.fromkeys(workers, LargeUpdate(norm, limit)))
            for worker in self._judged:
                del self.norms[worker]
        return self._judged

    def _limit(
        self,
        worker: int,
        known: NDArray[np.float64],
        gradients: NDArray[np.float64],
        reach: NDArray[np.float64],
    ) -> float:
        """The largest norm that a worker's update may have; ``known`` are the gradients that are there,
        ascending."""
        others = known
        if math.isfinite(gradients[worker]):
            others = np.delete(known, np.searchsorted(known, gradients[worker]))
        median = float(np.median(others)) if len(others) else 0.0
        return self._times * median * float(reach[worker])

    def take(self, norms: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        """Remember a closed round.

        Args:
            norms: of the updates that counted, ``[m]``; NaN elsewhere.
        """
        present = np.flatnonzero(~np.isnan(norms)).tolist()
        self.gradients, self.reach = self._with(dict(zip(present, norms[present], strict=True)), weights)
        self.reset()

    def state(self) -> Arrays:
        """What is remembered of closed rounds, for :meth:`restore`."""
        return {"gradients": self.gradients, "reach": self.reach}

    def restore(self, state: Arrays) -> None:
        """Go on from a :meth:`state`."""
        self.gradients, self.reach = state["gradients"].copy(), state["reach"].copy()

    def reset(self) -> None:
        """The open round begins, or begins again."""
        self.norms.clear()
        self._joint.clear()
        self._judged = None

    def _with(
        self, norms: Mapping[int, float], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        gradients, uniform = self.gradients.copy(), 1.0 / len(weights)
        for worker, norm in norms.items():
            if weights[worker] >= uniform / 2:
                gradients[worker] = norm / weights[worker]
        return gradients, np.maximum(np.maximum(weights, self.DECAY * self.reach), uniform)


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
