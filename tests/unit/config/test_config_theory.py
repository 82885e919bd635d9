"""Step sizes and block length against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from afl import theory
from afl.config import Config, config_from_mapping


@pytest.mark.parametrize(
    ("rounds", "block"),
    [
        (1, 1),
        (2, 2),
        (4, 2),
        (5, 3),
        (9, 3),
        (10, 4),
        (2000, 45),
        (2025, 45),
        (2026, 46),
        # Past 2^53 the square root of a double rounds to a whole number too early.
        ((2**27 + 1) ** 2, 2**27 + 1),
        ((2**27 + 1) ** 2 + 1, 2**27 + 2),
    ],
)
def test_the_block_is_the_square_root_rounded_up_exactly(rounds: int, block: int) -> None:
    assert theory.block_length(rounds) == block


def test_the_primal_step() -> None:
    # T = 10^4: T^(3/4) = 1000, and 1 / (8 * 2 * 1000) = 6.25e-5.
    assert theory.primal_step(10_000, 2.0) == pytest.approx(6.25e-5, rel=1e-15)
    # T = 16: T^(3/4) = 8, a power of two, so the quotient is exact.
    assert theory.primal_step(16, 1.0) == 1 / 64


def test_the_dual_step() -> None:
    # T = 10^4: T^(1/4) = 10; 2 * sqrt(ln 10) / (0.5 * 10) = 0.4 * 1.517427129385146.
    assert theory.dual_step(10_000, 10, 0.5) == pytest.approx(0.6069708517540585, rel=1e-15)
    assert theory.dual_step(16, 1, 3.0) == 0.0


@pytest.mark.parametrize(("rounds", "workers", "covered"), [(9, 2, True), (8, 2, False), (9, 1, False)])
def test_the_theorems_assume_nine_rounds_and_two_workers(rounds: int, workers: int, covered: bool) -> None:
    assert theory.is_covered(rounds, workers) is covered


def _config(**algorithm: Any) -> Config:
    return config_from_mapping(
        {
            "workers": 10,
            "task": {"name": "digits"},
            "algorithm": {"name": "afl-com", "rounds": 10_000, "eta_w": 0.5, "eta_q": 0.25} | algorithm,
        }
    )


def test_a_configuration_resolves_what_is_left_to_the_theory() -> None:
    config = _config(eta_w="theory", smoothness=2, eta_q="theory", sigma_q=0.5)
    assert config.algorithm.block_length == 100
    assert config.algorithm.eta_w_value == pytest.approx(6.25e-5, rel=1e-15)
    assert config.eta_q_value == pytest.approx(0.6069708517540585)


def test_a_configuration_keeps_what_is_written() -> None:
    config = _config(block=7, eta_q=0)
    assert (config.algorithm.block_length, config.algorithm.eta_w_value, config.eta_q_value) == (7, 0.5, 0.0)


def test_the_theorem_s_largest_run_is_finite() -> None:
    config = _config(rounds=2**31 - 1, eta_w="theory", smoothness=1e-12, eta_q="theory", sigma_q=1e-12)
    assert math.isfinite(config.algorithm.eta_w_value)
    assert math.isfinite(config.eta_q_value)


def test_the_downlink_is_the_uplink_unless_it_is_written() -> None:
    both = _config(uplink={"name": "rand-k", "ratio": 0.1}).algorithm
    assert both.downlink_compressor == both.uplink_compressor
    assert (both.downlink_compressor.name, both.downlink_compressor.options) == ("rand-k", {"ratio": 0.1})
    split = _config(uplink={"name": "top-k", "ratio": 0.1}, downlink={}).algorithm
    assert (split.uplink_compressor.name, split.downlink_compressor.name) == ("top-k", "identity")
    neither = _config().algorithm
    assert neither.uplink_compressor.name == neither.downlink_compressor.name == "identity"


@pytest.mark.parametrize(
    ("uplink", "downlink"),
    [
        ({"name": "rand-k", "ratio": 0.1, "bits": 2}, None),
        (
            {"name": "rand-k", "ratio": "theory", "bits": 24},
            {"name": "rand-k", "ratio": "theory", "bits": 24},
        ),
        ({"bits": 4}, {"name": "identity", "bits": 4}),
        ({"name": "top-k", "ratio": 0.1}, {"name": "dct-projection", "ratio": 0.1, "bits": 4}),
        (None, {"bits": 4}),
    ],
)
def test_integers_go_both_ways_or_down_alone(uplink: object, downlink: object) -> None:
    algorithm = _config(uplink=uplink, downlink=downlink).algorithm
    assert algorithm.downlink_compressor.options["bits"] in {2, 4, 24}
    if algorithm.uplink_compressor.options.get("bits"):
        assert algorithm.downlink_compressor == algorithm.uplink_compressor
