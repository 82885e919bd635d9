"""The grid of integer messages: exact differences, and ranges that are found from far off."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core import grid
from afl.core.grid import FAR, FIRST_RANGE, Grid, on_grid, rounded
from afl.core.messages import BIT_WIDTHS
from afl.core.vectors import BLOCK
from afl.errors import ProtocolError

Floats = NDArray[np.float32]

BITS = st.sampled_from(BIT_WIDTHS)
EXPONENTS = st.integers(grid.LEAST_EXPONENT, grid.MOST_EXPONENT)


@st.composite
def values_near(draw: st.DrawFn, bits: int, exponent: int) -> float:
    """Any float32, more often one near a step, a tie, the limit, or the last that is split exactly."""
    if draw(st.booleans()):
        return draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
    limit = 2 ** (bits - 1) - 1
    places = st.one_of(
        st.integers(-2 * limit, 2 * limit),
        st.sampled_from([limit, limit * 2**23, limit * 2**22, 2**24, 2**25]),
    )
    nudged = np.float32(draw(places) + draw(st.sampled_from([0.0, 0.5, -0.5, 0.25])))
    with np.errstate(over="ignore"):
        value = nudged * np.float32(2.0**exponent)
    return float(value) if np.isfinite(value) else 0.0


@given(st.data(), BITS, EXPONENTS)
def test_what_is_left_is_exact_and_what_is_sent_is_nearest(
    data: st.DataObject, bits: int, exponent: int
) -> None:
    p = np.array(data.draw(st.lists(values_near(bits, exponent), min_size=1, max_size=20)), dtype=np.float32)
    limit = 2 ** (bits - 1) - 1
    integers, sent = rounded(
        p, np.array([exponent], np.int32), np.array([len(p)]), limit, np.array([FAR * limit])
    )
    rest = p - sent
    step = Fraction(2) ** exponent
    for value, integer, c, left in zip(p, integers, sent, rest, strict=False):
        x = Fraction(float(value)) / step
        assert Fraction(float(c)) == int(integer) * step
        assert abs(int(integer)) <= limit
        assert x * int(integer) >= 0
        if abs(x) <= limit:
            # Python rounds fractions to even, too.
            assert integer == round(x)
        else:
            assert integer != 0
        if abs(x) <= limit * 2**23:
            assert Fraction(float(left)) == (x - int(integer)) * step
        assert abs(left) <= max(abs(value), np.float32(step / 2))
    assert integers[-1] == any(abs(round(Fraction(float(value)) / step)) > FAR * limit for value in p)


@given(st.data(), BITS, st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_each_group_has_a_step_of_its_own(data: st.DataObject, bits: int, counts: list[int]) -> None:
    exponents = np.array(data.draw(st.lists(EXPONENTS, min_size=len(counts), max_size=len(counts))), np.int32)
    p = np.array([data.draw(values_near(bits, 0)) for _ in range(sum(counts))], dtype=np.float32)
    limit = 2 ** (bits - 1) - 1
    far = limit * np.arange(1.0, len(counts) + 1)
    integers, sent = rounded(p, exponents, np.array(counts), limit, far)
    start = 0
    for group, (count, exponent) in enumerate(zip(counts, exponents, strict=True)):
        own = np.array([exponent]), np.array([count]), limit, far[group : group + 1]
        alone, c = rounded(p[start : start + count], *own)
        assert integers[start : start + count].tolist() == alone[:count].tolist()
        assert integers[len(p) + group] == alone[count]
        assert sent[start : start + count].tobytes() == c.tobytes()
        start += count
    back = on_grid(integers, exponents, np.array(counts))
    np.testing.assert_array_equal(back, sent)


def test_long_groups_are_rounded_block_by_block() -> None:
    p = np.linspace(-3, 3, 2 * BLOCK + 7, dtype=np.float32)
    p[BLOCK + 1] = 100.0
    integers, _ = rounded(p, np.array([-1], np.int32), np.array([len(p)]), 7, np.array([150.0]))
    assert integers[:-1].tolist() == np.rint(p * 2).clip(-7, 7).tolist()
    assert integers[-1] == 1


def moved(range_: float, bits: int, signal: Floats, workers: int = 1, rounds: int = 60) -> list[float]:
    """The norms of a residual that is fed the same vector in each round, and sends all of it."""
    own, e, norms = Grid([1], bits), np.zeros_like(signal), []
    own.ranges[:] = range_
    for _ in range(rounds):
        p = e + signal
        integers, sent = rounded(p, own.exponents, np.array([len(p)]), own.limit, own.far)
        e = p - sent
        sums: NDArray[Any] = integers.astype(np.int64)
        own.move(sums, np.array([len(p)]))
        norms.append(float(np.linalg.norm(e)))
    return norms


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 24])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("first", [1e-7, FIRST_RANGE, 1e3])
def test_a_range_is_found_from_far_off_and_clipping_does_not_run_away(
    bits: int, scale: float, first: float
) -> None:
    signal = (scale * np.random.default_rng(1).laplace(size=500)).astype(np.float32)
    norms = moved(first, bits, signal, rounds=150)
    # What is not sent of a signal that comes in each round stays below what comes in a few rounds.
    assert max(norms[-60:]) < 8 * np.linalg.norm(signal)


def test_the_rule_for_one_group_is_nobody_else_s() -> None:
    own = Grid([2, 1, 2, 1], 4)
    # Far, sent, empty, and one of which nothing was drawn.
    own.move(np.array([7, 0, 3, 0, 0, 2, 0, 0, 0]), np.array([2, 1, 2, 0]))
    assert own.ranges.tolist() == [2 * FIRST_RANGE, 0.95 * FIRST_RANGE, 0.5 * FIRST_RANGE, FIRST_RANGE]


def test_the_smallest_groups_with_a_quarter_of_the_values_are_small() -> None:
    assert (Grid([70, 20, 1, 4, 5], 4).far / 7).tolist() == [2.5, 2.5, 8.0, 8.0, 8.0]
    assert (Grid([10, 10, 10, 10], 3).far / 3).tolist() == [8.0, 2.5, 2.5, 2.5]
    assert Grid([100], 2).far.tolist() == [2.5]


def test_five_bits_and_more_have_a_range_for_all_values() -> None:
    assert Grid([70, 20, 10], 5).far.tolist() == [15, 15, 15]
    assert Grid([100, 1], 24).far.tolist() == [2**23 - 1] * 2


def test_a_silent_group_does_not_fall_out_of_reach() -> None:
    own = Grid([1, 1], 4)
    for _ in range(500):
        own.move(np.array([1, 0, 0, 0]), np.array([1, 1]))
        own.ranges[0] = 1.0
    own.move(np.array([1, 0, 0, 0]), np.array([1, 1]))
    assert own.ranges.tolist() == [0.95, 0.95 * 2.0**-20]


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize(
    ("is_far", "last"), [(0, grid.LEAST_EXPONENT), (1, grid.MOST_EXPONENT)], ids=["at rest", "far"]
)
def test_ranges_go_as_far_as_steps_and_come_back_at_once(bits: int, is_far: int, last: int) -> None:
    own, counts = Grid([3, 2], bits), np.array([3, 2])
    silence, turned = np.array([0] * 5 + [is_far] * 2), np.array([1] * 5 + [1 - is_far] * 2)
    for _ in range(1500):
        own.move(silence, counts)
    assert own.exponents.tolist() == [last, last]
    newcomer = Grid([3, 2], bits)
    newcomer.load(own.content())
    assert newcomer.ranges.tolist() == own.ranges.tolist()
    own.move(turned, counts)
    assert own.exponents.tolist() == [last if is_far else last + 1] * 2
    assert (own.ranges < newcomer.ranges).all() if is_far else (own.ranges == 2 * newcomer.ranges).all()


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@given(st.floats(1e-30, 1e20))
def test_a_step_is_the_least_that_reaches_the_range(bits: int, range_: float) -> None:
    own = Grid([1], bits)
    own.ranges[:] = range_
    (exponent,) = own.exponents.tolist()
    limit = Fraction(2 ** (bits - 1) - 1)
    # The quotient is rounded to a double before its power of two is taken.
    slack = 1 + Fraction(2) ** -50
    assert limit * Fraction(2) ** exponent * slack >= Fraction(range_)
    assert limit * Fraction(2) ** (exponent - 1) < Fraction(range_) * slack


def test_the_content_goes_there_and_back_and_a_wrong_range_is_refused() -> None:
    own, other = Grid([1, 1, 1], 4), Grid([1, 1, 1], 4)
    own.ranges[:] = [1e-9, 0.3, 7.0]
    other.load(own.content())
    assert other.ranges.tolist() == own.ranges.tolist()
    for wrong in (0.0, -1.0, np.nan, np.inf):
        content = np.array([1.0, wrong, 1.0]).tobytes()
        with pytest.raises(ProtocolError, match="a grid with a range that is not a positive number"):
            other.load(content)
