"""What steps cost a record, against another implementation; and where an account ends."""

from __future__ import annotations

import math

import pytest

from afl.core.record_privacy import Account, Accountant, RecordPrivacy, epsilon_of_tests, with_noise
from afl.errors import BudgetError, ConfigError, ExitCode

AUTODP = {
    # records, minibatch, noise, loss_noise, steps, delta
    (4800, 64, 1.8, 2.7, 1500, 1e-5): 7.968513194127549,
    (4800, 64, 3.64, 5.46, 1500, 1e-5): 2.998463674925388,
    (1000, 32, 4.0, 6.0, 200, 1e-4): 2.039519014006098,
    (60000, 256, 1.5, 10.0, 5000, 1e-6): 6.3008105314329566,
    (500, 100, 20.0, 30.0, 100, 1e-3): 1.307754654450083,
}
"""Renyi divergences at the orders 2 to 128 by autodp 0.2.3.1, which is by the authors of the theorem
(``anaRDPacct.compose_subsampled_mechanism(..., improved_bound_flag=True)``, with the multiplier
``(4 / noise^2 + 1 / loss_noise^2)^(-1/2)``), each turned into an epsilon by Proposition 12 of Canonne, Kamath
and Steinke (2020): ``rdp + ln(1 - 1/a) - ln(delta a) / (a - 1)``; the least of them."""


@pytest.mark.parametrize("setting", AUTODP)
def test_epsilon_is_that_of_an_independent_accountant(setting: tuple[float, ...]) -> None:
    records, batch_size, noise, loss_noise, steps, delta = setting
    privacy = RecordPrivacy(1.0, 5.0, delta, noise=noise, loss_noise=loss_noise)
    found = Accountant(privacy, int(records), int(batch_size)).epsilon(int(steps))
    assert found == pytest.approx(AUTODP[setting], rel=0.01)


@pytest.mark.parametrize(
    ("noise", "evaluations", "delta"), [(10.0, 20, 1e-5), (3.0, 15, 1e-5), (8.0, 1, 1e-3)]
)
def test_the_epsilon_of_test_records_is_hardly_above_the_exact_one(
    noise: float, evaluations: int, delta: float
) -> None:
    found = epsilon_of_tests(RecordPrivacy(1.0, 5.0, delta, noise=1.0, metric_noise=noise), evaluations)
    # Balle and Wang (2018), theorem 8, of a Gaussian mechanism: this epsilon's delta, and a smaller one's.
    mean = math.sqrt(evaluations) / noise

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def delta_of(epsilon: float) -> float:
        return below(mean / 2 - epsilon / mean) - math.exp(epsilon) * below(-mean / 2 - epsilon / mean)

    assert delta_of(found) <= delta < delta_of(0.8 * found)


def test_the_noise_for_an_epsilon_is_the_least_that_keeps_it() -> None:
    asked = RecordPrivacy(1.0, 5.0, 1e-5, epsilon=3.0)
    found = with_noise(asked, 4800, 64, 300)
    assert found.noise is not None

    def costs(noise: float) -> float:
        return Accountant(RecordPrivacy(1.0, 5.0, 1e-5, noise=noise), 4800, 64).epsilon(300)

    assert costs(found.noise) <= 3.0 < costs(0.995 * found.noise)


def test_an_epsilon_that_no_noise_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"epsilon 1e-09 at delta 1e-05 cannot be kept in 10 rounds"):
        with_noise(RecordPrivacy(1.0, 5.0, 1e-5, epsilon=1e-9), 100, 50, 10)


def account(**changes: float) -> Account:
    privacy = RecordPrivacy(**{"clip": 1.0, "loss_clip": 5.0, "delta": 1e-4, "noise": 4.0, **changes})
    return Account(3, privacy, records=1000, batch_size=32, rounds=50)


def spend_all(one: Account) -> None:
    for _ in range(50):
        one.spend()


def test_an_account_ends_at_the_last_step_that_its_limit_allows() -> None:
    one = account()
    assert one.epsilon == 0.0
    one.limit(0.9 * one.planned_epsilon)
    one.limit(5.0)
    while one.epsilon <= 0.88 * one.planned_epsilon:
        one.spend()
    with pytest.raises(BudgetError, match=r"worker 3 may spend an epsilon of .* at delta 0.0001") as caught:
        spend_all(one)
    assert 0 < one.steps < 50
    assert one.epsilon <= 0.9 * one.planned_epsilon
    one.steps += 1
    assert one.epsilon > 0.9 * one.planned_epsilon
    assert caught.value.exit_code is ExitCode.PRIVACY


def test_the_rounds_that_are_planned_fit_an_epsilon_and_hardly_one_more() -> None:
    one = account(noise=None, epsilon=2.0)  # type: ignore[arg-type]
    spend_all(one)
    assert 1.99 < one.epsilon <= 2.0
    with pytest.raises(BudgetError, match="50 steps have cost"):
        one.spend()


def test_a_delta_above_one_over_the_records_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"delta 0\.01 is above 1/1000: worker 3 has 1000 training records"):
        account(delta=0.01)


def test_steps_of_an_earlier_process_go_on_only_where_they_cost_the_same() -> None:
    one = account(noise=1.0)
    with pytest.raises(ConfigError, match="5 private steps with records 500 and now 1000:"):
        one.resume(5, {**one.terms, "records": 500})
    one.resume(5, one.terms)
    assert one.steps == 5
