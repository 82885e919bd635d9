"""A worker that stays takes part in one run after the other, also after one that ends badly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afl.config import load_config
from afl.errors import ExitCode
from afl.runs.files import METRICS_FILE, metrics_entries, of_event
from afl_lab.simulation.run import simulate
from support.federation import free_port
from support.process import Process

CONFIG = """
workers: 3
task: {{name: synthetic, batch_size: 8, options: {{dim: 20}}}}
algorithm: {{name: afl-com, rounds: 12, eta_w: 0.05, eta_q: 0.1, uplink: {{name: rand-k, ratio: 0.5}}}}
evaluation: {{every: 1}}
run: {{seed: 3}}
server: {{listen: "127.0.0.1:{port}", http: null}}
"""


def evaluations(directory: Path) -> list[Any]:
    entries, _ = metrics_entries(directory / METRICS_FILE)
    return [line["workers"] for line in of_event(entries, "evaluation")]


@pytest.mark.timeout(300)
def test_trials_over_a_federation_whose_workers_stay(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "server.yaml").write_text(CONFIG.format(port=port))
    diverging = "faults.divergence={max_loss: 1e-9, evaluations: 1}"
    server = ["--set", "run.directory=bad", "--set", diverging, "--no-live"]
    arguments = ["-m", "afl_worker", "--id", "0-2", "--server", f"127.0.0.1:{port}", "--min-batch", "1"]
    worker = Process("worker", [*arguments, "--again", "--give-up-after", "100s"], folder=tmp_path)
    try:
        bad = Process("server", ["-m", "afl_server", "--config", "server.yaml", *server], folder=tmp_path)
        bad.expect(ExitCode.DIVERGED)
        bad.close()
        worker.wait_for("awaiting_next_run")
        tune = ["-m", "afl_cli", "tune", "server.yaml", "--federation", "--trials", "2"]
        command = Process("afl tune", tune, folder=tmp_path)
        command.expect(ExitCode.OK)
        assert "start them with --again" in command.text
        command.close()
        # Two trials, and FedAvg both ways.
        worker.wait_for("awaiting_next_run", count=5)
        assert worker.is_running
        worker.terminate()
        worker.expect(ExitCode.INTERRUPTED)
    finally:
        worker.close()
    folder = tmp_path / "tuning" / "server"
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 3
    assert json.loads((folder / "trials" / "0001" / "summary.json").read_text())["result"] == "ok"
    config = load_config(folder / "trials" / "0001.yaml")
    simulate(config, tmp_path / "simulated", saves_models=False)
    assert evaluations(folder / "trials" / "0001") == evaluations(tmp_path / "simulated")
    assert load_config(tmp_path / "server.tuned.yaml").server.listen.port == port


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_over_a_federation_that_was_killed_in_a_trial_goes_on(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "server.yaml").write_text(CONFIG.format(port=port).replace("rounds: 12", "rounds: 200"))
    arguments = ["-m", "afl_worker", "--id", "0-2", "--server", f"127.0.0.1:{port}", "--min-batch", "1"]
    worker = Process("worker", [*arguments, "--again", "--give-up-after", "100s"], folder=tmp_path)

    def search(name: str) -> Process:
        files = ["--out", name, "--output", f"{name}.yaml"]
        tune = ["-m", "afl_cli", "tune", "server.yaml", "--federation", "--trials", "5", *files]
        return Process("afl tune", tune, folder=tmp_path)

    def folder_of(name: str) -> Path:
        return tmp_path / name / "server"

    try:
        killed = search("killed")
        # FedAvg, a group of four trials, and the one in which it is killed.
        worker.wait_for("joined", count=6)
        killed.kill()
        killed.close()
        held = folder_of("killed")
        assert len((held / "trials.jsonl").read_text().splitlines()) == 5
        assert (held / "trials" / "0004").is_dir()
        for name in ("killed", "whole"):
            command = search(name)
            command.expect(ExitCode.OK, 200)
            command.close()
        worker.terminate()
        worker.expect(ExitCode.INTERRUPTED)
    finally:
        worker.close()
    trials = [(folder_of(name) / "trials.jsonl").read_bytes() for name in ("killed", "whole")]
    assert trials[0] == trials[1]
    assert len(trials[0].splitlines()) == 6
    assert (tmp_path / "killed.yaml").read_bytes() == (tmp_path / "whole.yaml").read_bytes()
