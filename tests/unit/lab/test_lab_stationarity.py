"""The Moreau envelope's gradient against grids, closed forms and its own certificate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.randomness import SharedRandomness
from afl.tasks import TaskContext
from afl.tasks.synthetic import Synthetic
from afl_reproduction.theory.risks import SyntheticRisks
from afl_reproduction.theory.stationarity import Meter, delta_phi, mean_square

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratics:
    """``R_i(w) = a_i / 2 ||w - c_i||^2 + b_i``, concave where ``a_i < 0``; ``|a_i| <= L``."""

    curvatures: Vector
    centres: Vector
    offsets: Vector
    smoothness: float

    def values(self, w: Vector) -> Vector:
        square: Vector = ((w - self.centres) ** 2).sum(axis=1)
        return self.curvatures / 2 * square + self.offsets

    def gradients(self, w: Vector) -> Vector:
        return self.curvatures[:, None] * (w - self.centres)


def synthetic(workers: int, dim: int, spread: float = 1.0) -> SyntheticRisks:
    return SyntheticRisks.of(
        Synthetic(dim=dim, spread=spread), TaskContext(workers, SharedRandomness.from_int(11))
    )


def by_grid(objective: SyntheticRisks | Quadratics, w: Vector, width: float) -> tuple[Vector, float]:
    """``prox(w)`` and the envelope, on ever finer grids around the best point so far."""
    best = w.copy()

    def worst(u: Vector) -> float:
        return float(objective.values(u).max() + objective.smoothness * ((u - w) ** 2).sum())

    while width > 1e-9:
        axes = [np.linspace(x - width, x + width, 41) for x in best]
        points = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, len(w))
        best = min(points, key=worst)
        width /= 8
    return best, worst(best)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("where", [-1.7, 0.1, 0.6])
def test_it_is_what_a_grid_finds(dim: int, workers: int, where: float) -> None:
    objective = synthetic(workers, dim)
    w = where * np.array([1.0, -0.5])[:dim]
    point, envelope = by_grid(objective, w, width=2.0)
    found = Meter(objective, 1e-7).measure(w)
    assert found.error <= 1e-7
    assert found.point == pytest.approx(point, abs=1e-6)
    assert found.norm == pytest.approx(2 * objective.smoothness * np.linalg.norm(w - point), abs=1e-5)
    assert found.envelope == pytest.approx(envelope, abs=1e-10)
    assert found.weights.sum() == pytest.approx(1)
    assert found.weights.min() >= 0


def test_one_quadratic_has_a_closed_form() -> None:
    # prox = (a c + 2 L w) / (a + 2 L) = (1 * 3 + 4 * 1) / 5 = 1.4; 2 L |w - prox| = 4 * 0.4.
    objective = Quadratics(np.array([1.0]), np.array([[3.0]]), np.zeros(1), smoothness=2.0)
    found = Meter(objective, 1e-7).measure(np.array([1.0]))
    assert found.point[0] == pytest.approx(1.4, abs=1e-7)
    assert found.norm == pytest.approx(1.6, abs=2e-7)


def test_two_quadratics_meet_where_they_are_equal() -> None:
    # At w = 0 both are 1/2 and lie opposite each other: 0 is stationary, with equal weights.
    objective = Quadratics(np.ones(2), np.array([[1.0], [-1.0]]), np.zeros(2), smoothness=1.0)
    assert Meter(objective, 1e-7).measure(np.zeros(1)).norm == pytest.approx(0, abs=2e-7)
    # At w = 3: h(u) = (|u| + 1)^2 / 2 + (u - 3)^2; u + 1 + 2 (u - 3) = 0 at u = 5/3, and 2 (3 - 5/3) = 8/3.
    assert Meter(objective, 1e-7).measure(np.array([3.0])).norm == pytest.approx(8 / 3, abs=2e-7)
    # At w = 1/4 the step to u = -1/6 would cross the kink, so u = 0 and the norm is 2 * 1/4.
    found = Meter(objective, 1e-7).measure(np.array([0.25]))
    assert found.norm == pytest.approx(0.5, abs=2e-7)
    # There, q_1 (-1) + q_2 (+1) = 1/2.
    assert found.weights == pytest.approx([0.25, 0.75], abs=1e-7)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([1e-1, 1e-2, 1e-4]),
)
def test_the_certificate_holds(seed: int, workers: int, dim: int, tolerance: float) -> None:
    """For risks that are convex and concave, equal at times, the error is never more than is said."""
    generator = np.random.default_rng(seed)
    curvatures = generator.uniform(-1, 1, workers)
    centres = generator.standard_normal((workers, dim)).round(1)
    centres[-1], curvatures[-1] = centres[0], curvatures[0]
    objective = Quadratics(curvatures, centres, generator.standard_normal(workers).round(1), 1.0)
    w = generator.standard_normal(dim)
    exact = Meter(objective, 1e-6).measure(w)
    loose = Meter(objective, tolerance).measure(w)
    assert loose.error <= tolerance
    assert abs(loose.norm - exact.norm) <= loose.error + 1e-6
    assert -1e-12 <= loose.envelope - exact.envelope <= loose.error**2 / 4 + 1e-12


def test_a_warm_start_changes_nothing_beyond_the_tolerance() -> None:
    objective = synthetic(16, 20)
    models = [np.linspace(-1, 1, 20) * (1 + 0.3 * step) for step in range(6)]
    meter = Meter(objective, 1e-7)
    for w in models:
        assert meter.measure(w).norm == pytest.approx(Meter(objective, 1e-7).measure(w).norm, abs=2e-7)


def test_norms_obey_the_bounds_of_lemma_2() -> None:
    """No norm is above G, and the gradient is 2L-Lipschitz."""
    objective, task = synthetic(8, 30), Synthetic(dim=30)
    generator = np.random.default_rng(0)
    meter = Meter(objective, 1e-7)
    before, at = None, None
    for _ in range(20):
        w = generator.uniform(-2, 2, 30)
        found = meter.measure(w)
        assert found.norm <= task.lipschitz
        gradient = 2 * objective.smoothness * (w - found.point)
        if at is not None:
            most = 2 * objective.smoothness * np.linalg.norm(w - at)
            assert np.linalg.norm(gradient - before) <= most + 2e-7
        before, at = gradient, w


def test_the_mean_is_over_all_models() -> None:
    objective = synthetic(3, 4)
    models = [np.full(4, x, dtype=np.float32) for x in (0.1, 0.5, -0.9)]
    found = mean_square(objective, iter(models), 1e-6)
    norms = [Meter(objective, 1e-7).measure(w).norm for w in models]
    assert found.norms == pytest.approx(norms, abs=1e-6)
    assert found.value == pytest.approx(np.mean(np.square(norms)), abs=2e-6)
    assert found.value < found.highest < found.value + 3 * 1e-6
    assert 0 < found.error <= 1e-6


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_delta_phi_is_tight_and_never_too_small(spread: float) -> None:
    objective = synthetic(3, 2, spread)
    w = np.full(2, 0.1)
    axis = np.linspace(-spread, spread, 101)
    least = min(objective.values(np.array([x, y])).max() for x in axis for y in axis)
    true = by_grid(objective, w, width=1.0)[1] - least
    found = delta_phi(objective, w, 1e-6)
    # A grid of steps of spread / 50 misses the least worst risk by G times half its diagonal at most.
    assert true <= found <= true + 0.65 / np.sqrt(2) * spread / 50


def test_what_float64_cannot_resolve_is_refused() -> None:
    with pytest.raises(ArithmeticError, match=r"known to .*, not to 1e-30"):
        Meter(synthetic(4, 3), 1e-30).measure(np.full(3, 0.4))
