"""Updates that are too large beside the others' are left out, and honest ones never are."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.config import config_from_mapping
from afl.core.rounds.policy import UpdateBound
from afl.errors import ConfigError
from afl_benchmarks.poisoned import ATTACKS, HOSTILE, poisoned

RAND_K = {"name": "rand-k", "ratio": 0.3}
INTEGERS = {"name": "rand-k", "ratio": 0.3, "bits": 8}
TOP_K = {"name": "top-k", "ratio": 0.1}


def config_of(uplink: dict[str, Any] | None, **faults: Any) -> dict[str, Any]:
    name = "afl-br" if uplink is None else "afl-com"
    algorithm = {"name": name, "rounds": 30, "eta_w": 0.5, "eta_q": 2.0, "block": 10}
    return {
        "workers": 5,
        "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": 40}},
        "algorithm": algorithm | ({} if uplink is None else {"uplink": uplink}),
        "run": {"seed": 7},
        "faults": faults,
    }


def absent_in(config: dict[str, Any], attack: str) -> tuple[set[int], np.ndarray[Any, Any]]:
    """The workers that some round was closed without, and the final model."""
    return _absent_in(json.dumps(config), attack)


@cache
def _absent_in(config: str, attack: str) -> tuple[set[int], np.ndarray[Any, Any]]:
    driver = poisoned(json.loads(config), ATTACKS[attack])
    absent: set[int] = set()
    for _ in driver.steps():
        if driver.engine.last_round is not None:
            absent.update(driver.engine.last_round.absent)
    return absent, driver.engine.model.numpy().copy()


@pytest.mark.parametrize("uplink", [None, RAND_K, TOP_K, INTEGERS])
def test_no_honest_update_is_left_out_and_no_bit_changes(uplink: dict[str, Any] | None) -> None:
    absent, model = absent_in(config_of(uplink, update_norm={"times": 10}), "none")
    assert absent == set()
    assert model.tobytes() == absent_in(config_of(uplink), "none")[1].tobytes()


@pytest.mark.parametrize("uplink", [None, RAND_K])
@pytest.mark.parametrize("attack", ["noise x 1000", "noise x 1e20"])
def test_an_update_of_noise_is_left_out(uplink: dict[str, Any] | None, attack: str) -> None:
    absent, model = absent_in(config_of(uplink, update_norm={"times": 10}), attack)
    assert absent == {HOSTILE}
    honest = absent_in(config_of(uplink), "none")[1]
    poisoned_ = absent_in(config_of(uplink), attack)[1]
    assert np.linalg.norm(model - honest) < 3 < 1e-2 * np.linalg.norm(poisoned_.astype(float) - honest)


def sent(bound: UpdateBound, *norms: float) -> None:
    """An update of each worker, alone."""
    for worker, norm in enumerate(norms):
        bound.add({worker: norm})


def test_the_first_round_is_judged_too() -> None:
    bound, weights = UpdateBound(4, 10.0), np.full(4, 0.25)
    sent(bound, 1e20, 0.2, 0.3, 0.25)
    (worker,) = bound.judge(weights)
    assert worker == 0
    assert bound.judge(weights)[0].limit == pytest.approx(10 * 0.25)
    assert bound.norms.keys() == {1, 2, 3}


def test_a_worker_of_more_weight_may_send_more_for_as_long_as_it_keeps_a_residual() -> None:
    bound = UpdateBound(4, 10.0)
    uniform, skewed = np.full(4, 0.25), np.array([0.97, 0.01, 0.01, 0.01])
    bound.take(np.array([0.25, 0.25, 0.25, 0.25]), uniform)
    sent(bound, 9.0, 0.01, 0.01, 0.01)
    assert not bound.judge(skewed)
    bound.take(np.array([9.0, 0.01, 0.01, 0.01]), skewed)
    # The weights restart; what worker 0 did not send at once comes now.
    sent(bound, 9.0, 2.6, 0.25, 0.25)
    assert bound.judge(uniform).keys() == {1}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_no_number_is_too_large(bad: float) -> None:
    bound = UpdateBound(3, 10.0)
    sent(bound, bad, 1.0, 1.0)
    assert bound.judge(np.full(3, 1 / 3)).keys() == {0}


@given(norms=st.lists(st.floats(1.0, 9.9), min_size=2, max_size=8), seed=st.integers(0, 99))
@settings(deadline=None)
def test_gradients_within_a_factor_of_ten_are_all_right_whatever_the_weights(
    norms: list[float], seed: int
) -> None:
    bound, random = UpdateBound(len(norms), 10.0), np.random.default_rng(seed)
    weights = np.full(len(norms), 1 / len(norms))
    for _ in range(5):
        told = np.array(norms) * weights
        sent(bound, *told.tolist())
        assert not bound.judge(weights)
        bound.take(told, weights)
        weights = random.dirichlet(np.full(len(norms), 0.2))


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"name": "fedavg", "rounds": 9, "eta_w": 0.1}, "workers of fedavg send models, not updates"),
        ({"privacy": True}, "with secure_aggregation the server sees no single update"),
    ],
)
def test_it_is_refused_where_there_is_no_single_update(changes: dict[str, Any], accepted: str) -> None:
    values = config_of({**RAND_K, "bits": 16}, update_norm={})
    if changes.pop("privacy", False):
        values["privacy"] = {"secure_aggregation": True}
    else:
        values["algorithm"] = changes
    with pytest.raises(ConfigError, match=accepted):
        config_from_mapping(values)
