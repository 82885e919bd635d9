"""A loss that grows and stays finite, by the real commands: docs/mistakes.md says what is seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl.errors import ExitCode
from afl_cli.main import main
from afl_cli.new import project_files
from support import Federation

PAGE = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text(encoding="utf-8")

TASK = """
import afl
import torch
from torch import nn


class Sums(afl.Task):
    def model(self):
        return nn.Linear(4, 1)

    def data(self, worker, context):
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(worker))
        y = x.sum(dim=1)
        return afl.WorkerData(train=(x[:40], y[:40]), test=(x[40:], y[40:]))

    def loss(self, model, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def metrics(self, model, batch):
        error = model(batch[0]).squeeze(1) - batch[1]
        return {"loss": error.square().mean(), "mae": error.abs().mean()}
"""

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "sums:Sums", "batch_size": 20},
    "algorithm": {"name": "afl-br", "rounds": 20, "eta_w": 1.5, "eta_q": 0.1},
    "evaluation": {"every": 4},
    "run": {"seed": 11},
}
"""Each step leads past the least loss, to about twice the distance from it."""


def quoted(number: int) -> str:
    """A quotation of the page's entry as a pattern: any text in place of what is in ``<>``."""
    (entry,) = re.findall(r"^\*\*The loss grows and stays finite\.\*\*.*?\n(?=\n|\Z)", PAGE, re.M | re.S)
    texts = [text for text in re.findall(r"`([^`]+)`", entry) if " <" in text]
    parts = re.split(r"<[^>]+>", " ".join(texts[number].split()))
    return ".+?".join(map(re.escape, parts))


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``afl inspect`` says, without its tables' lines and breaks."""
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def run_of(folder: Path, code: ExitCode, **changes: Any) -> Federation:
    folder.mkdir(exist_ok=True)
    (folder / "sums.py").write_text(TASK, encoding="utf-8")
    with Federation({**CONFIG, **changes}, folder) as federation:
        for ids in ("0", "1-2"):
            federation.start(ids, "--task", "sums:Sums")
        federation.server.expect(code)
    return federation


def test_a_run_that_is_complete_warns_of_it_and_shows_losses_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = run_of(tmp_path / "grown", ExitCode.OK)
    directory, summary = federation.directory, federation.summary()
    evaluations, (first_round, *_) = federation.records("evaluation"), federation.records("round")
    assert summary["result"] == "ok"
    assert summary["first_round"]["loss_max"] == first_round["loss_max"] < 20
    assert [summary[name]["round"] for name in ("first", "last")] == [4, 20]
    assert summary["last"]["max_loss"] > 1e6
    for file in ("summary.json", "metrics.jsonl"):
        assert re.search(quoted(0), inspected(directory / file, capsys))

    last = evaluations[-1]
    entries, worst = [entry["mae"] for entry in last["workers"]], last["worst_worker"]
    said = f"mae {entries[worst]:.5g} (mean {sum(entries) / 3:.5g})"
    shown = inspected(directory, capsys)
    assert said in shown
    assert f" 20 {worst} {entries[worst]:.5g} {sum(entries) / 3:.5g} " in shown
    assert f"model-final.safetensors 20 loss {last['max_loss']:.5g} " in shown
    assert "seed 11 " in shown

    ready = [line["message"] for line in federation.server.events if line.get("event") == "worker_ready"]
    assert {message.partition(" at ")[0] for message in ready} == {"worker 0", "workers 1-2"}


def test_a_project_that_afl_new_writes_has_it_end_the_run(tmp_path: Path) -> None:
    faults = yaml.safe_load(project_files("sums")["server.yaml"])["faults"]
    federation = run_of(tmp_path / "ended", ExitCode.DIVERGED, faults=faults)
    reason = federation.summary()["reason"]
    assert re.match(quoted(1), reason)
    assert reason.endswith("or raise max_loss if such a loss is right")


def test_a_run_that_goes_well_warns_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    well = {**CONFIG["algorithm"], "eta_w": 0.1}
    faults = yaml.safe_load(project_files("sums")["server.yaml"])["faults"]
    federation = run_of(tmp_path / "well", ExitCode.OK, algorithm=well, faults=faults)
    assert "warning" not in inspected(federation.directory, capsys)
