"""Workers of one process report together where their messages are integers: fewer bytes, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from afl.config import config_from_mapping
from afl_lab.simulation.run import simulate
from support import Federation, run_together

CONFIG: dict[str, Any] = {
    "workers": 10,
    "task": {"name": "digits", "batch_size": 8, "options": {"hidden": [16]}},
    "algorithm": {
        "name": "afl-com",
        "rounds": 30,
        "eta_w": 0.2,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.2, "bits": 4},
    },
    "evaluation": {"every": 10},
}

GROUPINGS = {
    "each alone": tuple(map(str, range(10))),
    "two of five": ("0-4", "5-9"),
    "five of two": ("0,9", "1,8", "2,7", "3,6", "4,5"),
    "all in one": ("0-9",),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The model of the run in one process, in which each worker's message is added alone."""
    folder = tmp_path_factory.mktemp("simulated")
    simulate(config_from_mapping({**CONFIG, "run": {"seed": 7}}), folder)
    tensors = load_file(folder / "model-final.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in sorted(tensors.items())}


def uplink(federation: Federation) -> dict[str, Any]:
    counted: dict[str, Any] = federation.summary()["communication"]["uplink"]
    return counted


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_the_grouping_changes_no_bit(tmp_path: Path, simulated: dict[str, bytes], grouping: str) -> None:
    federation = run_together(CONFIG, tmp_path, GROUPINGS[grouping])
    assert federation.model_bytes() == simulated
