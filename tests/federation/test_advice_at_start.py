"""What a server and a simulation say at their start of a configuration that is probably not what is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl.runs.files import METRICS_FILE
from afl_cli.main import main
from support import run_together

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic"},
    "algorithm": {"name": "afl-br", "rounds": 40, "block": 10, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 10},
    "run": {"seed": 1},
}


def evaluations_of(directory: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (directory / METRICS_FILE).read_text().splitlines())
    return [line for line in lines if line["event"] == "evaluation"]


def test_a_server_warns_once_and_records_the_phase(tmp_path: Path) -> None:
    federation = run_together(CONFIG, tmp_path / "run", ["0-1"])
    (line,) = federation.server.logged("configuration_advice")
    assert line["key"] == "evaluation.every"
    assert line["level"] == "warning"
    assert "at a block's end" in line["message"]
    assert "set it to auto" in line["message"]
    found = [(each["rounds_since_restart"], each["block"]) for each in evaluations_of(federation.directory)]
    assert found == [(10, 10)] * 4


def test_a_simulation_warns_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "aliased.yaml", str(tmp_path / "out")
    config.write_text(yaml.safe_dump(CONFIG))
    main(["simulate", str(config), "--seeds", "1-2", "--jobs", "1", "--no-models", "--out", out])
    assert capsys.readouterr().err.count("afl simulate: warning: evaluation.every: with 10,") == 1
    assert [each["rounds_since_restart"] for each in evaluations_of(tmp_path / "out/aliased/seed-1")] == [
        10
    ] * 4
