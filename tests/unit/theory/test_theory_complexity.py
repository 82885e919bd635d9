"""Table 1 against the paper's own formulas."""

from __future__ import annotations

import math

import pytest

from afl.theory import Complexity, complexities, theory_ratio

# m = 100, d = 1000, 1/epsilon = 2: epsilon^-8 = 256, epsilon^-12 = 4096. ln 100 = 4.605170185988092.
M, D, EPSILON, LOG = 100, 1000, 0.5, 4.605170185988092

PAPER = [
    ("sgda", 1e7 * 256, 1e5),
    ("drfa", 4096 + 1e4 * 256, 1e5),
    ("drfa", 1e4 * 256, 1e5),
    ("afl-br", LOG**2 * 256, 1e5),
    ("afl-com", LOG**2 * 256, 1e5 / LOG**0.25),
    ("afl-com", LOG**2 * 256, 1e5 / LOG**0.5),
]


def evaluated(formula: str) -> float:
    text = formula.replace("log m", "log").replace("^", "**").replace(" + ", "+").replace(" ", "*")
    return float(eval(text, {"m": M, "d": D, "eps": EPSILON, "log": LOG}))


def test_the_rows() -> None:
    rows = complexities(M, D, EPSILON)
    assert [row.algorithm for row in rows] == [name for name, *_ in PAPER]
    for row, (_, rounds, entries) in zip(rows, PAPER, strict=True):
        assert row.rounds.value == pytest.approx(rounds, rel=1e-14)
        assert row.per_round.value == pytest.approx(entries, rel=1e-14)
        assert row.total.value == pytest.approx(rounds * entries, rel=1e-14)


@pytest.mark.parametrize(
    "row", complexities(M, D, EPSILON), ids=lambda row: f"{row.algorithm} {row.technique}"
)
def test_the_formulas_shown_are_the_values(row: Complexity) -> None:
    for order in (row.rounds, row.per_round, row.total):
        assert evaluated(order.formula) == pytest.approx(order.value, rel=1e-13), order.formula


@pytest.mark.parametrize("workers", [1, 2, 3, 1000])
def test_a_round_of_compression_is_the_ratio_that_keeps_the_rate(workers: int) -> None:
    *_, br, top, rand = complexities(workers, D, EPSILON)
    for row, kind in ((top, "contractive"), (rand, "additive-idempotent")):
        share = theory_ratio(kind, workers)  # type: ignore[arg-type]
        assert row.per_round.value / br.per_round.value == pytest.approx(share, rel=1e-14)
        assert row.total.value / br.total.value == pytest.approx(share, rel=1e-14)
    assert math.isfinite(br.total.value)
    assert br.rounds.value > 0
