"""What is told of configurations that are allowed and probably not meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afl.advice import advice_on
from afl.config import Config, config_from_mapping
from afl.core.rounds.phases import (
    phases_seen,
    rounds_since_restart,
    sees_few_phases,
    spread_spacing,
)
from afl.runs.metrics import over_blocks
from afl.theory import block_length
from afl_lab.simulation.run import simulate
from afl_lab.tuning.space import can_be_cut, fixed_overrides

RAND_K = {"name": "rand-k", "ratio": 0.1}


def config_of(every: int | str = 51, seed: int | None = None, **algorithm: Any) -> Config:
    given = {"name": "afl-com", "rounds": 600, "eta_w": 0.1, "eta_q": 0.1, **algorithm}
    values: dict[str, Any] = {"workers": 3, "task": {"name": "synthetic"}, "algorithm": given}
    return config_from_mapping({**values, "evaluation": {"every": every}, "run": {"seed": seed}})


def keys_of(config: Config) -> list[str]:
    return [advice.key for advice in advice_on(config)]


@pytest.mark.parametrize(
    ("every", "noise", "ends"), [(12, 10.0, True), (600, 10.0, False), (12, 50.0, False)]
)
def test_evaluations_that_would_spend_the_whole_epsilon_are_told(
    every: int, noise: float, ends: bool
) -> None:
    config = config_of(every)
    records = {"epsilon": 1.0, "delta": 1e-5, "metrics": "noised", "metric_noise": noise}
    whole = config.model_dump(mode="json") | {"privacy": {"records": records}}
    whole["worker"]["journal"] = "machine"
    told = [advice for advice in advice_on(config_from_mapping(whole)) if "metric_noise" in advice.key]
    assert bool(told) is ends
    if ends:
        assert "50 evaluations cost a test record an epsilon of 3." in told[0].what
        assert "evaluation.every" in told[0].advice


@pytest.mark.parametrize(
    ("algorithm", "every", "planned"),
    [
        ({"name": "afl-br", "rounds": 10}, 5, 2),
        ({"name": "afl-br", "rounds": 11}, 5, 3),
        ({"name": "afl-br", "rounds": 4}, 50, 1),
        # Updates 7 and 10, of synchronizations that end with updates 5 and 10.
        ({"name": "fedavg", "rounds": 10, "local_steps": 5}, 7, 1),
        ({"name": "fedavg", "rounds": 10, "local_steps": 5}, 2, 2),
        ({"name": "fedavg", "rounds": 10, "local_steps": 3}, 4, 3),
    ],
)
def test_the_evaluations_of_a_whole_run(algorithm: dict[str, object], every: int, planned: int) -> None:
    steps = {"eta_w": 0.1, **({"eta_q": 0.1} if algorithm["name"] == "afl-br" else {})}
    config = config_from_mapping(
        {
            "workers": 2,
            "task": {"name": "synthetic"},
            "algorithm": {**algorithm, **steps},
            "evaluation": {"every": every},
        }
    )
    assert config.planned_evaluations == planned


def test_a_block_is_counted_from_one_to_its_end() -> None:
    assert [rounds_since_restart(round_, 4) for round_ in range(1, 10)] == [1, 2, 3, 4, 1, 2, 3, 4, 1]


@pytest.mark.parametrize(
    ("every", "block", "places", "few"),
    [
        (50, 25, 1, True),
        (25, 50, 2, True),
        (20, 30, 3, True),
        (5, 25, 5, False),
        (12, 22, 11, False),
        (51, 25, 25, False),
        # Nothing to miss in a block so short, and no restart within the run.
        (50, 2, 1, False),
        (50, 600, 12, False),
        (50, 0, 0, False),
        # One evaluation before the last round has nothing to be level with.
        (500, 25, 1, False),
    ],
)
def test_few_places_of_a_block_are_noticed(every: int, block: int, places: int, few: bool) -> None:
    if block:
        seen = {rounds_since_restart(round_, block) for round_ in range(every, 1000 * every, every)}
        assert len(seen) == phases_seen(every, block) == places
    assert sees_few_phases(600, every, block) is few


@pytest.mark.parametrize("rounds", [1, 2, 5, 9, 16, 30, 36, 100, 144, 480, 2000, 10_000, 2**31 - 1])
def test_auto_sees_all_of_a_block_and_jumps_in_it(rounds: int) -> None:
    block = block_length(rounds)
    every = spread_spacing(rounds, block)
    assert every >= 1
    assert abs(every - rounds / 40) <= block
    if 1 < block < rounds:
        assert phases_seen(every, block) == block
        assert min(every % block, -every % block) >= block / 6
    assert spread_spacing(rounds, 0) == spread_spacing(rounds, rounds) == max(1, (rounds + 20) // 40)


def test_auto_is_a_number_wherever_it_is_used(tmp_path: Path) -> None:
    assert config_of("auto").evaluate_every == 14
    assert config_of("auto", name="sgda").evaluate_every == 15
    assert config_of(7).evaluate_every == 7
    assert not keys_of(config_of("auto"))
    # Trials whose blocks differ are compared at the same rounds.
    assert "evaluation.every=30" in fixed_overrides(config_of("auto"))
    assert can_be_cut(config_of("auto"))
    assert not can_be_cut(config_of("auto", final_model="block-mean"))
    simulate(config_of("auto", seed=1, rounds=60, block=10), tmp_path, saves_models=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [line["round"] for line in evaluations][:4] == [3, 6, 9, 12]
    assert all(line["block"] == 10 for line in evaluations)
    assert [line["rounds_since_restart"] for line in evaluations][:4] == [3, 6, 9, 2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["last"]["rounds_since_restart"] == 10


@pytest.mark.parametrize(
    ("algorithm", "every", "expected"),
    [
        ({}, 51, []),
        ({"block": 25}, 50, ["evaluation.every"]),
        ({"name": "sgda"}, 50, []),
        ({"uplink": RAND_K}, 51, []),
        ({"uplink": RAND_K, "eta_q": 0.2}, 51, []),
        ({"uplink": RAND_K, "eta_q": 0.3}, 51, ["algorithm.eta_q"]),
        ({"uplink": {**RAND_K, "bits": 8}, "eta_q": 0.3}, 51, ["algorithm.eta_q"]),
        ({"uplink": {"name": "projection", "ratio": 0.1}, "eta_q": 0.3}, 51, ["algorithm.eta_q"]),
        # Blocks end before the weights have run ahead; nothing waits; what is largest does not wait.
        ({"uplink": RAND_K, "eta_q": 0.4, "block": 5}, 51, []),
        ({"uplink": RAND_K, "eta_q": 0.5, "block": 5}, 51, ["algorithm.eta_q"]),
        ({"eta_q": 3.0}, 51, []),
        ({"uplink": {"name": "top-k", "ratio": 0.1}, "eta_q": 3.0}, 51, []),
        ({"uplink": {"name": "rand-k", "ratio": "theory"}, "eta_q": 1.0}, 51, []),
        ({"eta_q": "theory", "sigma_q": 1.0}, 51, ["algorithm.eta_q"]),
        ({"eta_q": "theory", "sigma_q": 1.0, "eta_w": "theory", "smoothness": 1.0}, 51, []),
        *(
            ({"schedule": schedule}, 51, ["algorithm.schedule"])
            for schedule in (
                *({}, {"warm_up": 1}, {"eta_q": True}, {"then": "cosine", "final": 1.0}),
                *({"then": "steps", "at": at} for at in ([], [600], [700, 800])),
                {"then": "steps", "at": [100], "factor": 1.0},
            )
        ),
        *(
            ({"schedule": schedule}, 51, [])
            for schedule in (
                *({"warm_up": 2}, {"then": "cosine"}, {"then": "cosine", "final": 0.99}),
                *({"then": "steps", "at": [599]}, {"then": "steps", "at": [1, 700], "factor": 0.5}),
            )
        ),
        (
            {"uplink": RAND_K, "eta_q": 1.0, "block": 50},
            100,
            ["evaluation.every", "algorithm.eta_q"],
        ),
    ],
)
def test_advice(algorithm: dict[str, Any], every: int, expected: list[str]) -> None:
    assert keys_of(config_of(every, **algorithm)) == expected


def test_advice_says_why_and_what_to_do() -> None:
    (phase,) = advice_on(config_of(50, block=25))
    assert str(phase) == (
        "evaluation.every: with 50, and dual weights that restart every 25 rounds, all evaluations show the "
        "model at a block's end, and how the worst worker is served changes within a block; set it to auto, "
        "which is 14 here"
    )
    (ahead,) = advice_on(config_of(uplink=RAND_K, eta_q=0.3))
    assert "waits 10 rounds on average, and in 10 rounds" in ahead.what
    assert "grows by e^3:" in ahead.what
    assert ahead.advice == "set it to at most 0.1, or take a larger ratio"
    (short,) = advice_on(config_of(uplink=RAND_K, eta_q=1.0, block=5))
    assert "waits 10 rounds on average, and in 5 rounds" in short.what


def line(round_: int, worst: float, block: int = 10) -> dict[str, Any]:
    standing = {"worst_accuracy": worst, "mean_accuracy": worst + 0.1, "max_loss": 1.0, "mean_loss": 0.5}
    return {"round": round_, "block": block, **standing} if block else {"round": round_, **standing}


def test_the_mean_over_whole_blocks_takes_as_few_as_have_four_evaluations() -> None:
    lines = [line(7 * k, k / 100) for k in range(1, 21)]
    over = over_blocks(lines)
    # Rounds 111 to 140: 112, 119, 126, 133, 140.
    assert over is not None
    assert (over.rounds, over.evaluations) == (30, 5)
    assert (over.by.worst, over.by.mean) == (pytest.approx(0.18), pytest.approx(0.28))
    assert str(over) == (
        "worst accuracy 0.180 (mean over workers 0.280), mean of 5 evaluations in the last 30 rounds, whole "
        "blocks"
    )
    assert over_blocks(lines[:3]) is None
    assert over_blocks([line(7 * k, 0.5, block=0) for k in range(1, 21)]) is None
    hidden = [{**each, "smooth_worst_loss": 1.0, "worst_accuracy": None} for each in lines]
    assert over_blocks(hidden) is None
