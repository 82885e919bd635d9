"""Means whose sums are no numbers."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from afl.runs.metrics import own_metrics, settled
from afl_server.pages.live_updates import encoded

LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([LARGEST, LARGEST], LARGEST),
        ([LARGEST] * 7, LARGEST),
        ([-LARGEST] * 3, -LARGEST),
        ([1.7e308, 1.7e308, -1.7e308, -1.7e308], 0.0),
        ([1.7e308, 1.7e308, 2.0], 1.7e308 * (2 / 3)),
    ],
)
def test_an_overflowing_mean_is_the_values_own(values: list[float], mean: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        overflowed = float(np.cumsum(values)[1]) / len(values)
    assert not math.isfinite(overflowed)
    assert settled(overflowed, values) == pytest.approx(mean, rel=1e-12)


def test_a_finite_mean_stays_as_it_is() -> None:
    assert settled(0.1, [5.0]) == 0.1


def test_a_task_s_own_metrics_have_a_mean() -> None:
    found = own_metrics([{"loss": 1.0, "mae": LARGEST}, {"loss": 2.0, "mae": LARGEST}], 1)
    assert found == {"mae": {"worst_worker": LARGEST, "mean": LARGEST}}


def test_pages_hold_no_number_that_json_has_not() -> None:
    """As those of a run whose lines an earlier version wrote."""
    value = {"a": [1.5, math.inf, (math.nan, "x")], "b": {"c": -math.inf, "d": None}}
    assert encoded(value) == b'{"a":[1.5,null,[null,"x"]],"b":{"c":null,"d":null}}'
