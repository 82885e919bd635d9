"""``afl run``: a federation by one command, stopped, gone on with, and with workers that die."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from afl_cli.main import main
from support.commands import ForkedPopen, interrupted

COMMAND = [sys.executable, "-m", "afl_cli", "run", "server.yaml"]

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 30,
        "eta_w": 0.1,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.5},
    },
    "evaluation": {"every": 10},
    "run": {"seed": 5},
    # Without checkpoints on the way: where the run directory goes, its being gone is what is noticed first.
    "server": {"http": "127.0.0.1:0", "checkpoint_every": 1_000_000},
}

TASK = '''
import os
from pathlib import Path

from afl.tasks.synthetic import Synthetic


class Mortal(Synthetic):
    """The first process that comes to its tenth gradient dies."""

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 10:
            try:
                Path("died").touch(exist_ok=False)  # of two that come here at once, one makes it
            except FileExistsError:
                pass
            else:
                os._exit(77)
        return super().loss(model, batch)


class Doomed(Synthetic):
    def loss(self, model, batch):
        os._exit(77)


class Wrong(Synthetic):
    def loss(self, model, batch):
        raise ValueError("a mistake of the user's")


class Infinite(Synthetic):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("inf")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "mine.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def afl_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """The command here; what it starts has imported PyTorch before."""

    def run(*arguments: str) -> Answer:
        with monkeypatch.context() as patched:
            patched.setattr("subprocess.Popen", ForkedPopen)
            code = main(["run", "server.yaml", *arguments])
        return Answer(code, *capsys.readouterr())

    return run


def summary(directory: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def test_a_run_from_its_first_process_to_its_last(folder: Path, afl_run: Callable[..., Answer]) -> None:
    arguments = ["--workers", "2", "--processes", "1"]
    answer = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "a server and 1 worker process for 2 workers" in answer.stdout
    # Thirty rounds may be over before the first look at them; the summary names the worst worker in any case.
    assert re.search(r"worst worker, last model\W+worker [01] at round 30", answer.stdout), answer.stdout
    assert "the run is complete" in answer.stdout
    directory = folder / "runs" / "server"
    assert summary(directory)["workers"] == 2
    assert {path.name for path in (directory / "logs").iterdir()} == {"server.log", "workers-0-1.log"}
    for path in (directory, *directory.rglob("*")):
        if directory / "logs" not in path.parents:
            # The configuration has the seed, the models what was trained.
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    again = afl_run("--workers", "2", "--processes", "1")
    assert again.returncode == 0
    assert "complete" in again.stderr
    other = afl_run("--processes", "1")
    assert other.returncode == 2
    assert "another configuration" in other.stderr
    assert "workers" in other.stderr


@pytest.mark.long
def test_compared_it_shows_plain_averaging_and_each_worker_alone(
    folder: Path, afl_run: Callable[..., Answer]
) -> None:
    assert afl_run("--workers", "2", "--processes", "1").returncode == 0
    # Of a run that is complete, too: it is not made again.
    answer = afl_run("--workers", "2", "--processes", "1", "--compare")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "the same data, seed, step size and batches; the others simulated" in answer.stdout
    for row in (
        "afl-com",
        "plain averaging",
        "each alone",
        "worker 0",
        "worker 1",
        "worst worker",
        "nothing",
    ):
        assert row in answer.stdout
    entries = (folder / "runs" / "server" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(entries[-1])
    assert f"{last['max_loss']:.5g} (worker {last['worst_worker']})" in answer.stdout


def test_the_task_and_the_run_are_beside_a_configuration_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = folder / "project"
    beside.mkdir()
    task = {**CONFIG["task"], "name": "mine:Found"}
    (beside / "server.yaml").write_text(yaml.safe_dump({**CONFIG, "workers": 1, "task": task}))
    found = """
from pathlib import Path

from afl.tasks.synthetic import Synthetic


class Found(Synthetic):
    def data(self, worker, context):
        assert Path("data.csv").read_text() == "1,2"
        return super().data(worker, context)
"""
    (beside / "mine.py").write_text(found)
    (beside / "data.csv").write_text("1,2")
    (folder / "mine.py").unlink()
    monkeypatch.setattr("subprocess.Popen", ForkedPopen)
    assert main(["run", "project/server.yaml"]) == 0
    shown = capsys.readouterr().out
    assert f"Working in {beside}: the task is there, beside the configuration." in shown
    assert Path.cwd() == folder
    assert f"Next:  afl inspect {beside}/runs/server" in shown
    assert summary(beside / "runs" / "server")["result"] == "ok"
    assert not (folder / "runs").exists()
    # A task in the working directory comes first, and the run is there.
    (folder / "mine.py").write_text(found)
    (folder / "data.csv").write_text("1,2")
    assert main(["run", "project/server.yaml"]) == 0
    assert "Working in" not in capsys.readouterr().out
    assert summary(folder / "runs" / "server")["result"] == "ok"


def test_a_worker_that_dies_is_started_again(folder: Path, afl_run: Callable[..., Answer]) -> None:
    answer = afl_run("--task", "mine.py:Mortal", "--workers", "2", "--processes", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert (folder / "died").exists()
    assert answer.stdout.count("ended with exit code 77") == 1
    assert "It is started again (1 of 3)." in answer.stdout
    assert summary(folder / "runs" / "server")["rounds"] == 30


@pytest.mark.parametrize(
    ("task", "code", "said"),
    [
        ("Doomed", 1, ["It is started again (1 of 1).", "no restart is left (--restarts)"]),
        ("Wrong", 2, ["a mistake of the user's", "that would happen again"]),
    ],
)
def test_a_worker_that_cannot_go_on_ends_the_run(
    folder: Path, afl_run: Callable[..., Answer], task: str, code: int, said: list[str]
) -> None:
    answer = afl_run("--task", f"mine:{task}", "--workers", "1", "--restarts", "1")
    assert answer.returncode == code, answer.stdout + answer.stderr
    for words in said:
        assert words in answer.stdout
    assert re.search(r"afl run: the worker 0 process ended with exit code \d+$", answer.stderr.strip())
    assert "\nOnce that is fixed, the same command resumes the run. If it needs" in answer.stdout
    assert "not evaluated" not in answer.stdout, "a table of nothing"
    assert summary(folder / "runs" / "server")["result"] == "interrupted"


@contextmanager
def long_run(after: int = 0) -> Iterator[subprocess.Popen[str]]:
    """One that only ends when it is told to; yielded once an evaluation after that round has been shown."""
    with subprocess.Popen(
        [*COMMAND, "--processes", "1", "--set", "algorithm.rounds=1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                evaluated = re.match(r"round (\d+) of \d+: worst worker", line)
                if evaluated and int(evaluated[1]) > after:
                    break
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.long
def test_ctrl_c_stops_it_and_the_same_command_goes_on(folder: Path) -> None:
    with long_run() as process:
        shown, errors = interrupted(process, signal.SIGINT)
    assert "Stopping when the open round is closed" in shown
    assert "The same command resumes the run." in shown
    first = summary(folder / "runs" / "server")
    assert first["result"] == "interrupted"
    assert "SIGINT" in first["reason"]
    assert "afl run: stopped by Ctrl-C" in errors
    with long_run(after=first["rounds"]) as process:
        _, errors = interrupted(process, signal.SIGTERM)
    assert "afl run: stopped by SIGTERM" in errors
    second = summary(folder / "runs" / "server")
    assert second["run_id"] == first["run_id"]
    assert second["rounds"] > first["rounds"]


def test_a_terminal_that_is_closed_leaves_no_process_behind(folder: Path) -> None:
    with long_run() as process:
        interrupted(process, signal.SIGHUP)
    assert summary(folder / "runs" / "server")["result"] == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["server.yaml", "--processes", "4"], "1 to the number of workers (3)"),
        (["server.yaml", "--workers", "0"], "workers"),
        (["server.yaml", "--restarts", "-1"], "--restarts -1"),
        (["server.yaml", "--task", "../mine.py:Doomed"], "not in or below the folder"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (
            ["server.yaml", "--set", "run.directory=server.yaml/run"],
            "run.directory: server.yaml/run cannot be written: it is a file, and must be a folder",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_numbers_that_are_not_finite_want_another_run(folder: Path, afl_run: Callable[..., Answer]) -> None:
    answer = afl_run("--task", "mine:Infinite", "--workers", "2", "--processes", "1")
    assert answer.returncode == 5, answer.stdout + answer.stderr
    assert "Another algorithm.eta_w makes another run: name a new run.directory with it." in answer.stdout
    assert re.fullmatch(
        r"afl run: worker [01], round 1: the loss is inf; lower algorithm.eta_w, or .*", answer.stderr.strip()
    )
    assert "started again" not in answer.stdout
    assert "ended with exit code" not in answer.stdout, "the server says it all"


def test_where_the_server_ends_the_run_no_worker_is_started_again(folder: Path) -> None:
    with long_run() as process:
        # Removed at once: the server may be writing.
        (folder / "runs" / "server").rename(folder / "elsewhere")
        shown, errors = process.communicate(timeout=120)
    assert process.returncode == 9, shown + errors
    directory = re.escape(str(folder / "runs" / "server"))
    gone = rf"afl run: .*the run directory {directory} is gone; restore it from a backup.*"
    assert re.fullmatch(gone, errors.strip())
    assert "started again" not in shown


def test_a_server_that_is_killed_is_named(folder: Path) -> None:
    with long_run() as process:
        (server,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "afl_server" in child.cmdline()
        ]
        server.kill()
        shown, errors = process.communicate(timeout=120)
    assert process.returncode == 1, shown + errors
    assert "afl run: the server process was ended by SIGKILL; its log (runs/server/logs/server.log)" in errors


PRIVATE = {
    **CONFIG,
    "algorithm": {**CONFIG["algorithm"], "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 16}},
    "privacy": {"secure_aggregation": True},
}


@pytest.mark.parametrize("workers", [2, 3])
def test_a_private_run_makes_the_key_that_its_workers_know_each_other_by(
    workers: int, folder: Path, afl_run: Callable[..., Answer]
) -> None:
    (folder / "server.yaml").write_text(yaml.safe_dump({**PRIVATE, "workers": workers}))
    answer = afl_run("--processes", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    keys = folder / "runs" / "server" / "peers"
    assert "Messages are masked; the workers know each other by a key of this command's" in answer.stdout
    assert {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()} == {
        "peers.txt": 0o600,
        "signing.key": 0o600,
    }
    logs = [path.read_text() for path in (folder / "runs" / "server" / "logs").glob("workers-*.log")]
    assert len(logs) == 2
    for log in logs:
        assert '"event": "keys_agreed"' in log
        assert '"event": "peers_unchecked"' not in log
