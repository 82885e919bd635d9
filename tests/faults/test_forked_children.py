"""A task's forked processes, such as a DataLoader's, hold nothing of the worker that a restart needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import Federation, Process, result_of, run_together

OPTIONS = ("--task", "tests_tasks:Forking")
CHILDREN = 3
GONE_S = 15.0


def config_of(task: str, rounds: int) -> dict[str, Any]:
    return {
        "workers": 2,
        "task": {"name": f"tests_tasks:{task}", "batch_size": 8, "options": {"pause": 0.02}},
        "algorithm": {
            "name": "afl-com",
            "rounds": rounds,
            "eta_w": 0.5,
            "eta_q": 0.3,
            "block": 7,
            "uplink": {"name": "top-k", "ratio": 0.2},
        },
        "evaluation": {"every": 7},
        "server": {"checkpoint_every": 10, "heartbeat": "0.2s", "peer_timeout": "5s"},
    }


def children_of(process: Process) -> list[psutil.Process]:
    """Those of a worker, once all are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(process.pid).children()
        if len(found) == CHILDREN:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{process.name} has not forked: {process.text}")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_worker_with_forked_children_goes_on_at_once(tmp_path: Path, kills: int):
    rounds = 20 + 5 * kills
    orphans: list[psutil.Process] = []
    with Federation(config_of("Forking", rounds), tmp_path / "killed") as federation:
        federation.start("1", *OPTIONS)
        for _ in range(kills):
            worker = federation.start("0", *OPTIONS)
            reached = federation.wait_until(lambda status: status["state"] == "running")["round"]
            federation.wait_until(lambda status, after=reached: status["round"] > after + 1)
            orphans += children_of(worker)
            worker.kill()
        federation.start("0", *OPTIONS)
        federation.finish()
    plain = run_together(config_of("Slow", rounds), tmp_path / "plain", ("0", "1"))
    assert result_of(federation) == result_of(plain)
    assert len(orphans) == kills * CHILDREN
    assert not psutil.wait_procs(orphans, GONE_S)[1], "children outlive their worker"
