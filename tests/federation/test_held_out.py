"""Dual weights that follow held-out records: through real processes that die, and simulated, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afl.config import config_from_mapping
from afl_lab.simulation.run import simulate
from support import Reference, baselines, run_together
from support.drill import Drill, Faults

ROUNDS = 40


def config_of(algorithm: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "workers": 4,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"examples": 32}, "held_out": 0.2},
        "algorithm": {"rounds": ROUNDS, "eta_w": 0.9, "eta_q": 0.3, "dual_loss": "held-out", **algorithm},
        "evaluation": {"every": 15},
        "run": {"seed": 7},
        **sections,
    }


AFL_COM = config_of({"name": "afl-com", "uplink": {"name": "rand-k", "ratio": 0.1}})

HIDDEN = config_of(
    {"name": "afl-com", "uplink": {"name": "rand-k", "ratio": 0.2, "bits": 16}},
    privacy={"secure_aggregation": True, "losses": "hidden"},
)


def simulated(config: dict[str, Any], directory: Path) -> Path:
    assert simulate(config_from_mapping(config), directory)["result"] == "ok"
    return directory


def evaluations(directory: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        {key: value for key, value in line.items() if key != "seconds" and "link" not in key}
        for line in lines
        if line["event"] == "evaluation"
    ]


@pytest.mark.long
def test_killed_and_simulated_it_is_what_the_reference_says(tmp_path: Path) -> None:
    points = {
        "server": ["server.before-log:17:kill", "server.mid-broadcast:9:kill"],
        "0-1": ["worker.after-journal:21:kill"],
        "2,3": ["worker.before-journal:12:kill"],
    }
    federation = Drill(AFL_COM, tmp_path / "run", ["0-1", "2,3"]).run(Faults(points=points))
    reference = Reference.of(AFL_COM)
    assert federation.model("final")["w"].numpy().tobytes() == reference.weights[-1].tobytes()
    lines = federation.records("round")
    assert [line["loss_max"] for line in lines] == [losses.max() for losses in reference.losses]
    training = Reference.of({**AFL_COM, "algorithm": {**AFL_COM["algorithm"], "dual_loss": "training"}})
    assert abs(training.weights[-1] - reference.weights[-1]).max() > 1e-3, "what is held out did not matter"
    for evaluation in federation.records("evaluation"):
        round_ = evaluation["round"]
        found = [worker["held_out_loss"] for worker in evaluation["workers"]]
        assert found == pytest.approx(reference.held_out_losses[round_].tolist(), rel=1e-14)
        assert [worker["loss"] for worker in evaluation["workers"]] == reference.test_losses[round_].tolist()

    again = simulated(AFL_COM, tmp_path / "simulated")
    for name in ("final", "random", "best"):
        file = f"model-{name}.safetensors"
        weights = [(folder / file).read_bytes()[-400:] for folder in (federation.directory, again)]
        assert weights[0] == weights[1], name
    assert evaluations(again) == evaluations(federation.directory)


@pytest.mark.parametrize(
    "algorithm", [{"name": "sgda"}, {"name": "drfa", "eta_q": 0.1, "local_steps": 3}], ids=["sgda", "drfa"]
)
def test_other_algorithms_dual_steps_follow_it_too(algorithm: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(algorithm)
    federation = run_together(config, tmp_path / "run", ["0-3"])
    models, dual_weights = baselines.run(config)
    np.testing.assert_allclose(federation.model("final")["w"].numpy(), models[-1], rtol=1e-6, atol=1e-7)
    found = [line["dual_weight_max"] for line in federation.records("round")]
    np.testing.assert_allclose(found, [weights.max() for weights in dual_weights[:-1]], rtol=1e-5)


def test_hidden_losses_are_of_held_out_records_and_only_their_mean_is_told(tmp_path: Path) -> None:
    federation = run_together(HIDDEN, tmp_path / "run", ["0-1", "2-3"])
    again = simulated(HIDDEN, tmp_path / "simulated")
    weights = federation.model("final")["w"].numpy()
    assert (again / "model-final.safetensors").read_bytes()[-400:] == weights.tobytes()
    assert evaluations(again) == evaluations(federation.directory)
    last = evaluations(federation.directory)[-1]
    assert "held_out_loss" in json.dumps(last)
    shown = {**HIDDEN, "algorithm": {**HIDDEN["algorithm"], "dual_loss": "training"}}
    other = simulated(shown, tmp_path / "training")
    assert (other / "model-final.safetensors").read_bytes()[-400:] != weights.tobytes()


def test_a_run_out_of_patience_is_complete_with_its_best_model(tmp_path: Path) -> None:
    config = {**AFL_COM, "evaluation": {"every": 2, "patience": 3}, "server": {"checkpoint_every": 3}}
    config["algorithm"] = {**config["algorithm"], "rounds": 400, "eta_w": 3.0}
    reference = Reference.of({**config, "algorithm": {**config["algorithm"], "block": 20}}, stop_after=100)
    worst = {round_: losses.max() for round_, losses in reference.held_out_losses.items()}
    best = last = 0
    for round_, loss in worst.items():
        if not best or loss < worst[best]:
            best = round_
        last = round_
        if round_ == best + 6:
            break
    assert last == best + 6 < 100, "the test's run is never out of patience"
    points = {"server": [f"server.before-log:{2 * last // 3}:kill", "server.after-log:4:kill"]}
    federation = Drill(config, tmp_path / "run", ["0-1", "2,3"]).run(Faults(points=points))
    summary = federation.summary()
    assert (summary["result"], summary["rounds"], summary["best"]["round"]) == ("ok", last, best)
    expected = (
        f"the run is complete: 3 evaluations brought no better worst held_out_loss than {worst[best]:.4g} "
        f"after round {best} (evaluation.patience)"
    )
    assert summary["reason"] == expected
    for name, after in (("best", best), ("final", last)):
        weights = federation.model(name)["w"].numpy()
        assert weights.tobytes() == reference.weights[after].tobytes()
    again = simulated(config, tmp_path / "simulated")
    assert json.loads((again / "summary.json").read_text())["reason"] == expected
    assert evaluations(again) == evaluations(federation.directory)
