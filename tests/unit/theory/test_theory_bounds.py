"""The theorems' bounds against numbers worked out by hand, and against the last step of their proofs."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.theory import theory_ratio
from afl_reproduction.theory.theorems import Bound, Constants, Theorem, bound, covering

# Gamma_w = 5. With T = 10^4: T^(1/4) = 10, T^(1/2) = 100, T^(3/4) = 1000.
CONSTANTS = Constants(smoothness=2.0, gradient_bound=3.0, sigma_w=4.0, sigma_q=0.25, delta_phi=0.5)

SHARED_TERMS = {
    "start": Fraction(32 * 2) * Fraction(1, 2) / 10,
    # 16 * 2 * 0.25 / 10 * sqrt(ln 10), and sqrt(ln 10) = 1.5174271293851464.
    "dual weights": Fraction(8, 10) * Fraction("1.5174271293851464"),
    "restarts": Fraction(10 * 25, 100),
    "gradient noise": Fraction(25, 2 * 1000),
}


def at_ten_thousand(theorem: Theorem, delta: float = 1.0) -> Bound:
    return bound(theorem, CONSTANTS, workers=10, rounds=10_000, delta=delta)


@pytest.mark.parametrize(
    ("theorem", "delta", "own_terms"),
    [
        (Theorem.AFL_BR, 1.0, {"drift": Fraction(4 * 3 * 5, 10)}),
        # delta = 1/2: (16 + 2 - 1/4) / (1/4) = 71 and (8 + 1 - 1/4) / (1/4) = 35.
        (
            Theorem.AFL_COM,
            0.5,
            {"drift": Fraction(4 * 3 * 5 * 71, 10), "residuals": Fraction(3 * 3 * 5 * 35, 1000)},
        ),
        (
            Theorem.AFL_COM_AI,
            0.5,
            {"drift": Fraction(16 * 3 * 5 * 2, 10), "residuals": Fraction(6 * 3 * 5 * 2, 1000)},
        ),
    ],
)
def test_every_term(theorem: Theorem, delta: float, own_terms: dict[str, Fraction]) -> None:
    found = at_ten_thousand(theorem, delta)
    expected = SHARED_TERMS | own_terms
    assert {term.name: term.value for term in found.terms} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-14
    )
    assert found.value == pytest.approx(float(sum(expected.values())), rel=1e-14)


@pytest.mark.parametrize("theorem", Theorem)
def test_the_formulas_shown_are_the_values(theorem: Theorem) -> None:
    delta = 1.0 if theorem is Theorem.AFL_BR else 0.3
    names = {
        "L": 2.0,
        "G": 3.0,
        "Gamma_w": 5.0,
        "sigma_q": 0.25,
        "Delta_Phi": 0.5,
        "T": 10_000.0,
        "delta": delta,
        "lnm": math.log(10),
        "sqrt": math.sqrt,
    }
    for term in at_ten_thousand(theorem, delta).terms:
        text = term.formula.replace("ln m", "lnm").replace("^", "**")
        for operator in ("**", "/", "+", "-"):
            text = text.replace(f" {operator} ", operator)
        assert eval(text.replace(" ", "*"), names) == pytest.approx(term.value, rel=1e-14), term.formula


_positive = st.floats(1e-3, 1e3)
_constants = st.builds(Constants, _positive, _positive, _positive, _positive, _positive)


@given(
    _constants,
    st.integers(2, 10**6),
    st.integers(9, 10**12),
    st.floats(1e-3, 1.0),
    st.sampled_from(Theorem),
)
def test_it_is_what_the_proof_s_last_inequality_simplifies_to(
    constants: Constants, workers: int, rounds: int, delta: float, theorem: Theorem
) -> None:
    """The proofs end in an inequality in B, eta_w and eta_q, which the theorem's values only make simpler.

    It is below the theorem's bound, by no more than ``B >= sqrt T`` and ``B + 2 <= 2 sqrt T`` give away.
    """
    smooth, steep, q = constants.smoothness, constants.gradient_bound, constants.sigma_q
    gamma = math.hypot(steep, constants.sigma_w)
    block = math.ceil(math.sqrt(rounds))
    eta_w = 1 / (8 * smooth * rounds**0.75)
    eta_q = 2 * math.sqrt(math.log(workers)) / (q * rounds**0.25)
    moved, held = {
        Theorem.AFL_BR: (1.0, 0.0),
        Theorem.AFL_COM: ((16 + 4 * delta - delta**2) / delta**2, (8 + 2 * delta - delta**2) / delta**2),
        Theorem.AFL_COM_AI: (4 / delta, 2 / delta),
    }[theorem]
    last = (
        4 * constants.delta_phi / (eta_w * rounds)
        + 16 * smooth * steep * eta_w * (block + 2) * moved * gamma
        + 16 * smooth * math.log(workers) / (eta_q * block)
        + 4 * smooth * eta_q * q**2
        + 24 * smooth * steep * eta_w * held * gamma
        + 4 * smooth * eta_w * gamma**2
        + 10 * gamma**2 / block
    )
    theorem_s = bound(
        theorem,
        constants,
        workers=workers,
        rounds=rounds,
        delta=1.0 if theorem is Theorem.AFL_BR else delta,
    ).value
    assert theorem_s / 2 <= last * (1 + 1e-12)
    assert last <= theorem_s * (1 + 1e-12)


def is_above(one: Bound, other: Bound) -> bool:
    """By some term, and below by none: in a sum, a large term may swallow the growth of a small one."""
    pairs = [(a.value, b.value) for a, b in zip(one.terms, other.terms, strict=True)]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs) and one.value >= other.value


@given(_constants, st.integers(2, 10**4), st.integers(9, 10**8), st.floats(0.01, 0.99))
def test_it_falls_in_rounds_and_delta_and_rises_in_all_else(
    constants: Constants, workers: int, rounds: int, delta: float
) -> None:
    for theorem in (Theorem.AFL_COM, Theorem.AFL_COM_AI):
        here = bound(theorem, constants, workers=workers, rounds=rounds, delta=delta)
        assert is_above(here, bound(theorem, constants, workers=workers, rounds=2 * rounds, delta=delta))
        assert is_above(here, bound(theorem, constants, workers=workers, rounds=rounds, delta=delta * 1.01))
        assert is_above(bound(theorem, constants, workers=2 * workers, rounds=rounds, delta=delta), here)
        for field in dataclasses.fields(Constants):
            larger = dataclasses.replace(constants, **{field.name: 2 * getattr(constants, field.name)})
            assert is_above(bound(theorem, larger, workers=workers, rounds=rounds, delta=delta), here)


@given(_constants, st.integers(2, 10**4), st.integers(9, 10**8), st.floats(0.01, 1.0))
def test_the_theorems_are_ordered(constants: Constants, workers: int, rounds: int, delta: float) -> None:
    def value(theorem: Theorem, delta: float) -> float:
        return bound(theorem, constants, workers=workers, rounds=rounds, delta=delta).value

    assert value(Theorem.AFL_BR, 1.0) < value(Theorem.AFL_COM_AI, delta) < value(Theorem.AFL_COM, delta)


def test_at_delta_one_compression_still_costs_what_the_residual_bounds_give_away() -> None:
    exact = at_ten_thousand(Theorem.AFL_BR).value
    # G Gamma_w = 15. Theorem 3: (16 - 4) * 15 / 10 + 6 * 15 / 1000. Theorem 2: 4 * 19 for 16, 3 * 9 for 6.
    assert at_ten_thousand(Theorem.AFL_COM_AI).value - exact == pytest.approx(18 + 0.09)
    assert at_ten_thousand(Theorem.AFL_COM).value - exact == pytest.approx(72 * 1.5 + 27 * 0.015)


def test_far_out_the_bound_is_below_g_squared() -> None:
    assert at_ten_thousand(Theorem.AFL_BR).value > at_ten_thousand(Theorem.AFL_BR).trivial == 9
    far = bound(Theorem.AFL_BR, CONSTANTS, workers=10, rounds=10**8)
    # A tenth of each term in T^(1/4), a hundredth of the next: 1.0414 + 0.025 and less than 0.0001.
    assert far.value == pytest.approx(0.32 + 0.6 + 0.12139417 + 0.025 + 0.0000125, rel=1e-7)


@pytest.mark.parametrize("workers", [3, 10, 100, 1000])
def test_the_ratio_keeps_the_rate(workers: int) -> None:
    """The term in ``delta^-2`` (Theorem 2), in ``delta^-1`` (Theorem 3) is of the order ``sqrt(ln m)``."""
    root = math.sqrt(math.log(workers))
    assert theory_ratio("contractive", workers) ** -2 == pytest.approx(root, rel=1e-14)
    assert theory_ratio("additive-idempotent", workers) ** -1 == pytest.approx(root, rel=1e-14)


def test_few_workers_compress_nothing() -> None:
    # ln 2 = 0.69: the power would be above 1. (ln 10)^(-1/4) and (ln 10)^(-1/2), by hand.
    for workers in (1, 2):
        assert theory_ratio("contractive", workers) == theory_ratio("additive-idempotent", workers) == 1.0
    assert theory_ratio("contractive", 10) == pytest.approx(0.81179, abs=5e-6)
    assert theory_ratio("additive-idempotent", 10) == pytest.approx(0.65901, abs=5e-6)


def test_which_theorem_covers_a_pair_of_compressors() -> None:
    assert covering(1.0, 1.0, downlink_loses=False) == (Theorem.AFL_BR, 1.0)
    assert covering(0.1, 0.1, downlink_loses=False) == (Theorem.AFL_COM_AI, 0.1)
    assert covering(0.3, 0.1, downlink_loses=True) == (Theorem.AFL_COM, 0.1)
    assert covering(1.0, 0.1, downlink_loses=True) == (Theorem.AFL_COM, 0.1)
