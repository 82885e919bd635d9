"""Dual weights: against 60 digits, without overflow, and restarted at each block's end."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.dual import DualWeights, ProjectedAscent
from afl.core.dual.projections import project_below_cap, project_to_simplex


def exact(workers: int, eta_q: float, block: int, rounds: list[list[float]]) -> list[float]:
    """q after the rounds, from the definition, with 60 digits and no logarithm."""
    with localcontext() as context:
        context.prec = 60
        weights = [Decimal(1) / workers] * workers
        for round_, losses in enumerate(rounds, start=1):
            if round_ % block == 0:
                weights = [Decimal(1) / workers] * workers
                continue
            raised = [
                q * (Decimal(eta_q) * Decimal(loss)).exp() for q, loss in zip(weights, losses, strict=True)
            ]
            weights = [value / sum(raised) for value in raised]
        return [float(weight) for weight in weights]


def after(workers: int, eta_q: float, block: int, rounds: list[list[float]]) -> NDArray[np.float64]:
    dual = DualWeights(workers, eta_q, block)
    for round_, losses in enumerate(rounds, start=1):
        dual.update(round_, np.array(losses))
    return dual.weights


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, float, int, list[list[float]]]:
    workers = draw(st.integers(1, 6))
    losses = st.lists(st.floats(-30, 30), min_size=workers, max_size=workers)
    return (
        workers,
        draw(st.floats(0, 2)),
        draw(st.integers(1, 6)),
        draw(st.lists(losses, min_size=1, max_size=8)),
    )


def test_one_step_by_hand() -> None:
    # q = (1/2, 1/2), eta = 1, losses ln 3 and 0: proportional to 3 and 1.
    np.testing.assert_allclose(after(2, 1.0, 9, [[np.log(3.0), 0.0]]), [0.75, 0.25], rtol=1e-15)
    # A second step with ln 2 for the other: 3 and 2.
    np.testing.assert_allclose(
        after(2, 1.0, 9, [[np.log(3.0), 0.0], [0.0, np.log(2.0)]]), [0.6, 0.4], rtol=1e-15
    )


@given(history=histories())
@settings(deadline=None)
@example(history=(3, 0.5, 1, [[1.0, 2.0, 3.0]]))
@example(history=(4, 0.0, 5, [[-1.0, 2.0, 30.0, 0.0]] * 4))
def test_weights_are_those_of_the_definition(history: tuple[int, float, int, list[list[float]]]) -> None:
    np.testing.assert_allclose(after(*history), exact(*history), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("block", [1, 3, 7])
def test_weights_are_uniform_exactly_after_each_multiple_of_the_block(block: int) -> None:
    dual = DualWeights(5, 0.3, block)
    uniform = np.full(5, 1 / 5)
    for round_ in range(1, 22):
        dual.update(round_, np.array([5.0, 4.0, 3.0, 2.0, 1.0]) * round_)
        assert np.array_equal(dual.weights, uniform) == (round_ % block == 0)


@pytest.mark.parametrize(
    ("losses", "right"),
    [
        ([1e308, -1e308], [1.0, 0.0]),
        ([1e308, 1e308], [0.5, 0.5]),
        ([-1e308, -1e308], [0.5, 0.5]),
        ([np.finfo(np.float64).max, np.finfo(np.float64).min], [1.0, 0.0]),
        ([0.0, 1e308], [0.0, 1.0]),
    ],
)
@pytest.mark.parametrize("eta_q", [1e-3, 1.0, 1e6])
def test_no_finite_loss_overflows(losses: list[float], right: list[float], eta_q: float) -> None:
    dual = DualWeights(2, eta_q, 1000)
    with np.errstate(invalid="raise", divide="raise"):
        for round_ in range(1, 40):
            dual.update(round_, np.array(losses))
            assert np.isfinite(dual.log_weights).all()
            assert dual.weights.tolist() == right


def test_huge_losses_that_change_sides_stay_finite_and_sum_to_one() -> None:
    dual = DualWeights(3, 10.0, 1000)
    for round_ in range(1, 60):
        losses = np.roll(np.array([1e308, -1e308, 0.0]), round_)
        dual.update(round_, losses)
        assert np.isfinite(dual.weights).all()
        assert dual.weights.sum() == pytest.approx(1.0, abs=1e-15)


def test_a_weight_driven_below_1e_300_keeps_its_logarithm_and_recovers_at_the_restart() -> None:
    dual = DualWeights(2, 1.0, 4)
    dual.update(1, np.array([2000.0, 0.0]))
    assert dual.weights[1] < 1e-300
    assert dual.log_weights[1] == pytest.approx(-2000.0)
    dual.update(2, np.array([0.0, 1999.0]))
    # The logarithm was kept: 1 and e^-1 are left, which no float weight of zero could give.
    np.testing.assert_allclose(dual.weights, [1 / (1 + np.exp(-1)), np.exp(-1) / (1 + np.exp(-1))])
    dual.update(3, np.array([5000.0, 0.0]))
    assert dual.weights[1] < 1e-300
    dual.update(4, np.array([5000.0, 0.0]))
    assert dual.weights.tolist() == [0.5, 0.5]


@given(history=histories(), seed=st.integers(0, 99))
@settings(deadline=None)
def test_renumbering_the_workers_renumbers_the_weights(
    history: tuple[int, float, int, list[list[float]]], seed: int
) -> None:
    workers, eta_q, block, rounds = history
    order = np.random.default_rng(seed).permutation(workers)
    renumbered = [np.array(losses)[order].tolist() for losses in rounds]
    np.testing.assert_allclose(
        after(workers, eta_q, block, renumbered), after(*history)[order], rtol=1e-12, atol=1e-300
    )


@given(history=histories(), constant=st.integers(-(2**20), 2**20))
@settings(deadline=None)
def test_a_constant_added_to_all_losses_changes_nothing(
    history: tuple[int, float, int, list[list[float]]], constant: int
) -> None:
    workers, eta_q, block, rounds = history
    # Multiples of 2^-10, so that the addition itself is exact.
    exact_rounds = [[round(loss * 1024) / 1024 for loss in losses] for losses in rounds]
    shifted = [[loss + constant for loss in losses] for losses in exact_rounds]
    np.testing.assert_allclose(
        after(workers, eta_q, block, shifted), after(workers, eta_q, block, exact_rounds), rtol=0, atol=1e-12
    )


@given(history=histories())
@settings(deadline=None)
def test_weights_stay_on_the_simplex(history: tuple[int, float, int, list[list[float]]]) -> None:
    weights = after(*history)
    assert ((weights >= 0) & (weights <= 1)).all()
    assert weights.sum() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_never_gets_in(loss: float) -> None:
    dual = DualWeights(2, 1.0, 4)
    with pytest.raises(AssertionError):
        dual.update(1, np.array([loss, 0.0]))
    assert dual.weights.tolist() == [0.5, 0.5]


# Projected ascent.


def nearest_on_the_simplex(point: list[float]) -> list[float]:
    """Of all faces of the simplex: the projection onto the face's plane that is nearest and feasible."""
    best: list[float] = []
    distance = float("inf")
    for face in range(1, 1 << len(point)):
        inside = [place for place in range(len(point)) if face >> place & 1]
        shift = (sum(point[place] for place in inside) - 1) / len(inside)
        found = [point[place] - shift if place in inside else 0.0 for place in range(len(point))]
        far = sum((x - y) ** 2 for x, y in zip(found, point, strict=True))
        if min(found) >= -1e-12 and far < distance:
            best, distance = found, far
    return best


@given(point=st.lists(st.floats(-3, 3), min_size=1, max_size=6))
@settings(deadline=None)
@example(point=[0.2, 0.3, 0.5])
@example(point=[1e-9, 1e-9, 1.0])
@example(point=[7.0])
def test_the_projection_is_the_nearest_point(point: list[float]) -> None:
    found = project_to_simplex(np.array(point))
    np.testing.assert_allclose(found, nearest_on_the_simplex(point), atol=1e-9)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("point", "right"),
    [
        ([1e300, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ([-1e300, -1e300], [0.5, 0.5]),
        ([1e17, 1e17 + 16, 0.0], [0.0, 1.0, 0.0]),
        ([5e-324, 0.0], [0.5, 0.5]),
    ],
)
def test_the_projection_of_extreme_points(point: list[float], right: list[float]) -> None:
    assert project_to_simplex(np.array(point)).tolist() == right


def test_ascent_by_hand() -> None:
    ascent = ProjectedAscent(2, 0.1)
    ascent.update(1, np.array([3.0, 1.0]))
    # (0.5 + 0.3, 0.5 + 0.1) is 0.4 above the simplex: 0.2 off each.
    np.testing.assert_allclose(ascent.weights, [0.6, 0.4], atol=1e-15)
    ascent.update(2, np.array([0.0, 20.0]))
    assert ascent.weights.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("eta_q", [0.0, 0.5, 1e300])
@pytest.mark.parametrize("losses", [[1e308, -1e308], [1e-320, 0.0], [1e308, 1e308]])
def test_ascent_stays_on_the_simplex_for_any_finite_loss(eta_q: float, losses: list[float]) -> None:
    ascent = ProjectedAscent(2, eta_q)
    for round_ in range(1, 4):
        ascent.update(round_, np.array(losses))
        assert ascent.weights.min() >= 0
        assert ascent.weights.sum() == pytest.approx(1, abs=1e-12)


@st.composite
def capped(draw: st.DrawFn) -> tuple[NDArray[np.float64], float]:
    """Logarithms of weights that sum to 1, and a cap above 1/m."""
    logs = np.array(draw(st.lists(st.floats(-40, 0), min_size=2, max_size=9)))
    logs -= logs.max()
    logs -= np.log(np.exp(logs).sum())
    return logs, draw(st.floats(1 / len(logs), 1, exclude_min=True))


def nearest_below_cap(weights: NDArray[np.float64], largest: float) -> NDArray[np.float64]:
    """``min(c q, largest)``, its c found by halving an interval."""
    low, high = 0.0, 1 / weights.min()
    for _ in range(2200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * weights, largest).sum() < 1 else (low, middle)
    return np.minimum(high * weights, largest)


@given(case=capped())
@settings(deadline=None)
@example(case=(np.log([0.7, 0.1, 0.1, 0.1]), 0.25 + 1e-9))
@example(case=(np.log([1 - 3e-18, 1e-18, 1e-18, 1e-18]), 1 / 3))
def test_capped_weights_are_the_nearest_in_divergence(case: tuple[NDArray[np.float64], float]) -> None:
    logs, largest = case
    projected = np.exp(project_below_cap(logs, largest))
    assert projected.sum() == pytest.approx(1.0, abs=1e-11)
    assert projected.max() <= largest * (1 + 1e-15)
    for before, after_ in ((logs[i] - logs, projected[i] - projected) for i in range(len(logs))):
        assert (after_[before >= 0] >= 0).all(), "another order"
    np.testing.assert_allclose(projected, nearest_below_cap(np.exp(logs), largest), rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("workers", [2, 3, 7, 10, 1000])
def test_caps_of_whole_shares_leave_no_more_than_one(workers: int) -> None:
    for count in range(1, workers):
        largest = 1 / count
        dual = DualWeights(workers, 1.0, 10_000, largest)
        dual.update(1, np.linspace(1e5, 0.0, workers))
        np.testing.assert_allclose(dual.weights[:count], largest, rtol=1e-9)
        assert dual.weights.sum() == pytest.approx(1.0, abs=1e-11)
        if workers == 1000 and count > 20:
            break


@given(history=histories())
@settings(deadline=None)
def test_a_cap_of_one_changes_no_bit(history: tuple[int, float, int, list[list[float]]]) -> None:
    workers, eta_q, block, rounds = history
    if workers < 2:
        return
    one, other = DualWeights(workers, eta_q, block), DualWeights(workers, eta_q, block, 1.0)
    for round_, losses in enumerate(rounds, start=1):
        one.update(round_, np.array(losses))
        other.update(round_, np.array(losses))
        assert one.weights.tobytes() == other.weights.tobytes()
        assert one.log_weights.tobytes() == other.log_weights.tobytes()


@pytest.mark.parametrize("loss", [1e300, -1e300, 1e308, 5.0])
def test_no_loss_gives_a_worker_more_than_the_cap(loss: float) -> None:
    dual = DualWeights(10, 0.5, 20, 0.25)
    for round_ in range(1, 40):
        losses = np.linspace(1.0, 2.0, 10)
        losses[3] = loss
        with np.errstate(invalid="raise", divide="raise"):
            dual.update(round_, losses)
        assert dual.weights.max() <= 0.25
        assert dual.weights.sum() == pytest.approx(1.0, abs=1e-12)
        if round_ % 20 == 0:
            assert dual.weights.tolist() == [0.1] * 10
        if loss == 1e300 and round_ % 20:
            np.testing.assert_allclose(np.delete(dual.weights, 3), 0.75 / 9)


def test_capped_weights_go_on_from_their_state() -> None:
    one, other = DualWeights(5, 0.7, 9, 0.3), DualWeights(5, 0.7, 9, 0.3)
    losses = np.array([4.0, 1.0, 2.0, 3.5, 0.0])
    one.update(1, losses)
    other.restore({name: array.copy() for name, array in one.state().items()})
    for dual in (one, other):
        dual.update(2, losses[::-1])
    assert one.weights.tobytes() == other.weights.tobytes()
