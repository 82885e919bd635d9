"""``evaluation.rank_by``: another metric chooses the worst worker and the best model, and is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import afl
from afl.config import config_from_mapping
from afl.errors import ConfigError
from afl.terminal import view
from afl.terminal.view import run_line
from afl_cli.main import main
from afl_lab.simulation.run import simulate
from support.served_run import serving


class Clinics(afl.Classification):
    """The worst of its AUC and spread are not those of its accuracy."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(worker)) + worker
        y = (x[:, 0] > worker + (worker == 0)).to(torch.int64)
        return afl.WorkerData(train=(x[:40], y[:40]), test=(x[40:], y[40:]))

    def metrics(self, model: nn.Module, batch: afl.Batch) -> dict[str, torch.Tensor]:
        weight = model.get_parameter("weight")
        return {
            **super().metrics(model, batch),
            "auc": 0.9 - 0.1 * batch[0].mean() + 0.01 * weight.sin().sum(),
            "spread": batch[0].mean() + weight.square().sum(),
        }


def simulated(folder: Path, **evaluation: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The evaluations' lines and the summary."""
    config = {
        "workers": 3,
        "task": {"name": f"{__name__}:Clinics", "batch_size": 8},
        "algorithm": {"name": "afl-br", "rounds": 12, "eta_w": 0.5, "eta_q": 0.1},
        "evaluation": {"every": 1, **evaluation},
        "run": {"seed": 3},
    }
    summary = simulate(config_from_mapping(config), folder)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "evaluation"], summary


@pytest.mark.parametrize(
    ("evaluation", "metric", "worst_of", "best_of"),
    [
        ({"rank_by": "auc"}, "auc", min, max),
        ({"rank_by": "spread", "better": "lower"}, "spread", max, min),
        ({"rank_by": "spread", "better": "higher"}, "spread", min, max),
        ({"rank_by": "loss"}, "loss", max, min),
    ],
)
def test_it_chooses_the_worst_worker_and_the_best_model(
    tmp_path: Path, evaluation: dict[str, str], metric: str, worst_of: Any, best_of: Any
) -> None:
    lines, summary = simulated(tmp_path / "run", **evaluation)
    worst = [worst_of(worker[metric] for worker in line["workers"]) for line in lines]
    for line, value in zip(lines, worst, strict=True):
        assert (line["rank_by"], line["worst_value"]) == (metric, value)
        assert line["workers"][line["worst_worker"]][metric] == value
        mean = sum(worker[metric] for worker in line["workers"]) / 3
        assert line["mean_value"] == pytest.approx(mean)
        assert line["worst_accuracy"] == min(worker["accuracy"] for worker in line["workers"])
    assert summary["best"]["worst_value"] == best_of(worst)
    with safe_open(tmp_path / "run" / "model-best.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert int(metadata["rounds_applied"]) == lines[worst.index(best_of(worst))]["round"]
    assert float(metadata["worst_value"]) == best_of(worst)


def test_it_is_shown_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(view, "NARROWEST", 140)
    run = tmp_path / "run"
    lines, _ = simulated(run, rank_by="auc")
    last, worst = lines[-1], f"{lines[-1]['worst_value']:.5g}"
    assert main(["inspect", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    place = f"at round 12, {last['rounds_since_restart']} after a restart of the weights"
    assert f"worker {last['worst_worker']} {place}: auc {worst} (mean over workers" in shown
    assert "its auc" in shown
    assert "its accuracy" in shown, "as one of the task's own metrics"
    assert main(["export", str(run), "--out", "model"]) == 0
    assert f"auc {worst}" in " ".join(capsys.readouterr().out.split())
    card = json.loads((tmp_path / "model" / "card.json").read_text())
    assert card["evaluation"]["rank_by"] == "auc"
    page = (tmp_path / "model" / "README.md").read_text()
    assert f"worst (auc of worker {last['worst_worker']}, largest loss)" in page


def test_the_page_and_prometheus_go_by_it(tmp_path: Path) -> None:
    with serving(tmp_path, more={"evaluation": {"rank_by": "auc"}}) as served:
        served.run.play(20)
        evaluation = served.run.records.last_evaluation
        assert evaluation is not None
        values = [metrics["auc"] for metrics in evaluation.metrics]
        state, table, history = (
            served.json(f"/data/{name}.json") for name in ("state", "workers", "history")
        )
        assert state["last"]["rank_by"] == table["rank_by"] == history["rank_by"] == "auc"
        assert state["last"]["worst_value"] == min(values)
        assert table["id"] == sorted(range(3), key=values.__getitem__)
        assert history["worst_value"][-1] == pytest.approx(min(values), rel=1e-4)
        worst = table["id"][0]
        prometheus = served.body("/metrics").decode()
        assert (
            f'afl_worker_value{{better="higher",metric="auc",worker="{worst}"}} {min(values)}' in prometheus
        )
        assert f'afl_worst_worker_value{{better="higher",metric="auc"}} {min(values)}' in prometheus
        assert run_line(served.json("/status")).startswith(
            f"round 20 of 2000: worst worker {worst}, auc {min(values):.5g} (mean"
        )


def test_a_metric_that_nobody_reports_is_said_and_the_accuracy_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, _ = simulated(tmp_path / "run", rank_by="f1")
    assert "rank_by" not in lines[0]
    assert all(line["workers"][line["worst_worker"]]["accuracy"] == line["worst_accuracy"] for line in lines)
    said = [record for record in caplog.records if getattr(record, "event", "") == "not_ranked"]
    (message,) = [record.getMessage() for record in said]
    there = "accuracy, auc, loss, spread"
    assert message == (
        f"no worker reports the metric f1 (evaluation.rank_by), so accuracy ranks; there is: {there}"
    )


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        (
            {"rank_by": "spread"},
            "evaluation.better found: nothing accepted: higher or lower: whether more spread is better",
        ),
        ({"better": "lower"}, "unless evaluation.rank_by names a metric"),
    ],
)
def test_what_cannot_be_ranked_by_is_refused(evaluation: dict[str, str], said: str) -> None:
    config = {"workers": 2, "task": {"name": "digits"}, "evaluation": evaluation}
    algorithm = {"name": "afl-br", "rounds": 1, "eta_w": 1.0, "eta_q": 1.0}
    with pytest.raises(ConfigError, match="evaluation") as caught:
        config_from_mapping({**config, "algorithm": algorithm})
    assert said in " ".join(str(caught.value).split())
