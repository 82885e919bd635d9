"""Growth in the number of workers: the problem, the count, and the table in docs/growth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from afl.core.dual import ProjectedAscent
from afl_benchmarks.growth import (
    DIM,
    ETA_W,
    GAP,
    METHODS,
    RESULTS,
    TABLE,
    WINDOW,
    Problem,
    measured,
    median,
    read,
    synchronizations,
    table,
)

KEPT = Path(__file__).resolve().parents[3] / "docs" / "growth"


def centres(workers: int, outliers: int) -> np.ndarray:
    found = np.zeros((workers, DIM))
    found[range(outliers), range(outliers)] = GAP
    return found


@pytest.mark.parametrize("outliers", [1, 2, 5])
def test_the_lowest_loss_is_that_of_the_smallest_ball(outliers: int) -> None:
    points = centres(9, outliers)
    middle = points.mean(axis=0)
    for step in range(1, 20_001):
        farthest = points[((points - middle) ** 2).sum(axis=1).argmax()]
        middle += (farthest - middle) / (step + 1)
    largest = 0.5 * ((points - middle) ** 2).sum(axis=1).max()
    problem = Problem(workers=9, outliers=outliers, noise=0.0)
    assert problem.lowest == pytest.approx(largest, rel=2e-3)
    assert problem.target == pytest.approx(0.9 * problem.lowest + 0.1 * GAP**2 / 2)


@pytest.mark.parametrize("outliers", [1, 3])
def test_one_worker_after_the_other_gives_the_same_count(
    outliers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRFA, whose workers each take three steps of their own, without noise; losses at the second step."""
    monkeypatch.setattr("afl_benchmarks.growth.GRADIENT_NOISE", 0.0)

    class Second:
        def integers(self, _: int) -> int:
            return 1

        def normal(self, size: int) -> np.ndarray:
            return np.zeros(size)

    monkeypatch.setattr("afl_benchmarks.growth.np.random.default_rng", lambda _: Second())
    problem, points = Problem(workers=6, outliers=outliers, noise=0.0), centres(6, outliers)
    model, dual, eta_q = np.zeros(DIM), ProjectedAscent(6, 0.01), 0.01
    dual.factor = 3.0
    largest: list[float] = []
    while len(largest) < WINDOW or np.mean(largest[-WINDOW:]) > problem.target:
        largest.append(max(0.5 * float(((model - point) ** 2).sum()) for point in points))
        steps = []
        for point in points:
            own = [model]
            for _ in range(3):
                own.append(own[-1] - ETA_W * (own[-1] - point))
            steps.append(own)
        model, snapshot = (
            sum(weight * own[at] for weight, own in zip(dual.weights, steps, strict=True)) for at in (3, 2)
        )
        losses = [0.5 * float(((snapshot - point) ** 2).sum()) for point in points]
        dual.update(len(largest), np.array(losses))
        assert len(largest) < 2000
    # The last round's model was looked at, not yet moved.
    assert synchronizations(problem, METHODS["drfa"], eta_q, seed=1, most=2000) == len(largest)


def test_every_method_has_as_large_a_grid_and_its_best_step_is_counted() -> None:
    assert {len(method.grid) for method in METHODS.values()} == {7}
    problem = Problem(workers=5, outliers=1, noise=0.5)
    for name, method in METHODS.items():
        result = measured(problem, name, [1, 2], 200)
        reached = {step: rounds for step, rounds in result.searched.items() if rounds is not None}
        assert len(result.searched) == 7
        assert reached[f"{result.eta_q:g}"] == min(reached.values())
        assert result.rounds == [
            synchronizations(problem, method, result.eta_q, seed=seed, most=200) for seed in (1, 2)
        ]


def test_a_median_with_runs_that_never_arrive() -> None:
    assert median([3, None, 5]) == 5
    assert median([3, None, None]) is None
    assert median([3, None]) is None


def test_the_table_is_what_the_kept_results_give() -> None:
    assert table(read(KEPT / RESULTS)) == (KEPT / TABLE).read_text(encoding="utf-8")
