"""What each of the paper's methods is charged for a synchronization, counted by hand, through the simulator.

At the size of Fashion-MNIST's model (d = 235,914), on digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afl.config import config_from_mapping
from afl_lab.plots.points import points_of
from afl_lab.simulation.run import simulate

M = 10
D = 235_914
"""Not the digits' own model: 64 inputs and hidden layers that make as many parameters."""

TOP = 70_774
"""30 % of d, rounded."""

RAND = 23_591
"""10 % of d, rounded."""

INDEX = 18
"""ceil(log2 d): 2^17 < d <= 2^18."""

CASES: dict[str, tuple[dict[str, Any], float, float, float]] = {
    # Settings; charged up and down, a worker and synchronization; of the latter the dual weight.
    "afl-br": ({"name": "afl-br", "eta_q": 0.1}, D + 1, D + 1, 1),
    "afl-com(t)": (
        {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "top-k", "ratio": 0.3}},
        TOP + TOP * INDEX / 32 + 1,
        TOP + TOP * INDEX / 32 + 1,
        1,
    ),
    "afl-com(r)": (
        {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "rand-k", "ratio": 0.1}},
        RAND + 1,
        RAND + 1,
        1,
    ),
    "sgda": ({"name": "sgda", "eta_q": 0.1}, D + 1, D + 1, 1),
    # Two models up, with the mean loss of the local steps, and the loss at the snapshot; two models down.
    "drfa": ({"name": "drfa", "eta_q": 0.1, "local_steps": 3}, 2 * D + 2, 2 * D, 0),
    "fedavg": ({"name": "fedavg", "local_steps": 3}, D + 1, D, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_synchronization(case: str, tmp_path: Path) -> None:
    settings, up, down, weight = CASES[case]
    steps = settings.get("local_steps", 1)
    config = config_from_mapping(
        {
            "workers": M,
            # 67 g + g h + 13 h + 10 = d with g = 372 and h = 548, layer normalizations included.
            "task": {"name": "digits", "batch_size": 8, "options": {"hidden": [372, 548]}},
            "algorithm": {"rounds": 2 * steps, "eta_w": 0.01, **settings},
            "evaluation": {"every": steps},
            "run": {"seed": 1},
        }
    )
    simulate(config, tmp_path / "run", saves_models=False)
    first, second = points_of(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ups = [line["uplink_float_equivalents"] for line in lines if line["event"] == "evaluation"]
    downs = [line["downlink_float_equivalents"] for line in lines if line["event"] == "evaluation"]
    assert ups == pytest.approx([M * up, 2 * M * up], rel=1e-12)
    # The first model and the first step's weight are sent before; an evaluation's step brings a weight too.
    assert downs == pytest.approx([M * (D + weight + down), M * (D + weight + 2 * down + weight)], rel=1e-12)
    assert second.float_equivalents == pytest.approx(ups[1] + downs[1], abs=1e-3)
    assert (first.synchronization, second.synchronization) == (1, 2)
