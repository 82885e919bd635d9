"""Record-level differential privacy: what a run asks for, and what a worker has spent of it.

One step is one mechanism. Of a worker's n records it draws a minibatch of b, uniformly without replacement,
and tells of it two things: the sum of the records' gradients, each clipped to the norm ``clip``, and the sum
of their losses, each clipped to ``[0, loss_clip]``. Two data sets are neighbours if one record of one is
replaced by another in the other, so n may be known. A replaced record moves the sum of gradients by at most
``2 clip``, from one end of a ball to the other, and that of losses by at most ``loss_clip``. The noise has
the standard deviations ``noise clip`` and ``loss_noise loss_clip``: in units of these sensitivities
``noise / 2`` and ``loss_noise``. Two Gaussian mechanisms on the same minibatch are one, whose multiplier is
``(4 / noise^2 + 1 / loss_noise^2)^(-1/2)``. Subsampling is accounted for by Theorem 27 of Wang, Balle and
Kasiviswanathan, "Subsampled Renyi differential privacy and analytical moments accountant" (AISTATS 2019), as
``dp-accounting`` has it.

All that follows is post-processing of the two sums: division by b, the dual weight, error feedback,
compression, masks, the server's arithmetic, and sending the same again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from afl.errors import BudgetError, ConfigError
from afl.optional_dependencies import require

METRIC: Final = "privacy_epsilon"
"""A worker's epsilon so far, among its metrics."""

TESTS_METRIC: Final = "privacy_tests_epsilon"
"""What its evaluations have cost a worker's test records so far, where their metrics have noise."""

EPSILONS: Final = (METRIC, TESTS_METRIC)

LOSS_NOISE: Final = 1.5
"""The losses' noise in units of the gradients', where it is not given: the losses then have a tenth of a
step's ``1 / multiplier^2``."""

MOST_NOISE: Final = 1e4
"""Beyond it the accountant loses digits."""

LEAST: Final = 1e-12
"""Of noises and clips: far below it float32 and the accountant's squares lose their digits."""

_NOT_ZERO: Final = ("clip", "loss_clip", "noise", "loss_noise", "metric_noise")

_MOST_STEPS: Final = 2**53
_PRECISION: Final = 1e-3
"""Of the noise that is computed from an epsilon, relative."""

_ORDERS: Final = (
    *(1.5, *(quarter / 4 for quarter in range(8, 41)), *range(11, 33)),
    *(40, 48, 64, 80, 96, 128, 160, 256, 320, 512, 1024),
)
"""Of Renyi divergences; the best gives epsilon. A third of the library's take a third of its time, and gave
the same epsilon to three digits wherever it was above 0.05."""


@dataclass(frozen=True)
class RecordPrivacy:
    """What ``privacy.records`` says.

    Attributes:
        clip: C, the largest norm of a record's gradient.
        loss_clip: the largest loss of a record; one below 0 counts as 0.
        delta: what epsilon is stated for.
        noise: the standard deviation of the noise on the sum of gradients, in units of C; ``None`` where it
            follows from ``epsilon``.
        loss_noise: of that on the sum of losses, in units of ``loss_clip``; ``None`` for :data:`LOSS_NOISE`
            times ``noise``.
        epsilon: the most that a run's rounds may cost a record; ``None`` where ``noise`` is given.
        metric_noise: the standard deviation of the noise on the sums of the test records' metrics, in units
            of the most by which one record moves them all together; ``None`` for no noise.
    """

    clip: float
    loss_clip: float
    delta: float
    noise: float | None = None
    loss_noise: float | None = None
    epsilon: float | None = None
    metric_noise: float | None = None

    @property
    def too_small(self) -> dict[str, float]:
        """Noises and clips below :data:`LEAST`, by name."""
        named = {name: getattr(self, name) for name in _NOT_ZERO}
        return {name: value for name, value in named.items() if value is not None and value < LEAST}

    @property
    def noises(self) -> tuple[float, float]:
        """``noise`` and ``loss_noise``, once known."""
        assert self.noise is not None
        return self.noise, LOSS_NOISE * self.noise if self.loss_noise is None else self.loss_noise


class Accountant:
    """What steps cost a record of a worker: epsilon at the settings' delta.

    Raises:
        ConfigError: if ``dp-accounting`` is not installed.
    """

    def __init__(self, privacy: RecordPrivacy, records: int, batch_size: int) -> None:
        dp = require("dp_accounting", "account for privacy.records", "records")
        self._rdp = require("dp_accounting.rdp", "account for privacy.records", "records")
        noise, loss_noise = privacy.noises
        mechanism = dp.ComposedDpEvent([dp.GaussianDpEvent(noise / 2), dp.GaussianDpEvent(loss_noise)])
        accountant = self._rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp.SampledWithoutReplacementDpEvent(records, batch_size, mechanism))
        self._of_a_step = accountant.rdp
        self._delta = privacy.delta

    def epsilon(self, steps: int) -> float:
        """After so many steps; infinite where the noise is too little for any."""
        if not steps:
            return 0.0
        epsilon, _ = self._rdp.compute_epsilon(_ORDERS, steps * self._of_a_step, self._delta)
        return float(epsilon)


@functools.lru_cache(maxsize=1024)
def accountant_of(privacy: RecordPrivacy, records: int, batch_size: int) -> Accountant:
    """The same for workers with as many records: to make one takes a third of a second."""
    return Accountant(privacy, records, batch_size)


@functools.lru_cache(maxsize=4096)
def epsilon_of_tests(privacy: RecordPrivacy, evaluations: int) -> float:
    """What so many evaluations cost a test record: each tells of all, with noise."""
    if not evaluations:
        return 0.0
    dp = require("dp_accounting", "account for privacy.records", "records")
    rdp = require("dp_accounting.rdp", "account for privacy.records", "records")
    accountant = rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp.GaussianDpEvent(privacy.metric_noise), evaluations)
    return float(accountant.get_epsilon(privacy.delta))


@functools.lru_cache(maxsize=1024)
def with_noise(privacy: RecordPrivacy, records: int, batch_size: int, rounds: int) -> RecordPrivacy:
    """With the least noise that keeps ``rounds`` steps within ``epsilon``, where that is given.

    Raises:
        ConfigError: if no noise does.
    """
    if privacy.noise is not None:
        return privacy
    assert privacy.epsilon is not None
    low, high = 0.05, MOST_NOISE

    def costs_more(noise: float) -> bool:
        spent = Accountant(replace(privacy, noise=noise), records, batch_size).epsilon(rounds)
        return spent > (privacy.epsilon or 0.0)

    if costs_more(high):
        raise ConfigError(
            f"privacy.records.epsilon {privacy.epsilon:g} at delta {privacy.delta:g} cannot be kept in "
            f"{rounds} rounds with minibatches of {batch_size} of {records} records; raise it"
        )
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if costs_more(middle) else (low, middle)
    return replace(privacy, noise=high)


def require_delta(worker: int, delta: float, records: int, kind: str) -> None:
    """Raise ConfigError if delta is above 1/n for a worker's training or test records."""
    if delta > 1 / records:
        raise ConfigError(
            f"privacy.records.delta {delta:g} is above 1/{records}: worker {worker} has {records} {kind} "
            "records, and publishing one of them at random would be as private; "
            f"set it well below {1 / records:.2g}"
        )


class Account:
    """A worker's: how many steps it has taken, and what they have cost each of its records.

    Attributes:
        privacy: with the noise that this worker adds.
        steps: spent.
        evaluations: that have told of the test records with noise.
        terms: what a step costs by.

    Args:
        records: n, the training records that the worker has.
        rounds: those that are planned.

    Raises:
        ConfigError: if delta is above 1/n, or the noise cannot be found.
    """

    def __init__(
        self, worker: int, privacy: RecordPrivacy, *, records: int, batch_size: int, rounds: int
    ) -> None:
        require_delta(worker, privacy.delta, records, "training")
        self.privacy = with_noise(privacy, records, batch_size, rounds)
        noise, loss_noise = self.privacy.noises
        self.terms = {"records": records, "batch_size": batch_size, "noise": noise, "loss_noise": loss_noise}
        self.steps = self.evaluations = 0
        self.planned = rounds
        self._worker = worker
        self._accountant = accountant_of(self.privacy, records, batch_size)
        self._limit: float | None = None
        self._most = _MOST_STEPS
        if privacy.epsilon is not None:
            self.limit(privacy.epsilon)

    def limit(self, epsilon: float) -> None:
        """Let the worker take no step that would cost a record more."""
        if self._limit is None or epsilon < self._limit:
            self._limit = epsilon
            self._most = _last(lambda steps: self._accountant.epsilon(steps) <= epsilon, _MOST_STEPS)

    @property
    def epsilon(self) -> float:
        """What has been spent."""
        return self._accountant.epsilon(self.steps)

    @property
    def planned_epsilon(self) -> float:
        """What the planned rounds cost."""
        return self._accountant.epsilon(self.planned)

    def resume(self, steps: int, terms: Mapping[str, float]) -> None:
        """Go on from the steps that another process of the worker has spent.

        Raises:
            ConfigError: if those had another cost.
        """
        other = [
            f"{name} {terms[name]:g} and now {own:g}"
            for name, own in self.terms.items()
            if not math.isclose(terms.get(name, own), own, rel_tol=_PRECISION)
        ]
        if other:
            raise ConfigError(
                f"worker {self._worker} has taken {steps} private steps with {', '.join(other)}: what they "
                "have cost is not what it would be now; give the worker the same training records and the "
                "run its settings, or take part in a new run"
            )
        self.steps, self.evaluations = steps, int(terms.get("evaluations", 0))

    @property
    def kept_terms(self) -> Mapping[str, float]:
        """What another process needs to :meth:`resume`."""
        return {**self.terms, "evaluations": self.evaluations} if self.evaluations else self.terms

    @property
    def told(self) -> dict[str, float]:
        """What has been spent, by metric."""
        tests = {TESTS_METRIC: epsilon_of_tests(self.privacy, self.evaluations)}
        return {METRIC: self.epsilon, **({} if self.privacy.metric_noise is None else tests)}

    def spend_on_tests(self) -> None:
        """Count an evaluation that tells of all test records, before its noise is drawn.

        Raises:
            BudgetError: if it would cost one of them too much.
        """
        cost = epsilon_of_tests(self.privacy, self.evaluations + 1)
        if self._limit is not None and cost > self._limit:
            raise BudgetError(
                f"worker {self._worker} may spend an epsilon of {self._limit:g} on each test record, and one "
                f"more evaluation than {self.evaluations} would cost {cost:.4g}; evaluate less often "
                "(evaluation.every), or raise privacy.records.metric_noise"
            )
        self.evaluations += 1

    def spend(self) -> None:
        """Count a step, before anything of it is drawn.

        Raises:
            BudgetError: if it would cost too much.
        """
        if self.steps >= self._most:
            raise BudgetError(
                f"worker {self._worker} may spend an epsilon of {self._limit:g} at delta "
                f"{self.privacy.delta:g} on each record; {self.steps} steps have cost {self.epsilon:.4g}, "
                "and one more would cost too much"
            )
        self.steps += 1


def _last(is_within: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that is within, where 0 is, and all below one that is are."""
    step = 1
    while step <= most and is_within(step):
        step *= 2
    low, high = step // 2, step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low
