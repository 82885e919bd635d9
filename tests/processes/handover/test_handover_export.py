"""``afl export`` on real small runs, through the command."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import afl
from afl.config import config_digest, config_from_mapping, load_config
from afl.runs.durable import lock
from afl.runs.export.calls import Call
from afl.runs.export.onnx import write_program
from afl.runs.files import read_model
from afl.tasks.registry import load_task
from afl_cli.main import main
from afl_lab.simulation.run import simulate
from support.commands import run_command

HAS_ONNX = importlib.util.find_spec("onnx") is not None and importlib.util.find_spec("onnxscript") is not None

needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx and onnxscript (afl[onnx]) are not installed")

TASKS = '''
import torch
from torch import nn

import afl


class Sites(afl.Classification):
    """Two classes; each site's inputs are shifted."""

    buffers = "mean"

    def __init__(self, norm: bool = True) -> None:
        self.norm = norm

    def model(self) -> nn.Module:
        middle = nn.BatchNorm1d(5) if self.norm else nn.Identity()
        return nn.Sequential(nn.Linear(4, 5), middle, nn.ReLU(), nn.Linear(5, 2))

    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        generator = torch.Generator().manual_seed(worker)
        x = torch.randn(40, 4, generator=generator) + worker
        y = (x.sum(dim=1) > 4 * worker).to(torch.int64)
        return afl.WorkerData(train=(x[:32], y[:32]), test=(x[32:], y[32:]))


class Sums(afl.Task):
    """A regression."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(worker))
        return afl.WorkerData(train=(x[:32], x[:32].sum(dim=1)), test=(x[32:], x[32:].sum(dim=1)))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()


class Measured(Sums):
    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        error = model(batch[0]).squeeze(1) - batch[1]
        return {"loss": error.square().mean(), "mae": error.abs().mean()}


class LocalSites(Sites):
    buffers = "local"


class Away(Sites):
    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        raise afl.DataError("the sites keep their data")


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.randn(2)


class Random(Sites):
    def model(self) -> nn.Module:
        return Drawing()
'''

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "site_tasks:Sites", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 12,
        "eta_w": 0.2,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.5},
    },
    "evaluation": {"every": 4},
    "run": {"seed": 3, "description": "Made up.\nThree sites."},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the tasks' module, and a run in ``run``."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "site_tasks.py").write_text(TASKS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        simulate(config_from_mapping(CONFIG), folder / "run")
        yield folder
    sys.modules.pop("site_tasks", None)


def run_of(folder: Path, name: str, **changes: Any) -> Path:
    simulate(config_from_mapping({**CONFIG, **changes}), folder / name)
    return folder / name


def export(*arguments: str | Path) -> int:
    return main(["export", *map(str, arguments)])


def card_of(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    return card


def lines_of(run: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize("name", ["final", "random", "best"])
def test_the_card_says_what_the_run_wrote(folder: Path, tmp_path: Path, name: str) -> None:
    run, out = folder / "run", tmp_path / "out"
    assert export(run, "--model", name, "--out", out) == 0
    stored = run / f"model-{name}.safetensors"
    assert load_file(out / "model.safetensors").keys() == load_file(stored).keys()
    card = card_of(out)
    config = load_config(run / "config.yaml")
    assert (
        card["model"]["digest"] == read_model(out / "model.safetensors").digest == read_model(stored).digest
    )
    assert card["model"]["buffers"] == "mean"
    assert card["model"]["trained_parameters"] == 4 * 5 + 5 + 5 + 5 + 5 * 2 + 2
    assert card["data"] == {"description": "Made up.\nThree sites.", "workers": 3}
    assert card["run"]["state"] == "finished"
    assert card["run"]["config_digest"] == config_digest(config)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert card["run"]["id"] == summary["run_id"]
    assert card["algorithm"] == {
        "name": "afl-com",
        "rounds": 12,
        "eta_w": 0.2,
        "eta_q": 0.1,
        "block": 4,
        "uplink": {"name": "rand-k", "ratio": 0.5},
        "downlink": {"name": "rand-k", "ratio": 0.5},
    }
    round_ = card["model"]["round"]
    evaluations = [line for line in lines_of(run, "evaluation") if line["round"] <= round_]
    if evaluations:
        line = evaluations[-1]
        found = card["evaluation"]
        assert found["is_of_this_model"] == (line["round"] == round_)
        assert found["worst_accuracy"] == min(worker["accuracy"] for worker in line["workers"])
        for worker, metrics in enumerate(line["workers"]):
            assert found["workers"][worker] == {"worker": worker, "examples": 8, **metrics}
    else:
        assert card["evaluation"] is None
    if name != "random":
        sent, whole = card["communication"], 4 * card["model"]["trained_parameters"] * 3 * round_
        assert sent["uplink_bytes"] == evaluations[-1]["uplink_bytes"]
        assert sent["uncompressed_uplink_bytes"] == sent["uncompressed_downlink_bytes"] == whole
        both = sent["uplink_bytes"] + sent["downlink_bytes"]
        assert sent["share_of_uncompressed"] == pytest.approx(both / (2 * whole))


def test_the_page_is_the_card_in_words(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(folder / "run", "--out", out, "--description", "Other | words") == 0
    page, card = (out / "README.md").read_text(encoding="utf-8"), card_of(out)
    front = yaml.safe_load(page.split("---\n")[1])
    assert front["run_id"] == card["run"]["id"]
    assert front["digest"] == card["model"]["digest"]
    for expected in ("> Other | words", "rand-k (ratio 0.5)", "the run is complete, after 12 rounds"):
        assert expected in page
    for worker in card["evaluation"]["workers"]:
        row = f"| {worker['worker']} | 8 | {worker['loss']:.5g} | {worker['accuracy']:.5g} |"
        assert row in page
    assert f"accuracy | {card['evaluation']['worst_accuracy']:.4f}" in page
    assert "are the mean of the workers'" in page
    assert "The server saw gradients, losses and accuracies, and no examples." in page
    assert "| seed | `3` |" in page


@pytest.mark.parametrize(("name", "seen"), [("Sums", "and losses"), ("Measured", "losses and other metrics")])
def test_the_page_of_a_task_without_accuracy_speaks_of_none(
    folder: Path, tmp_path: Path, name: str, seen: str
) -> None:
    run = run_of(folder, name, task={"name": f"site_tasks:{name}", "batch_size": 8})
    assert export(run, "--out", tmp_path / "out") == 0
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"The server saw gradients,? {seen}, and no examples\.", page)
    assert "accurac" not in page


def test_a_model_that_was_not_evaluated_is_said_to_be_so(folder: Path, tmp_path: Path) -> None:
    """The random model of this seed lies between two evaluations, or before the first."""
    out = tmp_path / "out"
    assert export(folder / "run", "--model", "random", "--out", out) == 0
    card, page = card_of(out), (out / "README.md").read_text(encoding="utf-8")
    assert card["model"]["round"] % 4, "choose another seed"
    if card["evaluation"] is None:
        assert "No evaluation was made before" in page
    else:
        assert not card["evaluation"]["is_of_this_model"]
        assert "**Not of this model**" in page


def test_the_page_s_own_lines_load_the_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(folder / "run", "--out", out) == 0
    page = (out / "README.md").read_text(encoding="utf-8")
    (block,) = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert block == 'from site_tasks import Sites\nimport afl\n\nmodel = afl.load_model("PATH", Sites)\n'
    found: dict[str, Any] = {}
    exec(block.replace("PATH", str(out)), found)
    task = load_task("site_tasks:Sites", {}, allow_path=True)
    context = afl.TaskContext(3, afl.SharedRandomness.from_int(3))
    evaluation = card_of(out)["evaluation"]
    assert evaluation["is_of_this_model"]
    for worker in range(3):
        with torch.no_grad():
            metrics = task.metrics(found["model"], task.data(worker, context).test)
        assert metrics["accuracy"].item() == evaluation["workers"][worker]["accuracy"]
        assert metrics["loss"].item() == pytest.approx(evaluation["workers"][worker]["loss"], rel=1e-6)


def test_nothing_is_overwritten_without_force(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(folder / "run", "--out", out) == 0
    (out / "mine.txt").write_text("x")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert export(folder / "run", "--out", out, "--model", "best") == 2
    assert "holds an exported model; name another folder, or --force" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert export(folder / "run", "--out", out, "--model", "best", "--force") == 0
    assert card_of(out)["model"]["name"] == "best"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x")
    assert export(folder / "run", "--out", foreign, "--force") == 2
    assert "not written by afl export" in capsys.readouterr().err
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_directory_that_is_no_run_or_lacks_the_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, "--out", tmp_path / "out") == 2
    assert "holds no run (no config.yaml with metrics.jsonl)" in capsys.readouterr().err
    going = tmp_path / "going"
    going.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "model-best.safetensors"):
        (going / name).write_bytes((folder / "run" / name).read_bytes())
    assert export(going, "--out", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert "there is no final model; there is: --model best" in shown
    assert "its process died" in shown
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    run = tmp_path / "run"
    run.mkdir()
    for file in (folder / "run").iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    return run


def changed(file: Path, event: str, **values: Any) -> str:
    """The lines of the metrics, with other values in the first one of this event; ``...`` takes one out."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    first = next(line for line in lines if line["event"] == event)
    for key, value in values.items():
        del first[key]
        if value is not ...:
            first[key] = value
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("event", "values", "said"),
    [
        ("round", {"round": "x"}, "round: Input should be a valid integer"),
        ("round", {"uplink_bytes": None}, "uplink_bytes: Input should be a valid integer"),
        ("evaluation", {"worst_worker": ...}, "worst_worker: Field required"),
        ("evaluation", {"workers": None}, "workers: Input should be a valid list"),
    ],
)
def test_lines_of_the_metrics_that_are_damaged_are_named(
    run: Path, capsys: pytest.CaptureFixture[str], event: str, values: dict[str, Any], said: str
) -> None:
    file = run / "metrics.jsonl"
    file.write_text(changed(file, event, **values), encoding="utf-8")
    assert export(run, "--out", run.parent / "out") == 7
    shown = capsys.readouterr().err
    assert f"{file}:" in shown
    assert said in shown
    assert not (run.parent / "out").exists()


def test_metrics_without_rounds_a_summary_and_a_model_that_are_damaged_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "out"
    whole = {file.name: file.read_bytes() for file in run.iterdir()}
    for name, damage, said in (
        ("metrics.jsonl", b"", "has no line of a round up to"),
        ("summary.json", b'{"result": [], "reason": 1, "rounds": null}', "result: Input should be a valid"),
        ("model-final.safetensors", whole["model-final.safetensors"][:-9], "a damaged one"),
    ):
        (run / name).write_bytes(damage)
        assert export(run, "--out", out) == 7
        assert f"{run / name}" in (shown := capsys.readouterr().err)
        assert said in shown
        (run / name).write_bytes(whole[name])
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    assert export(run, "--out", out) == 7
    assert f"{run / 'summary.json'} cannot be read: Is a directory" in capsys.readouterr().err


def test_the_states_of_a_run(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for file in (folder / "run").iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    (run / "summary.json").unlink()

    def state() -> str:
        assert export(run, "--out", tmp_path / "out", "--force") == 0
        return str(card_of(tmp_path / "out")["run"]["state"])

    assert state() == "unfinished"
    (run / "state").mkdir()
    assert state() == "unfinished"
    held = lock(run / "state" / "lock", "the run")
    command = ("-m", "afl_cli", "export", str(run), "--out", str(tmp_path / "out"), "--force")
    assert run_command(*command, folder=folder).returncode == 0
    assert card_of(tmp_path / "out")["run"]["state"] == "running"
    os.close(held)
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    for result, expected in (("interrupted", "stopped"), ("diverged", "aborted"), ("ok", "finished")):
        text = json.dumps({**summary, "result": result, "reason": "because"})
        (run / "summary.json").write_text(text, encoding="utf-8")
        assert state() == expected
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "round", "rou')
    assert state() == "finished"


def test_torchscript_is_refused_with_what_to_use(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(folder / "run", "--out", tmp_path / "out", "--torchscript") == 2
    assert "no longer writes it; use --onnx" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_onnx
def test_onnx_answers_as_the_module(folder: Path, tmp_path: Path) -> None:
    reference = importlib.import_module("onnx.reference")
    out = tmp_path / "out"
    arguments = [folder / "run", "--out", out, "--onnx", "--task", "site_tasks:Sites", "--input", "2x4"]
    assert export(*arguments) == 0
    (program,) = card_of(out)["programs"]
    assert program["any_batch"]
    evaluator = reference.ReferenceEvaluator(str(out / program["file"]))
    inputs = torch.randn(7, 4)
    (found,) = evaluator.run(None, {evaluator.input_names[0]: inputs.numpy()})
    task = load_task("site_tasks:Sites", {}, allow_path=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), afl.load_model(out, task)(inputs))


def test_what_a_program_needs_is_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def refused(*arguments: str) -> str:
        assert export(folder / "run", "--out", out, *arguments) == 2
        assert not out.exists(), "a folder is written whole or not at all"
        return capsys.readouterr().err

    assert "add --task site_tasks:Sites" in refused("--onnx")
    away = refused("--onnx", "--task", "site_tasks:Away")
    assert "worker 0's data is not here (the sites keep their data)" in away
    assert "--input 2x1x28x28" in away
    assert "no batch of at least two" in refused("--onnx", "--task", "site_tasks:Away", "--input", "1x4")
    wrong = refused("--onnx", "--task", "site_tasks:Away", "--input", "2x3")
    assert "the model does not take a batch of shape [2, 3] and type float32" in wrong
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "onnx.reference", None)
    onnx = refused("--onnx", "--task", "site_tasks:Sites")
    assert "the package onnx is needed to write ONNX: pip install 'afl[onnx]'" in onnx


def test_statistics_that_stayed_at_the_workers_make_no_program(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(folder, "local", task={"name": "site_tasks:LocalSites", "batch_size": 8})
    out = tmp_path / "out"
    arguments = [run, "--out", out, "--onnx", "--task", "site_tasks:LocalSites"]
    assert export(*arguments) == 2
    assert 'stayed at the workers (buffers = "local" in the task)' in capsys.readouterr().err
    assert export(run, "--out", out) == 0
    assert card_of(out)["model"]["buffers"] == "local"
    assert "stayed at the workers and are not in the file" in (out / "README.md").read_text(encoding="utf-8")


@needs_onnx
def test_a_program_that_answers_otherwise_is_not_handed_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(folder, "random", task={"name": "site_tasks:Random", "batch_size": 8})
    out = tmp_path / "out"
    assert export(run, "--out", out, "--onnx", "--task", "site_tasks:Random") == 2
    assert "differs from the module's by" in capsys.readouterr().err
    assert not out.exists()


@needs_onnx
def test_modules_with_several_outputs_and_one_that_cannot_be_exported(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": x * 2, "b": x.sum(dim=1)}

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x.sum(dim=1)

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    for module in (Pair(), Two()):
        program = write_program(module.eval(), Call((torch.ones(2, 3),)), tmp_path)
        assert program["largest_difference"] == 0.0
    with pytest.raises(afl.AflError, match=r"torch's exporter refuses Branching: .*; --predict, which"):
        write_program(Branching().eval(), Call((torch.ones(2, 3),)), tmp_path)
