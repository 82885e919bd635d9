"""A worker that stays takes part in one run after the other, also after one that ends badly."""

from __future__ import annotations

import contextlib
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

MINUTES_S = 400.0
"""A search begins a server for each trial, each of which imports torch."""


def evaluations(directory: Path) -> list[Any]:
    entries, _ = metrics_entries(directory / METRICS_FILE)
    return [line["workers"] for line in of_event(entries, "evaluation")]


@pytest.mark.long
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
@pytest.mark.timeout(3 * MINUTES_S)
def test_a_search_over_a_federation_that_was_killed_in_a_trial_goes_on(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "server.yaml").write_text(CONFIG.format(port=port).replace("rounds: 12", "rounds: 200"))
    arguments = ["-m", "afl_worker", "--id", "0-2", "--server", f"127.0.0.1:{port}", "--min-batch", "1"]
    worker = Process("worker", [*arguments, "--again", "--give-up-after", "100s"], folder=tmp_path)

    def search(name: str, *options: str) -> contextlib.closing[Process]:
        files = ["--out", name, "--output", f"{name}.yaml"]
        tune = ["-m", "afl_cli", "tune", "server.yaml", "--trials", "3", *files, *options]
        return contextlib.closing(Process("afl tune", tune, folder=tmp_path))

    def trials(name: str) -> list[bytes]:
        return (tmp_path / name / "server" / "trials.jsonl").read_bytes().splitlines()

    try:
        with search("served", "--federation") as killed:
            # FedAvg, a trial, and the one in which it is killed.
            worker.wait_for("joined", count=3, timeout=MINUTES_S)
            killed.kill()
        assert len(trials("served")) == 1
        with search("served", "--federation") as command:
            command.expect(ExitCode.OK, MINUTES_S)
        worker.terminate()
        worker.expect(ExitCode.INTERRUPTED)
    finally:
        worker.close()
    with search("simulated", "--jobs", "1") as command:
        command.expect(ExitCode.OK, MINUTES_S)
    assert trials("served") == trials("simulated")
    assert len(trials("served")) == 4
    assert (tmp_path / "served.yaml").read_bytes() == (tmp_path / "simulated.yaml").read_bytes()
