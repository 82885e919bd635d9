"""`afl simulate --ray`: on a cluster of two CPUs that is started here, and where there is none."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl.config import config_from_mapping, dump_config
from afl.errors import ExitCode
from afl_cli.main import main
from afl_lab.simulation import cluster
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import Outcome, outcome_of
from support.commands import interrupted, simulation, started_simulation

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'afl[ray]'")

pytestmark = pytest.mark.timeout(300)

DIGITS: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits", "batch_size": 8, "options": {"hidden": [8]}},
    "algorithm": {"name": "afl-br", "rounds": 6, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 3},
    "run": {"seed": 1},
}

TASKS = """
import neighbour

from afl.tasks.digits import Digits


class Own(Digits):
    pass


class Raising(Digits):
    def loss(self, model, batch):
        raise KeyError(neighbour.WORD)
"""


def written(folder: Path, name: str, task: str = "digits", rounds: int = 6) -> str:
    algorithm = {**DIGITS["algorithm"], "rounds": rounds}
    changes = {"task": {**DIGITS["task"], "name": task}, "algorithm": algorithm}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**DIGITS, **changes}))
    return f"{name}.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_tasks.py").write_text(TASKS)
    (tmp_path / "neighbour.py").write_text("WORD = 'no such key'\n")
    return tmp_path


def simulate(*arguments: str, folder: Path) -> tuple[int, str, str]:
    process = simulation(arguments, folder)
    out, error = process.communicate()
    return process.returncode, out, error


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["simulate", written(folder, "a"), "--ray"]) == ExitCode.CONFIG
    assert (
        capsys.readouterr().err
        == "afl simulate: the package ray is needed for --ray: pip install 'afl[ray]'\n"
    )


@needs_ray
def test_a_local_cluster_gives_what_processes_give(folder: Path) -> None:
    configs = [
        written(folder, "plain"),
        written(folder, "own", "own_tasks:Own"),
        written(folder, "raising", "own_tasks:Raising"),
    ]
    code, out, error = simulate(*configs, "--jobs", "2", "--ray", folder=folder)
    assert code == ExitCode.INTERNAL
    assert {"plain, seed 1: ok", "own, seed 1: ok", "raising, seed 1: failed"} <= set(out.splitlines())
    assert "afl simulate: raising, seed 1: Traceback" in error
    assert error.endswith("KeyError: 'no such key'\n")
    right = Job("right", config_from_mapping(DIGITS), folder / "right")
    assert outcome_of(right, lambda _: None).summary is not None
    for name in ("plain", "own"):
        found = folder / "simulations" / name / "seed-1"
        assert sorted(path.name for path in found.iterdir()) == sorted(
            path.name for path in right.directory.iterdir()
        )
        for model in ("final", "best", "random"):
            # The headers name the run; the tensors end the file: d = 8 (64 + 1) + 2 * 8 + 10 (8 + 1).
            size = 4 * (8 * 65 + 2 * 8 + 10 * 9)
            file = f"model-{model}.safetensors"
            assert (found / file).read_bytes()[-size:] == (right.directory / file).read_bytes()[-size:]

    # Again: what is complete is not made again.
    before = (folder / "simulations" / "own" / "seed-1" / "summary.json").read_bytes()
    code, out, _ = simulate(*configs[:2], "--ray", folder=folder)
    assert code == ExitCode.OK
    assert (folder / "simulations" / "own" / "seed-1" / "summary.json").read_bytes() == before


@needs_ray
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("ray://127.0.0.1:1", "Connection refused"),
        ("somewhere", "an address is HOST:PORT, ray://HOST:PORT or auto"),
    ],
)
def test_an_address_without_a_cluster(address: str, why: str, folder: Path) -> None:
    code, _, error = simulate(written(folder, "a"), "--ray", address, folder=folder)
    assert code == ExitCode.CONFIG
    (line,) = error.splitlines()
    assert line.startswith(f"afl simulate: there is no Ray cluster at {address}: ")
    assert why in line


@needs_ray
def test_a_run_that_fits_on_no_node(folder: Path) -> None:
    arguments = [written(folder, "a"), "--jobs", "1", "--set", "worker.threads=2", "--ray"]
    code, _, error = simulate(*arguments, folder=folder)
    assert code == ExitCode.CONFIG
    assert "a, seed 1: worker.threads is 2, and no node has more than 1 CPUs" in error


@needs_ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_local_cluster(number: signal.Signals, folder: Path) -> None:
    process, below = started_simulation(
        [written(folder, "long", rounds=10**6), "--jobs", "1", "--ray"],
        folder,
        lambda command: any(child.name().startswith("ray::simulate") for child in command.children(True)),
    )
    _, error = interrupted(process, number, below)
    assert error.splitlines()[-1] == "afl simulate: interrupted"


# What a node does and what is made of it, without Ray.


def test_a_node_gives_a_run_s_files_and_they_are_brought_home(tmp_path: Path) -> None:
    job = Job("a, seed 1", config_from_mapping(DIGITS), tmp_path / "a")
    files, error, code = cluster.simulate_there(
        dump_config(job.config), cluster.__version__, saves_models=True
    )
    assert (error, code) == ("", ExitCode.OK)
    outcome = cluster.brought_home(job, files, error, code)
    assert outcome.summary == json.loads(files["summary.json"])
    assert {path.name: path.read_bytes() for path in job.directory.iterdir()} == files


def test_a_node_of_another_version_refuses(tmp_path: Path) -> None:
    job = Job("a, seed 1", config_from_mapping(DIGITS), tmp_path / "a")
    answer = cluster.simulate_there(dump_config(job.config), "0.0.9", saves_models=True)
    outcome = cluster.brought_home(job, *answer)
    assert outcome == Outcome(
        job,
        None,
        f"this node has afl {cluster.__version__}, and the command afl 0.0.9; install one on all",
        ExitCode.CONFIG,
    )
    assert not job.directory.exists()


def test_a_node_s_failure_is_told(tmp_path: Path) -> None:
    task = {"name": "fashion-mnist", "options": {"data_dir": str(tmp_path)}}
    if os.path.isdir("/usr/share/datasets/fashion-mnist"):  # noqa: PTH112
        pytest.skip("this machine has Fashion-MNIST where Debian puts it")
    job = Job("a, seed 1", config_from_mapping({**DIGITS, "task": task}), tmp_path / "a")
    outcome = cluster.brought_home(
        job, *cluster.simulate_there(dump_config(job.config), cluster.__version__, saves_models=True)
    )
    assert outcome.code is ExitCode.DATA
    assert "Fashion-MNIST was not found" in outcome.error


def test_an_address_is_knocked_at() -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        cluster.knock("head-node")
    with pytest.raises(ConnectionRefusedError):
        cluster.knock("ray://127.0.0.1:1")
    cluster.knock("auto")
    cluster.knock(cluster.LOCAL)
