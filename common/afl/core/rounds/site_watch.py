"""Signs that the site which is served worst is not the one that training cares for. Pure, without a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afl.core.algorithms.base import Arrays
from afl.core.rounds.policy import RankBy

IN_A_ROW: Final = 5
"""Evaluations before anything is said."""

RISEN: Final = 1.05
"""A loss so many times the lowest has risen."""

EVEN: Final = 0.99
"""A weight below so much of 1/m is below even: just below may be rounding, or a very small eta_q."""

WHERE: Final = "docs/algorithm.md, Weights that follow held-out records"


class SiteWatch:
    """Compares, at each evaluation, how sites are served with how they are weighted and how they train.

    Args:
        workers: m.
        dual_loss_held_out: whether the losses of rounds are of held-out records: how a site trains is not
            known then.
        noisy_losses: whether they have noise (``privacy.records``): it would be taken for memorizing.
        has_dual_weights: whether the weights of rounds are such.
        by: the metric that says who is worst; ``None`` for accuracy, or loss where the task has none.
    """

    def __init__(
        self,
        workers: int,
        *,
        dual_loss_held_out: bool = False,
        noisy_losses: bool = False,
        has_dual_weights: bool = True,
        by: RankBy | None = None,
    ) -> None:
        self._workers = workers
        self._by = by
        self._has_dual_weights = has_dual_weights
        self._held_out, self._noisy = dual_loss_held_out, noisy_losses
        self._weights: NDArray[np.float64] = np.zeros(workers)
        self._losses: NDArray[np.float64] = np.zeros(workers)
        self._counts: NDArray[np.int64] = np.zeros((2, workers), dtype=np.int64)
        """Since the last evaluation, the sums of dual weights and of training losses, and of how many."""
        self._lowest: NDArray[np.float64] = np.full(workers, np.inf)
        self._training_then: NDArray[np.float64] = np.full(workers, np.nan)
        self._round_then: NDArray[np.int64] = np.zeros(workers, dtype=np.int64)
        self._since: NDArray[np.int64] = np.zeros(workers, dtype=np.int64)
        """Of each worker, its lowest test or held-out loss, its training loss and the round then, and how
        many evaluations have followed."""
        self._below: NDArray[np.int64] = np.array([-1, 0])
        """The worst worker, and at how many evaluations in a row it was that and weighted below even."""

    def take_round(self, weights: NDArray[np.float64], losses: NDArray[np.float64]) -> None:
        """A closed round's dual weights and losses, ``[m]``; NaN where they are not known."""
        for kind, (total, values) in enumerate(((self._weights, weights), (self._losses, losses))):
            known = ~np.isnan(values)
            # One that has overflowed is above every other.
            with np.errstate(over="ignore", invalid="ignore"):
                total[known] += values[known]
            self._counts[kind] += known

    def take_evaluation(self, round_: int, metrics: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        """An evaluation after so many update rounds: what to warn of, a sentence each.

        Args:
            metrics: of each worker; those of an absent one are empty.
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            weights, training = self._weights / self._counts[0], self._losses / self._counts[1]
            found = self._underweighted(metrics, weights), self._memorizing(round_, metrics, training)
        self._weights[:], self._losses[:], self._counts[:] = 0.0, 0.0, 0
        return tuple(filter(None, found))

    def _underweighted(self, metrics: Sequence[Mapping[str, float]], weights: NDArray[np.float64]) -> str:
        present = [worker for worker, own in enumerate(metrics) if own]
        if not present:
            return ""
        candidates = [*([self._by] if self._by else []), RankBy("accuracy", True), RankBy("loss", False)]
        by = next(each for each in candidates if all(each.metric in metrics[worker] for worker in present))
        sign = 1 if by.higher_is_better else -1
        worst = min(present, key=lambda worker: sign * metrics[worker][by.metric])
        last, in_a_row = self._below.tolist()
        in_a_row = (in_a_row if worst == last else 0) + 1
        if not (self._has_dual_weights and weights[worst] < EVEN / self._workers):
            worst, in_a_row = -1, 0
        self._below[:] = worst, in_a_row
        if in_a_row < IN_A_ROW:
            return ""
        advice = "let the weights follow held-out records: task.held_out, algorithm.dual_loss: held-out"
        if self._held_out:
            advice = "its held-out loss is not the highest: raise task.held_out, or look at its data"
        if self._noisy:
            # Nothing may be held out then.
            advice = "its losses have the noise of privacy.records, which a larger task.batch_size steadies"
        where = "docs/records.md" if self._noisy else WHERE
        served = f"worker {worst} is served worst ({by.metric} {metrics[worst][by.metric]:.3g})"
        weighted = f"weighted below even ({weights[worst]:.3f}; 1/m is {1 / self._workers:.3f})"
        return f"{served}, and {weighted}, at the last {in_a_row} evaluations; {advice} ({where})"

    def _memorizing(
        self, round_: int, metrics: Sequence[Mapping[str, float]], training: NDArray[np.float64]
    ) -> str:
        if self._held_out or self._noisy:
            return ""
        kind = "held-out" if any("held_out_loss" in own for own in metrics) else "test"
        key = "held_out_loss" if kind == "held-out" else "loss"
        losses = np.array([own.get(key, np.nan) for own in metrics])
        self._since += ~np.isnan(losses)
        is_lowest = losses < self._lowest
        self._lowest[is_lowest], self._training_then[is_lowest] = losses[is_lowest], training[is_lowest]
        self._round_then[is_lowest], self._since[is_lowest] = round_, 0
        # A loss below 0 has risen by the same share of its size.
        has_risen = losses - self._lowest > (RISEN - 1) * np.abs(self._lowest)
        rising = np.flatnonzero((self._since >= IN_A_ROW) & has_risen & (training < self._training_then))
        if not len(rising):
            return ""
        worker = int(rising[np.argmax((losses - self._lowest)[rising])])
        advice = "hold records out and stop earlier: task.held_out, evaluation.patience"
        if self._has_dual_weights:
            advice += "; or let the weights follow them: algorithm.dual_loss: held-out"
        others = f" (so do {len(rising) - 1} others')" if len(rising) > 1 else ""
        return (
            f"worker {worker}'s {kind} loss rises{others}, from {self._lowest[worker]:.3g} after round "
            f"{self._round_then[worker]} to {losses[worker]:.3g}, while its training loss falls, from "
            f"{self._training_then[worker]:.3g} to {training[worker]:.3g}: the model learns its records by "
            f"heart; {advice} ({WHERE})"
        )

    def state(self) -> Arrays:
        """All that is kept, for :meth:`restore`."""
        return {name: np.copy(array) for name, array in self._arrays().items()}

    def restore(self, state: Arrays) -> None:
        """Go on from a :meth:`state`."""
        for name, array in self._arrays().items():
            np.copyto(array, state[name])

    def _arrays(self) -> dict[str, NDArray[Any]]:
        names = ("weights", "losses", "counts", "lowest", "training_then", "round_then", "since", "below")
        return {name: getattr(self, f"_{name}") for name in names}
