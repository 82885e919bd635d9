"""A simulation gives what a federation gives: models to the bit, metrics, counts of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from afl.config import config_from_mapping
from afl.core.algorithms.registry import server_half
from afl.core.randomness import SharedRandomness
from afl.wire.settings import RunSettings
from afl_lab.simulation.run import simulate
from support import Federation

TOP_K = {"name": "top-k", "ratio": 0.1}
RAND_K = {"name": "rand-k", "ratio": 0.1}

CASES: dict[str, dict[str, Any]] = {
    "afl-br": {"name": "afl-br", "eta_q": 0.1},
    "top-k up, rand-k down": {"name": "afl-com", "eta_q": 0.1, "uplink": TOP_K, "downlink": RAND_K},
    "rand-k": {"name": "afl-com", "eta_q": 0.1, "uplink": RAND_K},
    "no weight above 0.4": {"name": "afl-com", "eta_q": 3.0, "uplink": RAND_K, "largest_weight": 0.4},
    "integers": {"name": "afl-com", "eta_q": 0.1, "uplink": {**RAND_K, "bits": 4}},
    "integers down": {"name": "afl-com", "eta_q": 0.1, "uplink": TOP_K, "downlink": {**RAND_K, "bits": 4}},
    "drfa of b": {"name": "drfa", "eta_q": 0.05, "local_steps": 3, "sampled": 2},
    "fedavg by samples": {"name": "fedavg", "local_steps": 2, "weighting": "samples"},
    "fedavg, adam": {"name": "fedavg", "local_steps": 2, "optimizer": {"name": "adam"}, "server_eta": 0.01},
}

TIMING = frozenset({"seconds"})


def config_of(case: str) -> dict[str, Any]:
    return {
        "workers": 3,
        "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [64]}},
        "algorithm": {"rounds": 20, "eta_w": 0.1, **CASES[case]},
        "evaluation": {"every": 7},
        # Payloads of several chunks, some of them joined.
        "server": {"chunk_bytes": "4KiB"},
    }


def lines(directory: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock, or on when the last bytes were counted."""
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {key: value for key, value in line.items() if key not in TIMING and "link" not in key}
        for line in found
    ]


def first_participants(config: dict[str, Any]) -> Sequence[int]:
    """The workers that round 1 asks."""
    settings = RunSettings.of_config(config_from_mapping(config)).parameters
    return server_half(settings, torch.zeros(1), SharedRandomness.from_int(7)).participants


SLOW = frozenset({"afl-br", "rand-k"})


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_a_simulation_is_the_federation(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    with Federation(config, tmp_path / "federation") as federation:
        # All are there before round 1 can end: who came later would be sent a model in place of steps.
        drawn = first_participants(config)
        for worker in sorted(range(3), key=lambda worker: worker in drawn):
            process = federation.start(str(worker))
            if worker not in drawn:
                process.wait_for("joined")
        federation.finish()
    simulated = simulate(config_from_mapping({**config, "run": {"seed": 7}}), tmp_path / "simulation")

    assert simulated["result"] == "ok"
    for name in ("final", "random", "best"):
        real, other = (
            (directory / f"model-{name}.safetensors").read_bytes()
            for directory in (federation.directory, tmp_path / "simulation")
        )
        # The run's id in the header differs; the tensors at the end do not.
        size = 4 * (64 * 64 + 64 * 3 + 64 * 10 + 10)
        assert real[-size:] == other[-size:], name
    assert lines(federation.directory) == lines(tmp_path / "simulation")
    has_integers = all("integers" in line for line in federation.records("round"))
    assert has_integers is case.startswith("integers")
    for direction in ("uplink", "downlink"):
        right = federation.summary()["communication"][direction]
        found = simulated["communication"][direction]
        for kind in ("gradient", "evaluation", "model"):
            assert found["wire_bytes_by_kind"][kind] == right["wire_bytes_by_kind"][kind], (direction, kind)
        assert found["payload_bytes_by_part"]["values"] == right["payload_bytes_by_part"]["values"]
        assert found["payload_bytes_by_part"]["indices"] == right["payload_bytes_by_part"]["indices"]
        assert found["payload_bytes_by_part"]["scalars"] == right["payload_bytes_by_part"]["scalars"]
        assert found["float_equivalents"] == pytest.approx(right["float_equivalents"], rel=1e-12)
