"""What a run is measured by, on a problem whose end is known in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afl import Task, TaskContext, WorkerData
from afl.config import config_from_mapping
from afl.runs.files import METRICS_FILE, metrics_entries, of_event
from afl.runs.metrics import Ranked
from afl.tasks.base import Batch
from afl.terminal.view import make_console
from afl_lab.simulation.baselines import Standing, baselines, compare, comparison_table
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import outcome_of

TARGETS = (-1.0, 0.0, 4.0)
ROUNDS, ETA = 5, 0.125


class Targets(Task):
    """Worker i wants w = TARGETS[i]; its loss is (w - TARGETS[i])^2 / 2, and w begins at 0."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        assert context.workers == len(TARGETS)
        examples = torch.full((8, 1), TARGETS[worker])
        return WorkerData((examples,), (examples,))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (targets,) = batch
        return ((model(torch.ones_like(targets)) - targets) ** 2 / 2).mean()


def config(**changes: Any) -> Any:
    values = {
        "workers": len(TARGETS),
        "task": {"name": "test_simulation_baselines:Targets", "batch_size": 4},
        "algorithm": {
            "name": "afl-com",
            "rounds": ROUNDS,
            "eta_w": ETA,
            "eta_q": 0.5,
            "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 8},
        },
        "run": {"seed": 3},
    }
    return config_from_mapping({**values, **changes})


def test_each_is_what_it_says(tmp_path: Path) -> None:
    """Gradient steps of ETA on (w - c)^2 / 2 from 0 leave (1 - ETA)^T c, where c is the mean or one's own."""
    averaging, *alone = baselines(config(), tmp_path, rounds=ROUNDS, alone=True)
    assert [job.name for job in alone] == ["worker 0 alone", "worker 1 alone", "worker 2 alone"]
    left = (1 - ETA) ** ROUNDS
    reached = (1 - left) * sum(TARGETS) / len(TARGETS)
    losses = [_losses(job) for job in (averaging, *alone)]
    assert losses[0] == pytest.approx([(reached - target) ** 2 / 2 for target in TARGETS], rel=1e-5)
    assert losses[1:] == [pytest.approx([(left * target) ** 2 / 2], rel=1e-5) for target in TARGETS]


def _losses(job: Job) -> list[float]:
    outcome = outcome_of(job, lambda _: None)
    assert outcome.summary is not None, outcome.error
    entries, _ = metrics_entries(job.directory / METRICS_FILE)
    return [worker["loss"] for worker in of_event(entries, "evaluation")[-1]["workers"]]


def test_local_steps_and_the_seed_are_the_run_s_and_masks_are_not() -> None:
    drfa = {"name": "drfa", "rounds": 6, "eta_w": 0.1, "eta_q": 0.1, "local_steps": 3}
    for job in baselines(config(algorithm=drfa), Path("nowhere"), rounds=6, alone=True):
        algorithm = job.config.algorithm
        assert (algorithm.name, algorithm.local_steps, algorithm.rounds) == ("fedavg", 3, 6)
        assert job.config.run.seed == 3
    masked = {"secure_aggregation": True, "losses": "hidden"}
    (job,) = baselines(config(privacy=masked), Path("nowhere"), rounds=6, alone=False)
    assert not job.config.privacy.secure_aggregation
    batched = config(worker={"batch_oracles": True})
    assert baselines(batched, Path("nowhere"), rounds=6, alone=False)[0].config.worker.batch_oracles


def test_what_ranks_the_run_ranks_the_others() -> None:
    ranking = config(evaluation={"every": 2, "rank_by": "auc", "better": "higher"}, sites=["a", "b", "c"])
    for job in baselines(ranking, Path("nowhere"), rounds=4, alone=True):
        assert (job.config.evaluation.rank_by, job.config.algorithm.rounds) == ("auc", 4)


def test_what_averaging_cannot_take_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    algorithm = {"name": "afl-br", "rounds": ROUNDS, "eta_w": ETA, "eta_q": 0.5, "weight_decay": 0.01}
    run = config(algorithm={**algorithm, "clip_norm": 1.0, "optimizer": {"name": "momentum"}})
    (job,) = baselines(run, Path("nowhere"), rounds=ROUNDS, alone=False)
    assert job.config.algorithm.weight_decay == 0.01
    assert outcome_of(Job("own", run, tmp_path), lambda _: None).summary is not None
    assert compare(make_console(), tmp_path, "afl-br", alone=False) == 0
    assert "plain steps of this eta_w, without optimizer and clip_norm:" in capsys.readouterr().out


def test_all_stand_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Job("own", config(), tmp_path)
    assert outcome_of(own, lambda _: None).summary is not None
    console = make_console()
    assert compare(console, tmp_path, "afl-com", alone=False) == 0
    shown = capsys.readouterr().out
    assert f"Test loss after {ROUNDS} rounds (the same data, seed, step size and batches" in shown
    rows = _rows(shown)
    reached = (1 - (1 - ETA) ** ROUNDS) * sum(TARGETS) / len(TARGETS)
    assert rows["worst worker"][1] == f"{(reached - 4) ** 2 / 2:.5g} (worker 2)"
    assert rows.keys() == {"worst worker", "mean", "sent"}


def _rows(shown: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    return {name: values for name, *values in cells}


def test_what_is_hidden_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    masked = Standing("own", {}, 0.5, 1000)
    alone = Standing("each alone", {worker: 0.25 + worker / 100 for worker in range(30)}, 0.4, 0)
    by = Ranked("accuracy", True, None, None)
    make_console().print(comparison_table([masked, alone], by, {19: "north"}, by_site=True))
    rows = _rows(capsys.readouterr().out)
    assert rows["worst worker"] == ["hidden", "0.2500 (worker 0)"]
    assert rows["mean"] == ["0.5000", "0.4000"]
    assert rows["sent"] == ["1.00 kB", "nothing"]
    assert rows["worker 19 (north)"] == ["hidden", "0.4400"]
    assert "worker 20" not in rows
    assert "(10 served better)" in rows
