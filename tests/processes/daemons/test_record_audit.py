"""An audit with canaries: what an attacker who sees every gradient can show is less than the claim, and more
than the claim if the noise is halved in secret."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from scipy.stats import beta
from torch import Tensor, nn

from afl import Classification, SharedRandomness, TaskContext, WorkerData
from afl.core.record_privacy import RecordPrivacy
from afl.tasks.base import Batch
from afl.tasks.initialization import build_vector
from afl_worker.training.private import PrivateOracle

RECORDS, STEPS, TRIALS, REPETITIONS = 8, 2, 300, 10
DELTA, CONFIDENCE = 0.01, 0.99
NORMAL = NormalDist()


class Canary(Classification):
    """A record's gradient is its input; that of record 0 points along the first coordinate or against it, and
    no other record's has a part along it: a record that is replaced cannot move the sum further."""

    def __init__(self, sign: float) -> None:
        self.sign = sign

    def model(self) -> nn.Module:
        return nn.Linear(4, 1, bias=False)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        x = torch.randn(RECORDS, 4)
        x[:, 0] = 0.0
        x[0] = torch.tensor([100 * self.sign, 0, 0, 0])
        y = torch.zeros(RECORDS, dtype=torch.int64)
        return WorkerData(train=(x, y), test=(x, y))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        loss: Tensor = model(batch[0]).mean()
        return loss


def lower_bound(batch_size: int, *, share_of_noise: float = 1.0) -> tuple[float, float]:
    """The epsilon that an attacker can show with confidence, and the claim.

    The attacker adds the noised gradients up along the canary and guesses its sign. From how often it errs
    follows the least mu of a Gaussian mechanism that allows so few errors, and of that the epsilon (Nasr et
    al., "Tight auditing of differentially private machine learning", 2023).
    """
    privacy = RecordPrivacy(1.0, 1.0, DELTA, noise=2 * math.sqrt(STEPS), loss_noise=1e3)
    errors, claim = [], 0.0
    for sign in (1.0, -1.0):
        task, randomness = Canary(sign), SharedRandomness.from_int(1)
        one = PrivateOracle(
            task,
            build_vector(task, randomness),
            {0: task.data(0, TaskContext(1, randomness))},
            randomness,
            records=privacy,
            rounds=STEPS,
            batch_size=batch_size,
            evaluation_batch_size=8,
        )
        claim = one.accounts[0].planned_epsilon
        one.accounts[0].privacy = replace(privacy, noise=share_of_noise * 2 * math.sqrt(STEPS))
        wrong = 0
        for _ in range(TRIALS):
            score = sum(float(one.gradient(0, 1)[2][0]) for _ in range(STEPS))
            wrong += (score > 0) is not (sign > 0)
        # Clopper and Pearson's bound.
        errors.append(float(beta.ppf((1 + CONFIDENCE) / 2, wrong + 1, TRIALS - wrong)))
    mu = max(0.0, -sum(map(NORMAL.inv_cdf, errors)))
    return epsilon_of(mu), claim


def epsilon_of(mu: float) -> float:
    """At ``DELTA``, of a Gaussian mechanism (Balle and Wang 2018), by bisection."""
    low, high = 0.0, 50.0
    while mu and high - low > 1e-4:
        middle = (low + high) / 2
        delta = NORMAL.cdf(mu / 2 - middle / mu) - math.exp(middle) * NORMAL.cdf(-mu / 2 - middle / mu)
        low, high = (middle, high) if delta > DELTA else (low, middle)
    return low


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_can_be_shown_is_below_the_claim_and_above_it_with_half_the_noise() -> None:
    for _ in range(REPETITIONS):
        shown, claim = lower_bound(RECORDS)
        assert 0.2 * claim < shown < claim
        shown, claim = lower_bound(RECORDS, share_of_noise=0.5)
        assert shown > claim
        shown, claim = lower_bound(RECORDS // 2)
        assert shown < claim
