"""Schedules, optimizers, weight decay and clipping through real processes and in simulation, against the
independent numpy script, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_runs import config_of, killed

from afl.config import config_from_mapping
from afl_lab.simulation.run import simulate
from support import Reference, final_values, run_together
from support.drill import SERVER

RAND_K = {"name": "rand-k", "ratio": 0.2}
TOP_K = {"name": "top-k", "ratio": 0.2}
COSINE = {"warm_up": 5, "then": "cosine", "final": 0.05}
STEPS = {"then": "steps", "at": [15, 35], "factor": 0.3, "eta_q": True}
MOMENTUM = {"name": "momentum", "beta_1": 0.8}
ADAM = {"name": "adam", "beta_2": 0.99}
PLAIN = {"eta_q": 0.3}

CASES: dict[str, dict[str, Any]] = {
    "cosine, top-k": {"schedule": COSINE, "uplink": TOP_K},
    "steps, rand-k in integers": {"schedule": STEPS, "uplink": {**RAND_K, "bits": 4}},
    "momentum, rand-k": {"optimizer": MOMENTUM, "uplink": RAND_K, "eta_w": 0.2},
    "momentum, cosine, top-k up and rand-k down": {
        "optimizer": MOMENTUM,
        "schedule": COSINE,
        "uplink": TOP_K,
        "downlink": RAND_K,
        "eta_w": 0.2,
    },
    "adam, decay, identity": {"optimizer": ADAM, "weight_decay": 0.1, "eta_w": 0.02},
    "adam, cosine, integers": {
        "optimizer": {"name": "adam"},
        "schedule": COSINE,
        "uplink": {**RAND_K, "bits": 5},
        "eta_w": 0.02,
    },
    "the mean of a block, top-k": {"final_model": "block-mean", "uplink": TOP_K},
    "the mean of a block, momentum, cosine, top-k up and rand-k down": {
        "final_model": "block-mean",
        "block": 50,
        "optimizer": MOMENTUM,
        "schedule": COSINE,
        "uplink": TOP_K,
        "downlink": RAND_K,
        "eta_w": 0.2,
    },
    "clipping, decay, top-k": {"clip_norm": 0.05, "weight_decay": 0.02, "uplink": TOP_K},
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_is_the_reference_to_the_bit(name: str, tmp_path: Path) -> None:
    config = config_of({**PLAIN, **CASES[name]})
    simulate(config_from_mapping(config), tmp_path)
    reference = Reference.of(config)
    assert final_values(tmp_path) == reference.weights[-1].tobytes()
    assert np.abs(reference.weights[-1] - reference.weights[0]).max() > 0.1
    plain = {**config, "algorithm": {**config["algorithm"]}}
    for key in ("schedule", "optimizer", "weight_decay", "clip_norm", "final_model"):
        plain["algorithm"].pop(key, None)
    assert Reference.of(plain).weights[-1].tobytes() != final_values(tmp_path), "the keys changed nothing"


@pytest.mark.parametrize(
    "name",
    [
        "the mean of a block, momentum, cosine, top-k up and rand-k down",
        "adam, cosine, integers",
        "clipping, decay, top-k",
    ],
)
def test_real_processes_are_the_reference_to_the_bit(name: str, tmp_path: Path) -> None:
    config = config_of({**PLAIN, **CASES[name]})
    federation = run_together(config, tmp_path / "run", ["1", "3", "0,2"])
    assert final_values(federation.directory) == Reference.of(config).weights[-1].tobytes()
    assert not federation.server.logged("digest_mismatch")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "the mean of a block, momentum, cosine, top-k up and rand-k down",
        pytest.param("adam, cosine, integers", marks=pytest.mark.slow),
    ],
)
def test_killed_processes_go_on_to_the_bit(name: str, tmp_path: Path) -> None:
    case = {**PLAIN, **CASES[name]}
    if "block" in case:
        # The mean is begun before the first is killed.
        case["block"] = 240
    killed(case, 250, tmp_path / "run", [(20, "1-2"), (60, SERVER), (120, "0")])


def test_dual_weights_that_workers_keep_follow_the_schedule_too(tmp_path: Path) -> None:
    def model_of(losses: str, schedule: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        uplink = {"name": "identity", "bits": 20}
        config = config_of({**PLAIN, "schedule": schedule, "uplink": uplink, "eta_q": 2.0})
        config["privacy"] = {"secure_aggregation": True, "losses": losses}
        folder = tmp_path / f"{losses} {len(schedule)}"
        simulate(config_from_mapping(config), folder)
        return np.frombuffer(final_values(folder), dtype=np.float32)

    shown, hidden = model_of("shown", STEPS), model_of("hidden", STEPS)
    np.testing.assert_allclose(hidden, shown, atol=1e-4)
    without = model_of("hidden", {**STEPS, "eta_q": False, "warm_up": 0})
    assert np.abs(without - shown).max() > 1e-3
