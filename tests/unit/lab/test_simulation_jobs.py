"""Which runs `afl simulate` makes, and which it finds made."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from afl.config import config_from_mapping
from afl.errors import ADVICE_NON_FINITE, ConfigError, ExitCode, StorageError
from afl.runs import durable
from afl_cli.simulate import seeds_of
from afl_lab.simulation.command import where_written
from afl_lab.simulation.jobs import Job, plan
from afl_lab.simulation.pool import outcome_of
from support.process import KIT

DIGITS: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits", "batch_size": 8, "options": {"hidden": [6]}},
    "algorithm": {"name": "afl-br", "rounds": 6, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 4},
}


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("7", [7]),
        ("1-5", [1, 2, 3, 4, 5]),
        ("1,4,9", [1, 4, 9]),
        ("9, 1-3 ,5", [9, 1, 2, 3, 5]),
        ("4-4", [4]),
        (str(2**128 - 1), [2**128 - 1]),
    ],
)
def test_seeds_as_a_person_writes_them(text: str, seeds: list[int]) -> None:
    assert seeds_of(text) == seeds


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "'' is neither a seed nor a range"),
        ("1,,2", "'' is neither"),
        ("a", "'a' is neither"),
        ("-1", "'-1' is neither"),
        ("1.5", "'1.5' is neither"),
        ("5-1", "'5-1' is not a range"),
        ("1-20000", "at most 10,000"),
        ("1-3,2", "names a seed twice"),
    ],
)
def test_what_are_no_seeds(text: str, what: str) -> None:
    with pytest.raises(ArgumentTypeError, match=what):
        seeds_of(text)


def written(path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    path.write_text(yaml.safe_dump({**DIGITS, **(changes or {})}))
    return path


def test_a_job_for_each_configuration_and_seed(tmp_path: Path) -> None:
    configs = [written(tmp_path / "near.yaml"), written(tmp_path / "far.yml", {"run": {"seed": 30}})]
    jobs = plan(configs, [5, 2], tmp_path / "out", ["algorithm.rounds=9"])
    assert [job.name for job in jobs] == ["near, seed 5", "near, seed 2", "far, seed 5", "far, seed 2"]
    assert [job.directory.relative_to(tmp_path / "out").as_posix() for job in jobs] == [
        "near/seed-5",
        "near/seed-2",
        "far/seed-5",
        "far/seed-2",
    ]
    assert [job.config.run.seed for job in jobs] == [5, 2, 5, 2]
    assert {job.config.algorithm.rounds for job in jobs} == {9}
    assert {job.config.worker.batch_oracles for job in jobs} == {False}
    assert all(job.config.worker.batch_oracles for job in plan(configs, [1], tmp_path, batched=True))


def test_without_seeds_the_configuration_s_own_is_taken(tmp_path: Path) -> None:
    (job,) = plan([written(tmp_path / "own.yaml", {"run": {"seed": 30}})], [], tmp_path)
    assert (job.name, job.config.run.seed, job.directory) == ("own, seed 30", 30, tmp_path / "own/seed-30")


def test_a_seed_must_come_from_somewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: run\.seed is not given; give it there, or --seeds"):
        plan([written(tmp_path / "a.yaml")], [], tmp_path)


def test_two_configurations_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    configs = [written(tmp_path / "a.yaml"), written(tmp_path / "other" / "a.yaml")]
    with pytest.raises(ConfigError, match="two configurations are called a; each needs a file name"):
        plan(configs, [1], tmp_path)


# What is found in a run's directory.


def job_of(directory: Path, changes: Mapping[str, Any] | None = None, *, saves_models: bool = True) -> Job:
    config = config_from_mapping({**DIGITS, "run": {"seed": 3}, **(changes or {})})
    return Job("a, seed 3", config, directory, saves_models)


def simulated(job: Job) -> dict[str, Any]:
    outcome = outcome_of(job, lambda _: None)
    assert outcome.summary is not None, outcome.error
    assert (outcome.error, outcome.code) == ("", ExitCode.OK)
    return outcome.summary


def lines(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def test_a_run_that_is_complete_is_not_made_again(tmp_path: Path) -> None:
    job = job_of(tmp_path / "run")
    assert job.summary() is None
    summary = simulated(job)
    assert summary["result"] == "ok"
    assert summary["rounds"] == 6
    assert summary["models"] == [
        "model-best.safetensors",
        "model-final.safetensors",
        "model-random.safetensors",
    ]
    assert [line["round"] for line in lines(job.directory) if line["event"] == "round"] == [1, 2, 3, 4, 5, 6]
    assert [line["round"] for line in lines(job.directory) if line["event"] == "evaluation"] == [4, 6]
    assert job.summary() == summary
    before = {path: path.stat().st_mtime_ns for path in job.directory.iterdir()}
    assert simulated(job) == summary
    assert {path: path.stat().st_mtime_ns for path in job.directory.iterdir()} == before


@pytest.mark.parametrize("left", ["half of the metrics", "all but the summary", "an aborted summary"])
def test_an_interrupted_run_is_made_again(left: str, tmp_path: Path) -> None:
    whole = job_of(tmp_path / "whole")
    summary = simulated(whole)
    job = job_of(tmp_path / "run")
    simulated(job)
    metrics = job.directory / "metrics.jsonl"
    if left == "an aborted summary":
        (job.directory / "summary.json").write_text(json.dumps({**summary, "result": "aborted"}))
    else:
        (job.directory / "summary.json").unlink()
    if left == "half of the metrics":
        metrics.write_text(metrics.read_text()[: len(metrics.read_text()) // 2])
        (job.directory / "model-best.safetensors").unlink()
    assert job.summary() is None
    again = simulated(job)
    assert again["communication"] == summary["communication"]
    assert lines(job.directory) == lines(whole.directory)
    for name in summary["models"]:
        found, right = load_file(job.directory / name), load_file(whole.directory / name)
        assert {key: value.tobytes() for key, value in found.items()} == {
            key: value.tobytes() for key, value in right.items()
        }


def test_a_directory_of_another_configuration_is_refused(tmp_path: Path) -> None:
    simulated(job_of(tmp_path / "run"))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    other = job_of(tmp_path / "run", {"evaluation": {"every": 5}})
    with pytest.raises(ConfigError, match=r"run holds a run of another configuration .*name another"):
        other.summary()
    outcome = outcome_of(other, lambda _: None)
    assert outcome.summary is None
    assert outcome.code is ExitCode.CONFIG
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_without_models_is_enough_only_where_none_are_wanted(tmp_path: Path) -> None:
    bare = job_of(tmp_path / "run", saves_models=False)
    assert simulated(bare)["models"] == []
    assert sorted(path.name for path in bare.directory.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "versions.json",
    ]
    assert bare.summary() is not None
    full = job_of(tmp_path / "run")
    assert full.summary() is None
    assert len(simulated(full)["models"]) == 3
    assert len(simulated(bare)["models"]) == 3


def test_a_directory_belongs_to_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "LOCK_PATIENCE_S", 0.0)
    job = job_of(tmp_path / "run")
    with job.claimed():
        with (
            pytest.raises(StorageError, match=r"another process is simulating .*run"),
            job.claimed(),
        ):
            pass
        outcome = outcome_of(job, lambda _: None)
    assert (outcome.summary, outcome.code) == (None, ExitCode.STORAGE)
    simulated(job)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = outcome_of(job_of(tmp_path / "file" / "run"), lambda _: None)
    assert outcome.code is ExitCode.STORAGE
    assert re.fullmatch(r".*file/run cannot be made: it is a file, .*; name another .*--out", outcome.error)


# Runs that end otherwise.


def test_a_run_that_diverges_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)
    # The fifth minibatch of two workers is worker 0's in round 3.
    changes = {"workers": 2, "task": {"name": "tests_tasks:Diverging", "batch_size": 4}}
    job = job_of(tmp_path / "run", changes)
    summary = simulated(job)
    assert summary["result"] == "diverged"
    assert summary["reason"] == f"worker 0, round 3: the loss is nan; {ADVICE_NON_FINITE}"
    assert summary["rounds"] == 2
    assert [line["round"] for line in lines(job.directory)] == [1, 2]
    assert "model-final.safetensors" in summary["models"]
    assert simulated(job) == summary


@pytest.mark.parametrize(
    ("task", "code", "message"),
    [
        ("Troubled", ExitCode.DATA, "worker 1 has no training examples"),
        ("Frozen", ExitCode.CONFIG, "has no trainable parameter"),
        ("NoSuchTask", ExitCode.CONFIG, "tests_tasks has no NoSuchTask"),
    ],
)
def test_a_task_that_cannot_be_trained(
    task: str, code: ExitCode, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(KIT)
    job = job_of(tmp_path / "run", {"task": {"name": f"tests_tasks:{task}", "batch_size": 2}})
    outcome = outcome_of(job, lambda _: None)
    assert outcome.summary is None
    assert outcome.code is code
    assert message in outcome.error
    assert "Traceback" not in outcome.error


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (RuntimeError("no luck today"), ExitCode.CONFIG, "the task's code "),
        (SystemExit(3), ExitCode.CONFIG, "the task's code "),
        (MemoryError(), ExitCode.SHORTAGE, "out of memory: MemoryError ("),
    ],
)
def test_whatever_a_task_s_code_raises_is_an_outcome(
    raised: BaseException, code: ExitCode, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from afl.tasks.digits import Digits  # noqa: PLC0415

    def loss(*_: object) -> object:
        raise raised

    monkeypatch.setattr(Digits, "loss", loss)
    job = job_of(tmp_path / "run")
    outcome = outcome_of(job, lambda _: None)
    assert outcome.summary is None
    assert outcome.code is code
    first, *others = outcome.error.splitlines()
    assert first.startswith(f"worker 0, round 1: {said}")
    assert "test_simulation_jobs.py:" in first, "the line is named"
    if isinstance(raised, SystemExit | MemoryError):
        assert "ends the program" in first or code is ExitCode.SHORTAGE
        assert not others
    else:
        assert f"raised {type(raised).__name__}" in first
        assert others[0].startswith("Traceback")
        assert "in loss" in others[1], "it begins at the task's own code"
        assert others[-1].startswith(type(raised).__name__)
    monkeypatch.undo()
    assert job.summary() is None
    assert simulated(job)["result"] == "ok"


def test_where_runs_are_is_said_and_that_it_is_not_where_a_server_s_would_be(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump({**DIGITS, "run": {"directory": "runs/first"}}), encoding="utf-8")
    jobs = plan([path], [3], Path("out"))
    assert where_written(jobs, Path("out")) == (
        "written: out/plain/seed-3 (--out names another folder; run.directory (runs/first) is for a server's"
        " run)"
    )
    path.write_text(yaml.safe_dump(DIGITS), encoding="utf-8")
    assert where_written(plan([path], [1, 2], Path("out")), Path("out")) == (
        "written: 2 runs below out, such as out/plain/seed-1 (--out names another folder)"
    )
