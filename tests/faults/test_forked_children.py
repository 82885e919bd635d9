"""What a task's code does to its process: it forks, starts threads, changes the folder."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from afl.errors import ExitCode
from support import Federation, Process, result_of, run_together
from support.federation import free_port

OPTIONS = ("--task", "tests_tasks:Forking")
CHILDREN = 3
GONE_S = 15.0


def config_of(task: str, rounds: int, **server: Any) -> dict[str, Any]:
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
        "server": {"checkpoint_every": 10, "heartbeat": "0.2s", "peer_timeout": "5s", **server},
    }


def children_of(process: Process, count: int = CHILDREN) -> list[psutil.Process]:
    """Those of a worker, once all are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(process.pid).children()
        if len(found) == count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{process.name} has not forked: {process.text}")


def start(federation: Federation, *options: str) -> tuple[Process, list[psutil.Process]]:
    """Worker 0 in the middle of a round, and its children."""
    worker = federation.start("0", *OPTIONS, *options)
    reached = federation.wait_until(lambda status: status["state"] == "running")["round"]
    federation.wait_until(lambda status: status["round"] > reached + 1)
    return worker, children_of(worker)


def check(federation: Federation, orphans: list[psutil.Process], forked: int) -> None:
    """The run goes on to the end of an undisturbed one, and what was forked has ended."""
    rounds = federation.summary()["rounds"]
    plain = run_together(config_of("Slow", rounds), federation.folder / "plain", ("0", "1"))
    assert result_of(federation) == result_of(plain)
    assert len(orphans) == forked
    assert not psutil.wait_procs(orphans, GONE_S)[1], "children outlive their worker"


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_worker_with_forked_children_goes_on_at_once(tmp_path: Path, kills: int):
    orphans: list[psutil.Process] = []
    with Federation(config_of("Forking", 20 + 5 * kills), tmp_path) as federation:
        federation.start("1", *OPTIONS)
        http = f"--http=127.0.0.1:{free_port()}"
        for _ in range(kills):
            worker, children = start(federation, http)
            orphans += children
            worker.kill()
        federation.start("0", *OPTIONS)
        federation.finish()
    check(federation, orphans, kills * CHILDREN)


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_signals_to_a_worker_with_forked_children_or_to_all_show_no_traceback(tmp_path: Path, times: int):
    orphans: list[psutil.Process] = []
    with Federation(config_of("Forking", 20 + 20 * times), tmp_path) as federation:
        federation.start("1", *OPTIONS)
        signals, receivers = (signal.SIGTERM, signal.SIGINT), (os.kill, os.killpg)
        for number, send in times * list(itertools.product(signals, receivers)):
            worker, children = start(federation)
            orphans += children
            send(worker.pid, number)
            worker.expect(ExitCode.INTERRUPTED)
            assert "Traceback" not in worker.text
            assert worker.logged("ended", code=int(ExitCode.INTERRUPTED)), worker.text
        federation.start("0", *OPTIONS)
        federation.finish()
    check(federation, orphans, 4 * times * CHILDREN)


@pytest.mark.slow
def test_a_killed_server_with_a_forked_child_goes_on_at_its_ports_at_once(tmp_path: Path):
    config = config_of("ForkingModel", 300, **{key: f"127.0.0.1:{free_port()}" for key in ("listen", "http")})
    orphans: list[psutil.Process] = []
    with Federation(config, tmp_path) as federation:
        for ids in ("0", "1"):
            federation.start(ids, "--task", "tests_tasks:ForkingModel")
        federation.wait_until(lambda status: status["round"] >= 5)
        second = federation.start_server()
        second.expect(ExitCode.IN_USE)
        second.close()
        federation.servers.remove(second)
        assert f"in use by another process (process {federation.server.pid})" in second.text
        for _ in range(3):
            reached = federation.status()["round"]
            federation.wait_until(lambda status, after=reached: status["round"] > after + 1)
            orphans += children_of(federation.server, 1)
            federation.server.kill()
            federation.start_server()
            assert federation.server.wait_for("resumed")
        federation.finish()
    check(federation, orphans, 3)


def test_a_signal_to_a_servers_child_is_not_the_servers(tmp_path: Path):
    with Federation(config_of("ForkingModel", 20), tmp_path) as federation:
        (child,) = children_of(federation.server, 1)
        federation.server.wait_for("listening")
        child.terminate()
        deadline = time.monotonic() + GONE_S
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the child has not taken the signal"
            time.sleep(0.02)
        for ids in ("0", "1"):
            federation.start(ids, "--task", "tests_tasks:ForkingModel")
        federation.finish()


LEFT = "s after the end, and left behind: the thread prefetch; end what your code starts"


@pytest.mark.long
def test_a_thread_that_does_not_end_holds_nobody(tmp_path: Path):
    with Federation(config_of("Threaded", 60), tmp_path) as federation:
        federation.start("1", "--task", "tests_tasks:Threaded")
        worker = federation.start("0", "--task", "tests_tasks:Threaded")
        federation.wait_until(lambda status: status["round"] >= 3)
        worker.terminate()
        worker.expect(ExitCode.INTERRUPTED)
        again = federation.start("0", "--task", "tests_tasks:Threaded")
        federation.finish()
    for process in (worker, again, federation.server):
        assert LEFT in process.text


def test_a_task_that_changes_the_working_directory_changes_no_path(tmp_path: Path):
    config = {**config_of("Wandering", 20), "run": {"seed": 1, "directory": "run"}}
    with Federation(config, tmp_path) as federation:
        for ids in ("0", "1"):
            options = ("--task", "tests_tasks:Wandering", "--journal", "journal", "--data-dir", "data")
            federation.start(ids, *options)
        federation.wait_until(lambda status: status["round"] >= 1)
        assert len(list((tmp_path / "journal").glob("*/worker-*.journal"))) == 2
        federation.finish()
    assert federation.summary()["result"] == "ok"
    assert (tmp_path / "run" / "model-final.safetensors").is_file()
    assert federation.server.logged("listening", directory=str(tmp_path / "run"))
