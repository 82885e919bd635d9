"""Each dual rule in simulation, and through real processes and their deaths, against the independent numpy
script, to the bit."""

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
from support.longer import but_long

RAND_K = {"name": "rand-k", "ratio": 0.2}
TOP_K = {"name": "top-k", "ratio": 0.2}
REGULARIZED = {"name": "kl-regularized", "temperature": 0.1}
SHARE = {"name": "fixed-share", "uniform": 0.02}

CASES: dict[str, dict[str, Any]] = {
    "kl-regularized, rand-k": {"dual": REGULARIZED, "uplink": RAND_K},
    "kl-regularized of the last loss, integers": {
        "dual": {**REGULARIZED, "beta": 0.0},
        "uplink": {**RAND_K, "bits": 5},
    },
    "fixed share, top-k": {"dual": SHARE, "eta_q": 2.0, "uplink": TOP_K},
    "fixed share, steps": {
        "dual": SHARE,
        "eta_q": 2.0,
        "schedule": {"then": "steps", "at": [15], "factor": 0.3, "eta_q": True},
    },
    "cvar, rand-k": {"dual": {"name": "cvar", "share": 0.7}, "eta_q": 5.0, "uplink": RAND_K},
    "projected, top-k": {"dual": {"name": "projected"}, "eta_q": 0.2, "uplink": TOP_K},
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_is_the_reference_to_the_bit(name: str, tmp_path: Path) -> None:
    config = config_of(CASES[name])
    simulate(config_from_mapping(config), tmp_path)
    assert final_values(tmp_path) == Reference.of(config).weights[-1].tobytes()
    algorithm = {key: value for key, value in config["algorithm"].items() if key != "dual"}
    plain = {**config, "algorithm": {"eta_q": 0.3, **algorithm}}
    assert Reference.of(plain).weights[-1].tobytes() != final_values(tmp_path), "the rule changed nothing"


@pytest.mark.parametrize(
    "name", but_long(["kl-regularized, rand-k", "fixed share, top-k"], "kl-regularized, rand-k")
)
def test_killed_processes_go_on_to_the_bit(name: str, tmp_path: Path) -> None:
    federation, reference = killed(CASES[name], 200, tmp_path / "run", [(20, "1-2"), (60, SERVER)])
    lines = federation.records("round")
    for line, weights in zip(lines, reference.dual_weights, strict=False):
        assert line["dual_weight_max"] == pytest.approx(weights.max(), rel=0, abs=1e-12)


def test_a_fixed_share_of_hidden_weights_is_that_of_shown_ones(tmp_path: Path) -> None:
    """Through masks and real processes; and a simulation of it gives the same bits."""
    config = config_of({"dual": SHARE, "eta_q": 2.0, "uplink": {"name": "identity", "bits": 20}})
    config["privacy"] = {"secure_aggregation": True, "losses": "hidden"}
    federation = run_together(config, tmp_path / "run", ["0-1", "2-3"])
    simulate(config_from_mapping(config), tmp_path / "hidden")
    assert final_values(tmp_path / "hidden") == final_values(federation.directory)
    config["privacy"]["losses"] = "shown"
    simulate(config_from_mapping(config), tmp_path / "shown")
    hidden, shown = (
        np.frombuffer(final_values(tmp_path / name), dtype=np.float32) for name in ("hidden", "shown")
    )
    np.testing.assert_allclose(hidden, shown, rtol=0, atol=2e-3)
    assert np.abs(shown - shown.mean()).max() > 0.1
