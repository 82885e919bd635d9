"""`afl simulate` as a user calls it: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from afl.errors import ExitCode
from afl_cli.main import main
from support.commands import PREPARED, gone, interrupted, started_simulation

pytestmark = pytest.mark.timeout(300)

Simulate = Callable[..., tuple[int, str, str]]

DIGITS: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits", "batch_size": 8, "options": {"hidden": [8]}},
    "algorithm": {"name": "afl-br", "rounds": 6, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 3},
}
FEDAVG = {"name": "fedavg", "rounds": 6, "eta_w": 0.1, "local_steps": 2}

TASKS = """
import multiprocessing
import os
import signal
import time

from torch.utils.data import DataLoader

from afl.tasks.digits import Digits


class Raising(Digits):
    def loss(self, model, batch):
        raise KeyError("no such key")


class Killed(Digits):
    def loss(self, model, batch):
        os.kill(os.getpid(), signal.SIGKILL)


class Diverging(Digits):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("inf")


class Slow(Digits):
    ones = None

    def loss(self, model, batch):
        if self.ones is None:
            multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
            self.ones = iter(DataLoader([1.0] * 10**6, num_workers=1, multiprocessing_context="fork"))
        next(self.ones)
        time.sleep(0.002)
        return super().loss(model, batch)
"""


def written(folder: Path, name: str, **changes: Any) -> str:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**DIGITS, **changes}))
    return f"{name}.yaml"


def task_of(name: str) -> dict[str, Any]:
    return {**DIGITS["task"], "name": f"my_tasks:{name}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_tasks.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def simulate(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Simulate:
    """The command here, with its runs in processes of their own, which have imported PyTorch before; its exit
    code, output and errors."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("multiprocessing.get_context", lambda _: PREPARED)

    def _simulate(*arguments: str) -> tuple[int, str, str]:
        code = main(["simulate", *arguments])
        return code, *capfd.readouterr()

    return _simulate


def summary(folder: Path, name: str, seed: int = 1) -> dict[str, Any]:
    path = folder / "simulations" / name / f"seed-{seed}" / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_configurations_times_seeds_and_again(simulate: Simulate, folder: Path) -> None:
    configs = [written(folder, "br"), written(folder, "average", algorithm=FEDAVG)]
    arguments = [*configs, "--seeds", "1-2", "--jobs", "2"]
    code, out, error = simulate(*arguments)
    assert (code, error) == (ExitCode.OK, "")
    names = {f"{name}, seed {seed}" for name in ("br", "average") for seed in (1, 2)}
    assert {line for line in out.splitlines() if line.endswith(": ok")} == {f"{name}: ok" for name in names}
    for name in names:
        assert f"│ {name}" in out
    assert (
        "written: 4 runs below simulations, such as simulations/br/seed-1 (--out names another folder)\n"
        in out
    )
    directories = sorted(path for path in (folder / "simulations").glob("*/*"))
    assert [path.relative_to(folder / "simulations").as_posix() for path in directories] == [
        "average/seed-1",
        "average/seed-2",
        "br/seed-1",
        "br/seed-2",
    ]
    for directory in directories:
        assert sorted(path.name for path in directory.iterdir()) == [
            "config.yaml",
            "metrics.jsonl",
            *[f"model-{name}.safetensors" for name in ("best", "final", "random")],
            "summary.json",
            "versions.json",
        ]
    for seed in (1, 2):
        assert summary(folder, "br", seed)["algorithm"] == "afl-br"
        assert summary(folder, "average", seed)["rounds"] == 6

    # Every process gets the first model: d float32, d = 8 (64 + 1) + 2 * 8 + 10 (8 + 1).
    dim = 8 * 65 + 2 * 8 + 10 * 9
    down = summary(folder, "br")["communication"]["downlink"]
    up = summary(folder, "br")["communication"]["uplink"]
    assert up["payload_bytes_by_part"]["values"] == 3 * 6 * 4 * dim
    assert down["payload_bytes_by_part"]["values"] == 3 * (1 + 6) * 4 * dim

    # Again: all is there but one interrupted run, which alone is made.
    (directories[0] / "summary.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (folder / "simulations").glob("*/*/*")}
    code, again, error = simulate(*arguments)
    assert (code, error) == (ExitCode.OK, "")
    assert sorted(again.splitlines()[:4]) == sorted(f"{name}: ok" for name in names)
    touched = {path.parent for path, at in before.items() if path.stat().st_mtime_ns != at}
    assert touched == {directories[0]}


def test_a_run_that_fails_takes_no_other_with_it(simulate: Simulate, folder: Path) -> None:
    configs = [
        written(folder, "killed", task=task_of("Killed")),
        written(folder, "raising", task=task_of("Raising")),
        written(folder, "first"),
        written(folder, "second"),
    ]
    code, out, error = simulate(*configs, "--seeds", "1", "--jobs", "2", "--no-models")
    assert code == ExitCode.SHORTAGE
    assert summary(folder, "first")["result"] == summary(folder, "second")["result"] == "ok"
    assert summary(folder, "first")["models"] == []
    lines = out.splitlines()
    assert {"killed, seed 1: failed", "raising, seed 1: failed", "first, seed 1: ok"} <= set(lines)
    assert "afl simulate: killed, seed 1: its process was killed" in error
    raised = (
        r"worker 0, round 1: the task's code raised KeyError: 'no such key' \(my_tasks\.py:\d+, in loss\)"
    )
    assert re.search(f"afl simulate: raising, seed 1: {raised}", error)
    assert 'my_tasks.py", line' in error


def test_a_run_that_diverges_has_its_own_exit_code(simulate: Simulate, folder: Path) -> None:
    config = written(folder, "far", task=task_of("Diverging"), run={"seed": 4})
    code, out, error = simulate(config, "--no-models")
    assert (code, error) == (ExitCode.DIVERGED, "")
    assert "far, seed 4: diverged" in out
    assert summary(folder, "far", 4)["reason"].startswith(
        "worker 0, round 1: the loss is inf; lower algorithm"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.yaml", "--seeds", "1"], ExitCode.CONFIG, "none.yaml"),
        (["plain.yaml"], ExitCode.CONFIG, "run.seed is not given; give it there, or --seeds"),
        (["plain.yaml", "--seeds", "1-2,2"], ExitCode.CONFIG, "names a seed twice"),
        (["plain.yaml", "--seeds", "1", "--jobs", "0"], ExitCode.CONFIG, "'0' is not a number of runs"),
        (["plain.yaml", "--seeds", "1", "--set", "workers=0"], ExitCode.CONFIG, "workers"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str],
    code: int,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any process is started, so in this one: another would first import PyTorch."""
    written(folder, "plain")
    monkeypatch.chdir(folder)
    try:
        found = main(["simulate", *arguments])
    except SystemExit as refused:
        found = refused.code
    error = capsys.readouterr().err
    assert found == code, error
    assert message in error
    assert "Traceback" not in error


def test_a_task_that_is_not_there_is_named(simulate: Simulate, folder: Path) -> None:
    code, _, error = simulate(written(folder, "plain", task={"name": "no-such"}), "--seeds", "1")
    assert code == ExitCode.CONFIG
    assert "no such task" in error
    assert "Traceback" not in error


def test_missing_data_has_its_own_exit_code(simulate: Simulate, folder: Path) -> None:
    config = written(folder, "plain", task={"name": "fashion-mnist", "options": {"data_dir": str(folder)}})
    code, _, error = simulate(config, "--seeds", "1")
    if Path("/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("this machine has Fashion-MNIST where Debian puts it")
    assert code == ExitCode.DATA
    assert "Fashion-MNIST was not found" in error


def going_on(folder: Path, names: Sequence[str]) -> bool:
    """Whether each of the runs has closed a few rounds."""
    paths = [folder / "simulations" / name / "seed-1" / "metrics.jsonl" for name in names]
    return all(path.exists() and len(path.read_text().splitlines()) > 2 for path in paths)


def started_slowly(folder: Path, *names: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A call with one run complete and others that would take hours, and the processes below it: each run's,
    and two that its task has forked."""
    algorithm = {**DIGITS["algorithm"], "rounds": 10**6}
    slow = [written(folder, name, task=task_of("Slow"), algorithm=algorithm) for name in names]
    process, below = started_simulation(
        [written(folder, "quick"), *slow, "--seeds", "1", "--jobs", str(len(names))],
        folder,
        lambda _: going_on(folder, names),
    )
    assert len(below) >= 3 * len(names)
    return process, below


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
@pytest.mark.long
def test_an_interruption_ends_all_and_keeps_what_is_complete(number: signal.Signals, folder: Path) -> None:
    process, below = started_slowly(folder, "slow", "slower")
    out, error = interrupted(process, number, below)
    assert error.splitlines() == ["afl simulate: interrupted"]
    assert "quick, seed 1: ok" in out
    assert summary(folder, "quick")["result"] == "ok"
    assert not list((folder / "simulations" / "slow").glob("*/summary.json"))


@pytest.mark.long
def test_ctrl_c_of_a_terminal_reaches_all_and_is_said_once(folder: Path) -> None:
    """To the children too, who leave it to the command."""
    process, below = started_slowly(folder, "slow")
    for one in below:
        os.kill(one.pid, signal.SIGINT)
    _, error = interrupted(process, signal.SIGINT, below)
    assert error.splitlines() == ["afl simulate: interrupted"]


@pytest.mark.long
def test_no_run_outlives_a_command_that_is_killed(folder: Path) -> None:
    process, below = started_slowly(folder, "slow")
    process.kill()
    process.communicate()
    assert gone(below)


def test_a_simulation_says_that_it_is_not_private(simulate: Simulate, folder: Path) -> None:
    uplink = {"name": "rand-k", "ratio": 0.1, "bits": 16}
    algorithm = {"name": "afl-com", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1, "uplink": uplink}
    private = written(folder, "private", algorithm=algorithm, privacy={"secure_aggregation": True})
    code, out, _ = simulate(private, "--seeds", "1")
    assert code == ExitCode.OK
    assert "A simulation is not private: one process has the data and messages of all workers." in out
    assert "not private" not in simulate(written(folder, "br"), "--seeds", "1")[1]
