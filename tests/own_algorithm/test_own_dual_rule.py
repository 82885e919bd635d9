"""A user's own dual rule, that of docs/dual-rules.md, installed at the server alone, which is killed: the run
is that of a simulation to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import Federation, final_values
from support.commands import run_command
from support.packages import install, shown_points
from support.pages import blocks
from support.process import KIT

PAGE = "docs/dual-rules.md"
CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 200,
        "eta_w": 0.3,
        "uplink": {"name": "rand-k", "ratio": 0.2},
        "dual": {"name": "top-two", "beta": 0.8},
    },
    "server": {"checkpoint_every": 7, "heartbeat": "100ms"},
}


@pytest.mark.long
def test_a_rule_of_one_s_own_runs_where_only_the_server_has_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (code,) = blocks(PAGE, "python")
    (site / "top_two.py").write_text(code.text, encoding="utf-8")
    environment = install(site, "top-two", shown_points(PAGE))
    with Federation(CONFIG, tmp_path / "run", environment=environment) as federation:
        for ids in ("0", "1-2"):
            federation.start(ids, environment={"PYTHONPATH": str(KIT)})
        federation.wait_until(lambda status: status["round"] >= 30)
        port = federation.port
        federation.server.kill()
        federation.start_server("--set", f"server.listen=127.0.0.1:{port}")
        federation.finish()
    weights = {round(line["dual_weight_max"], 6) for line in federation.records("round")}
    assert weights == {0.333333, 0.5}

    arguments = ("simulate", str(federation.folder / "server.yaml"), "--out", "simulated", "--seeds", "7")
    done = run_command("-m", "afl_cli", *arguments, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    (model,) = (tmp_path / "simulated").rglob("model-final.safetensors")
    assert final_values(model.parent) == final_values(federation.directory)
