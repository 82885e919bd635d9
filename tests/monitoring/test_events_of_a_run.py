"""Events that a run logs as it is stopped, damaged, put back and gone on with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from support import Federation
from support.proxy import Proxy

TASK = ("--task", "tests_tasks:Slow")


def config_of(**own: Any) -> dict[str, Any]:
    return {
        "workers": 2,
        "task": {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.01}},
        "algorithm": {
            "name": "afl-com",
            "rounds": 60,
            "eta_w": 0.1,
            "eta_q": 0.1,
            "uplink": {"name": "top-k", "ratio": 0.2},
        },
        "evaluation": {"every": 10},
        **own,
    }


def after(federation: Federation, round_: int) -> None:
    federation.wait_until(lambda status: status["round"] >= round_)


@pytest.mark.timeout(300)  # five processes, one after another
def test_a_run_that_is_stopped_and_then_put_back_to_a_damaged_backup(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    with Proxy() as door, Federation(config_of(), tmp_path / "federation") as federation:
        door.aim(federation.port)
        first = federation.start("0", *TASK, server=door.address)
        second = federation.start("1", *TASK, server=door.address)
        after(federation, 3)
        second.kill()
        federation.server.wait_for("session_ended", workers="[1]")
        second = federation.start("1", *TASK, server=door.address)
        second.wait_for("journal_read", worker=1)
        federation.server.wait_for("worker_ready", workers="[1]", count=2)
        assert federation.metrics()['afl_worker_incidents_total{incident="restart",worker="1"}'] == 1

        federation.server.terminate()
        federation.server.wait_for("stopping", saying="SIGTERM")
        federation.server.expect(ExitCode.INTERRUPTED)
        (over,) = federation.server.logged("run_over", code=int(ExitCode.INTERRUPTED))
        stopped_at = over["summary"]["rounds"]
        (hint,) = federation.server.logged("can_go_on")
        assert hint["directory"] == str(federation.directory)
        shutil.copytree(federation.directory, backup)

        federation.start_server()
        door.aim(federation.port)
        federation.server.wait_for("resumed", round=stopped_at + 1)
        after(federation, stopped_at + 3)
        federation.server.kill()
        shutil.rmtree(federation.directory)
        shutil.copytree(backup, federation.directory)
        metrics = federation.directory / "metrics.jsonl"
        metrics.write_bytes(metrics.read_bytes()[:-100])

        federation.start_server()
        door.aim(federation.port)
        federation.server.wait_for("metrics_lost", file="metrics.jsonl")
        federation.server.wait_for("worker_ahead", worker=0)
        federation.finish()
        assert first.logged("reconnecting")
        (timings,) = first.logged("timings")
        assert timings["steps"] > stopped_at
        assert timings["wait_wall"] > 0


def test_a_run_that_diverges(tmp_path: Path) -> None:
    config = config_of(task={"name": "tests_tasks:Diverging", "batch_size": 8})
    with Federation(config, tmp_path) as federation:
        federation.start("0", "--task", "tests_tasks:Diverging")
        worker = federation.start("1", "--task", "tests_tasks:Diverging")
        federation.server.expect(ExitCode.DIVERGED)
        assert "worker 1" in federation.server.wait_for("run_aborted", code=int(ExitCode.DIVERGED))["reason"]
        worker.wait_for("ended", code=int(ExitCode.DIVERGED))
