"""Bounds on updates and losses, and a quarantine, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from afl.config import config_from_mapping
from afl_lab.simulation.run import simulate
from support import Federation, run_together

BOUNDS: dict[str, Any] = {"loss_cap": 0.05, "update_norm": {"times": 10}}


def config_of(rounds: int, **faults: Any) -> dict[str, Any]:
    return {
        "workers": 4,
        "task": {"name": "synthetic", "batch_size": 8},
        "algorithm": {
            "name": "afl-com",
            "rounds": rounds,
            "eta_w": 0.9,
            "eta_q": 2.0,
            "largest_weight": 0.5,
            "uplink": {"name": "rand-k", "ratio": 0.1, "bits": 8},
        },
        "evaluation": {"every": 20},
        "faults": faults,
    }


def test_bounds_that_honest_workers_keep_give_the_bits_of_a_simulation(tmp_path: Path) -> None:
    config = config_of(40, **BOUNDS)
    federation = run_together(config, tmp_path / "real", ["0-2", "3"])
    assert federation.server.logged("loss_capped")
    assert not federation.server.logged("update_too_large")
    simulate(config_from_mapping({**config, "run": {"seed": 7}}), tmp_path / "simulated")
    simulated = load_file(tmp_path / "simulated" / "model-final.safetensors")
    assert {name: tensor.numpy().tobytes() for name, tensor in sorted(simulated.items())} == (
        federation.model_bytes()
    )


@pytest.mark.parametrize(("worker", "faults"), [(3, BOUNDS), (1, BOUNDS), (1, {"non_finite": "skip"})])
def test_an_operator_puts_a_worker_in_quarantine_and_lets_it_out(
    tmp_path: Path, worker: int, faults: dict[str, Any]
) -> None:
    """Alone in its process, or one of three whose integers come joined."""
    config = config_of(1000, **faults)
    config["task"] = {"name": "tests_tasks:Slow", "batch_size": 8}
    with Federation(config, tmp_path) as federation:
        for ids in ("0-2", "3"):
            federation.start(ids, "--task", "tests_tasks:Slow")
        federation.wait_until(lambda status: status["round"] >= 5)
        file = federation.directory / "quarantine"
        file.write_text(f"{worker}\n", encoding="utf-8")
        federation.server.wait_for("quarantined", workers=f"[{worker}]")
        federation.server.wait_for("absent", workers=f"[{worker}]")
        file.unlink()
        federation.server.wait_for("quarantined", workers="[]")
        federation.server.wait_for("absent", workers="[]")
        assert not federation.server.logged("peer_refused")
    absences = {tuple(line.get("absent", ())) for line in federation.records("round")}
    assert absences == {(), (worker,)}
