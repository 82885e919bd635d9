"""``afl tune``: a search to its end, one that was cut short, and one that a person stops."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afl.config import load_config
from afl.errors import ExitCode
from afl_cli.main import main
from afl_lab.simulation.pool import Pool
from afl_lab.tuning.command import execute
from support.commands import PREPARED

TASK = """
import torch
from torch import nn

import afl


class Opposite(afl.Classification):
    def model(self):
        return nn.Linear(4, 2)

    def data(self, worker, context):
        x = torch.randn((60, 4), generator=torch.Generator().manual_seed(worker))
        y = (x[:, 0] * (1 if worker else -1) + 0.5 * x[:, 1] > 0).long()
        return afl.WorkerData(train=(x[:40], y[:40]), test=(x[40:], y[40:]))
"""

CONFIG = """
workers: 3
task: {name: "opposite:Opposite", batch_size: 8}
algorithm:
  name: afl-com
  rounds: 30
  eta_w: 0.1
  eta_q: 0.1
  uplink: {name: rand-k, ratio: 0.5}
evaluation: {every: 1}
run: {seed: 3, directory: runs/mine}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "opposite.py").write_text(TASK)
    (tmp_path / "server.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multiprocessing.get_context", lambda _: PREPARED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_and_the_same_one_after_it_was_killed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "server.yaml", "--trials", "10", "--jobs", "2"]
    assert main(command) == ExitCode.OK
    said = capsys.readouterr().out
    for name in ("afl-com", "FedAvg, uniform", "FedAvg, by samples", "each alone", "worker 0", "sent"):
        assert name in " ".join(said.split())
    assert "Test accuracy" in said
    assert "task.held_out: 0.2" in said
    path = folder / "tuning" / "server" / "trials.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    trials = [json.loads(line) for line in lines[1:]]
    assert [trial["number"] for trial in trials] == list(range(10))
    best = max(trials, key=lambda trial: -1 if trial["score"] is None else trial["score"])
    tuned = folder / "server.tuned.yaml"
    config = load_config(tuned)
    assert config.algorithm.rounds == 30
    assert trials[0]["params"] == {}
    assert config.algorithm.eta_w == pytest.approx(best["params"].get("eta_w", 0.1), rel=0.01)
    assert config.run.directory is None
    assert f"trial {best['number']} of 10" in tuned.read_text().splitlines()[0]
    # Killed in its second group: one of its trials had ended, and a line was half written.
    chosen = tuned.read_bytes()
    path.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    for number in (5, 6, 7):
        (folder / "tuning" / "server" / "trials" / f"{number:04}" / "summary.json").unlink()
    assert main(command) == ExitCode.OK
    assert path.read_bytes() == b"".join(lines)
    assert tuned.read_bytes() == chosen
    assert "4 trials are there already" in capsys.readouterr().out
    # Of another configuration, and onto a file of somebody else.
    assert main([*command, "--set", "task.batch_size=4"]) == ExitCode.CONFIG
    assert "another configuration" in capsys.readouterr().err
    assert main([*command, "--output", "server.yaml"]) == ExitCode.CONFIG
    assert "afl tune has not written it" in capsys.readouterr().err


@pytest.mark.long
def test_an_interrupted_search_leaves_what_was_found(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "afl_cli", "tune", "server.yaml", "--minutes", "10", "--jobs", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "trial 3" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED
    assert "the same command goes on" in said
    assert load_config(folder / "server.tuned.yaml").algorithm.name == "afl-com"


@pytest.mark.parametrize(
    ("masked", "said"),
    [
        ([], "Without each site alone: its data is there"),
        (["privacy.secure_aggregation=true", "algorithm.uplink.bits=8"], "would send unmasked"),
    ],
)
def test_the_table_of_a_federation_says_what_it_lacks(
    folder: Path, capsys: pytest.CaptureFixture[str], masked: list[str], said: str
) -> None:
    options = argparse.Namespace(
        config=Path("server.yaml"),
        set=masked,
        out=folder / "tuning",
        output=None,
        trials=1,
        minutes=None,
        most_lost=0.05,
    )
    assert execute(options, Pool(1)) == ExitCode.OK
    table = capsys.readouterr().out
    assert said in table
    assert "each alone" not in table
    assert ("FedAvg, uniform" in table) == (not masked)
