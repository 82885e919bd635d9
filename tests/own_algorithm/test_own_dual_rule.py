"""A user's own dual rule, that of docs/dual-rules.md, installed at the server alone, which is killed: the run
is that of a simulation to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from support import Federation, final_values
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


def installed(site: Path) -> dict[str, str]:
    """An environment with the page's rule as an installer would leave it."""
    (code,) = blocks(PAGE, "python")
    (toml,) = blocks(PAGE, "toml")
    (site / "top_two.py").write_text(code.text, encoding="utf-8")
    ((group, points),) = tomllib.loads(toml.text)["project"]["entry-points"].items()
    information = site / "top_two-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: top-two\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": os.pathsep.join([str(site), str(KIT), os.environ.get("PYTHONPATH", "")])}


def test_a_rule_of_one_s_own_runs_where_only_the_server_has_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    environment = installed(site)
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
    done = subprocess.run(
        [sys.executable, "-m", "afl_cli", *arguments],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (model,) = (tmp_path / "simulated").rglob("model-final.safetensors")
    assert final_values(model.parent) == final_values(federation.directory)
