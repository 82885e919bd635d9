"""``afl check``: tasks that are wrong in one way each, and what is said of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from afl.config import load_config
from afl.core.randomness import SharedRandomness
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl_cli.main import main
from afl_lab.check import Finding, Level, Report, check_config
from afl_lab.check.averaging import no_means, parts_of
from afl_lab.check.checker import configured
from afl_lab.check.integers import check_integers
from afl_lab.simulation.run import simulate

MODULE = '''
import zlib

import numpy as np
import torch
from torch import nn

import afl

TWO = "two"


def examples(worker, count=100, *, seed=0):
    rng = np.random.default_rng([seed, worker])
    x = torch.tensor(rng.normal(size=(count, 4)), dtype=torch.float32)
    return x, (x[:, 0] > 0).long()


def divided(x, y):
    return afl.WorkerData(train=(x[:80], y[:80]), test=(x[80:], y[80:]))


class Good(afl.Classification):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def data(self, worker, context):
        return divided(*examples(worker))


class Wide(Good):
    def model(self):
        return nn.Sequential(nn.Linear(4, 800), nn.ReLU(), nn.Linear(800, 2))


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))
        self.b = nn.Parameter(torch.zeros(8, 2))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(x @ (self.b @ self.a).T + x.repeat(1, 2)))


class Adapted(Good):
    def model(self):
        return LowRank()


class ModelRaises(Good):
    def model(self):
        return nn.Linear(4, TWO)


class NormWithoutPolicy(Good):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class DataRaises(Good):
    def data(self, worker, context):
        return open(f"/nowhere/{worker}")


class DataMissing(Good):
    def data(self, worker, context):
        raise afl.DataError("site-0.npz is missing")


class NoWorkerData(Good):
    def data(self, worker, context):
        return examples(worker)


class Arrays(Good):
    def data(self, worker, context):
        x, y = examples(worker)
        return afl.WorkerData(train=(x.numpy(), y.numpy()), test=(x, y))


class Ragged(Good):
    def data(self, worker, context):
        x, y = examples(worker)
        return afl.WorkerData(train=(x, y[:50]), test=(x, y))


class NothingToTest(Good):
    def data(self, worker, context):
        x, y = examples(worker)
        return afl.WorkerData(train=(x, y), test=(x[:0], y[:0]))


class TooFew(Good):
    def data(self, worker, context):
        x, y = examples(worker)
        return afl.WorkerData(train=(x[:20], y[:20]), test=(x[20:], y[20:]))


class NotANumber(Good):
    def data(self, worker, context):
        x, y = examples(worker)
        x[7, 2] = float("nan")
        return divided(x, y)


class LossOfEach(Good):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class ClassWeights(Good):
    def loss(self, model, batch):
        weight = torch.tensor([1.0, 9.0])
        return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=weight)


class ClassWeightsOfAMean(Good):
    def loss(self, model, batch):
        weight = torch.tensor([1.0, 9.0])
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="sum")
        return loss / len(batch[1])


class LossOfAFloat(Good):
    def loss(self, model, batch):
        return super().loss(model, batch).item()


class Detached(Good):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


class LossRaises(Good):
    def loss(self, model, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels + 5)


class InfiniteLoss(Good):
    def loss(self, model, batch):
        return super().loss(model, batch) / 0.0


class InfiniteGradient(Good):
    def loss(self, model, batch):
        return super().loss(model, batch) + 0 * (model[0].weight * 0).sum().sqrt()


class InfiniteMetric(Good):
    def metrics(self, model, batch):
        return {"loss": super().loss(model, batch), "odd": torch.tensor(float("inf"))}


class WithoutLossMetric(Good):
    def metrics(self, model, batch):
        return {"accuracy": torch.tensor(0.5)}


class NamelessMetric(Good):
    def metrics(self, model, batch):
        return {"loss": super().loss(model, batch), "\\x1b[2J": torch.tensor(0.5)}


class OfAnotherMind(Good):
    """A division that depends on the order of a set, so on the process."""

    def data(self, worker, context):
        x, y = examples(worker)
        order = [int(name) for name in {str(i) for i in range(100)}]
        return divided(x[order], y[order])


class OfAnotherShape(Good):
    def model(self):
        width = 4 + zlib.crc32(repr({str(i) for i in range(100)}).encode()) % 9973
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


class Broadcasting(Good):
    def model(self):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        inputs, labels = batch
        return (model(inputs) - labels.float()).pow(2).mean()

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}


class Squeezed(Broadcasting):
    def loss(self, model, batch):
        inputs, labels = batch
        return (model(inputs).squeeze(1) - labels.float()).pow(2).mean()


class Rooted(Squeezed):
    """A root mean squared error beside the loss, and what draws: no mean either, by nobody's mistake."""

    def metrics(self, model, batch):
        loss = self.loss(model, batch)
        return {"loss": loss, "rmse": loss.sqrt(), "drawn": loss + torch.rand(())}


class OfMany(Squeezed):
    def metrics(self, model, batch):
        assert len(batch[0]) >= 10, "too few"
        return super().metrics(model, batch)


class Float64Inputs(Squeezed):
    def data(self, worker, context):
        x, y = examples(worker)
        return divided(x.double(), y)


class Float64Targets(Squeezed):
    def loss(self, model, batch):
        inputs, targets = batch
        return nn.functional.huber_loss(model(inputs), targets)

    def data(self, worker, context):
        x, y = examples(worker)
        return divided(x, y.double()[:, None])


class Soft(Good):
    def model(self):
        return nn.Sequential(nn.Linear(4, 2), nn.Softmax(dim=1))


class SoftOverTheBatch(Good):
    def model(self):
        return nn.Sequential(nn.Linear(4, 2), nn.Softmax(dim=0))


class Odd(Good):
    """All that is no error."""

    buffers = "local"

    def model(self):
        model = nn.ModuleDict(
            {
                "first": nn.Linear(4, 8),
                "norm": nn.BatchNorm1d(8),
                "drop": nn.Dropout(0.5),
                "low": nn.Linear(8, 8, dtype=torch.bfloat16),
                "last": nn.Linear(8, 2),
                "unused": nn.Linear(3, 3),
                "frozen": nn.Linear(2, 2),
                "dead": nn.Linear(8, 2),
            }
        )
        for parameter in model["frozen"].parameters():
            parameter.requires_grad = False
        return model

    def loss(self, model, batch):
        inputs, labels = batch
        noise = float(np.random.default_rng().normal())  # seeded by nobody
        hidden = model["drop"](model["norm"](model["first"](inputs)).relu()) * (1 + 1e-4 * noise)
        hidden = model["low"](hidden.bfloat16()).float()
        logits = model["last"](hidden) + model["frozen"](model["last"](hidden)) + 0 * model["dead"](hidden)
        return nn.functional.cross_entropy(logits, labels, reduction="sum")

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch) / len(batch[1]), "accuracy": torch.tensor(50.0)}

    def data(self, worker, context):
        x, y = examples(0, 1000 if worker == 1 else 40, seed=worker // 2)
        if worker == 0:
            y = torch.zeros_like(y)
        return afl.WorkerData(train=(100 * x, y), test=(100 * x[:10], y[:10]))
'''


CONVERT = (
    "torch.float64 and the model is torch.float32; convert them in data() with .float(), or"
    ' .astype("float32") in numpy'
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "faulty.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("faulty", None)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second process, which imports PyTorch first: where another thing is looked at."""
    monkeypatch.setattr("afl_lab.check.checker.check_second_process", lambda *_: None)


@cache
def check(name: str, workers: int = 2) -> Report:
    return check_config(configured(None, f"faulty.py:{name}", workers))


def line_of(text: str) -> int:
    return MODULE[: MODULE.index(text)].count("\n") + 1


@pytest.mark.parametrize(
    ("name", "code", "where", "what", "advice"),
    [
        ("Nothing", 2, "loading faulty:Nothing", "faulty has no Nothing", ""),
        ("ModelRaises", 2, f"faulty.py:{line_of('TWO)')}, in model", "TypeError", "nn.Linear(4, TWO)"),
        ("NormWithoutPolicy", 2, "model()", "floating-point buffers", ""),
        (
            "DataRaises",
            2,
            f"faulty.py:{line_of('return open(')}, in data",
            "FileNotFoundError",
            "return open(",
        ),
        ("DataMissing", 7, "data(0)", "site-0.npz is missing", ""),
        ("NoWorkerData", 2, "data(0)", "returns tuple", "return afl.WorkerData"),
        ("Arrays", 7, "worker 0's data, train", "ndarray", ""),
        ("Ragged", 7, "worker 0's data, train", "[100, 50] examples", ""),
        ("NothingToTest", 7, "worker 0's data", "no test examples", "data()"),
        ("TooFew", 7, "worker 0's data", "20 training examples, fewer than", "task.batch_size"),
        ("NotANumber", 7, "worker 0's data", "training example 7", ""),
        ("LossOfEach", 2, "LossOfEach.loss", "shape [32]", "reduction='mean'"),
        ("LossOfAFloat", 2, "LossOfAFloat.loss", "returns float", ".item()"),
        ("Detached", 2, "Detached.loss", "does not depend on the parameters", ".detach()"),
        ("LossRaises", 2, f"faulty.py:{line_of('labels + 5')}, in loss", "Target", "labels + 5"),
        ("InfiniteLoss", 5, "InfiniteLoss.loss, worker 0's first batch", "it is inf", "scaled"),
        ("InfiniteGradient", 5, "worker 0's first gradient", "infinite or NaN for 0.weight", "sqrt"),
        ("InfiniteMetric", 5, "the metric odd of worker 0", "it is inf", ""),
        (
            "NamelessMetric",
            2,
            "metrics of worker 0's test examples",
            "a metric's name has 1 to 64 of the characters",
            "",
        ),
        (
            "WithoutLossMetric",
            2,
            "metrics of worker 0's test examples",
            "returned the keys accuracy; a dict",
            "",
        ),
        (
            "Float64Inputs",
            7,
            "loss of worker 0's first batch",
            f"the inputs of a batch are {CONVERT} (RuntimeError: mat1 and mat2 must have the same dtype",
            "",
        ),
        (
            "Float64Targets",
            7,
            "loss of worker 0's first batch",
            f"the targets of a batch are {CONVERT} (RuntimeError: Found dtype Double but expected Float)",
            "",
        ),
        ("OfAnotherMind", 2, "worker 0's data", "other examples, or in another order", "set"),
        ("OfAnotherShape", 2, "model()", "other names, shapes or types", "set"),
    ],
)
def test_an_error_says_what_where_and_what_to_do(
    name: str, code: int, where: str, what: str, advice: str
) -> None:
    report = check(name)
    assert report.exit_code == code, report
    error = report.errors[0]
    assert where in error.where, report
    assert what in error.what, report
    assert advice in error.advice, report
    assert "not ready for a run" in report.verdict


def found(report: Report, level: Level, text: str) -> Finding:
    matching = [finding for finding in report.of_level(level) if text in str(finding)]
    assert matching, f"no {level} with {text!r} in:\n{report}"
    return matching[0]


@pytest.mark.usefixtures("alone")
def test_what_is_odd_is_said_and_no_error() -> None:
    report = check("Odd", workers=4)
    assert report.exit_code == 0, report
    for text in (
        "all of its training examples have the label 0",
        "10 of its 10 test examples are training examples too",
        "worker 1 has 1000 training examples, worker 0 40",
        "workers 2 and 3: they have the same training examples",
        "no loss depends on unused.weight, unused.bias",
        "it is zero at every worker for dead.weight, dead.bias",
        "2.00 times the loss: it looks like a sum",
        "it is 50, and an accuracy is from 0 to 1",
        "two calls with the same batch give different numbers",
    ):
        found(report, Level.WARNING, text)
    for text in (
        "2 parameters are frozen: frozen.weight, frozen.bias",
        "2 trainable tensors are bfloat16",
        "2 floating-point buffers, with buffers = 'local': norm.running_mean, norm.running_var",
        "its inputs go up to",
        "it tests on 10 examples",
    ):
        found(report, Level.NOTE, text)
    assert report.values["costs"]["up"] > 0


@pytest.mark.usefixtures("alone")
def test_a_factor_that_learns_from_the_second_step_on_is_no_warning() -> None:
    """LoRA's A has no gradient while B is zero."""
    report = check("Adapted")
    assert report.exit_code == 0, report
    assert not [finding for finding in report.findings if finding.where == "the gradient"], report


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_no_mean_over_the_examples_is_told() -> None:
    text = "is not the mean over its examples: its halves have"
    found(check("Broadcasting"), Level.WARNING, text)
    weighted = found(check("ClassWeights"), Level.WARNING, text)
    assert "does it weigh classes? cross_entropy(weight=...) divides by the weights" in weighted.advice
    for right in ("Squeezed", "ClassWeightsOfAMean"):
        assert not [finding for finding in check(right).findings if text in finding.what]


@pytest.mark.usefixtures("alone")
def test_a_metric_that_is_no_mean_over_the_examples_is_told(module: Path) -> None:
    (module / "run.yaml").write_text(CONFIG)
    text = "the metric rmse: it is not the mean over the examples: 20 test examples of worker 0 have "
    fits = check("Rooted")
    note = found(fits, Level.NOTE, text)
    assert "at most 20, and task.evaluation_batch_size is 1024" in note.what
    assert not fits.of_level(Level.WARNING)
    small = check_in_batches_of(12, "Rooted")
    warning = found(small, Level.WARNING, text.replace("20", "16"))
    assert "(12), and worker 0 has 20 test examples" in warning.what
    assert "return the mean of what is summed, such as the squared error" in warning.advice
    assert "task.evaluation_batch_size to at least 20" in warning.advice
    for report in (fits, small):
        assert not [finding for finding in report.findings if "drawn" in finding.where]
    assert not [finding for finding in check("Squeezed").findings if "the metric" in finding.where]
    note = found(
        check_in_batches_of(10, "OfMany"), Level.NOTE, "of a few test examples of worker 0 it raised "
    )
    assert f"AssertionError: too few (faulty.py:{line_of('assert len')}, in metrics)" in note.what


def check_in_batches_of(size: int, name: str) -> Report:
    overrides = [f"task.evaluation_batch_size={size}"]
    return check_config(configured(Path("run.yaml"), f"faulty.py:{name}", 3, overrides))


@pytest.mark.parametrize(
    ("whole", "parts", "expected"),
    [
        ({"m": 3.0}, [(1, {"m": 1.0}), (3, {"m": 11 / 3})], {}),
        (
            {"m": 2.0},
            [(1, {"m": 1.0}), (3, {"m": 11 / 3})],
            {"m": "2, and parts of them 1 (1 of them), 3.667 (3 of them)"},
        ),
        (
            {"m": 2.0},
            [(1, {"m": float("nan")}), (3, {"m": 2.0})],
            {"m": "2, and parts of them nan (1 of them), 2 (3 of them)"},
        ),
        ({"m": 0.0}, [(2, {"m": 0.0}), (3, {"m": 0.0})], {}),
        ({"m": 2.0}, [(1, {}), (3, {"m": 9.0})], {}),
        ({"m": 2.0}, [], {}),
    ],
)
def test_a_mean_is_the_parts_mean_by_their_sizes(
    whole: dict[str, float], parts: list[tuple[int, dict[str, float]]], expected: dict[str, str]
) -> None:
    assert no_means(whole, parts) == expected


def test_the_parts_are_unequal_and_make_the_whole() -> None:
    assert parts_of(32) == [(0, 5), (5, 16), (16, 32)]
    assert parts_of(3) == [(0, 1), (1, 3)]
    assert parts_of(2) == [(0, 1), (1, 2)]
    assert parts_of(1) == []


@pytest.mark.usefixtures("alone")
def test_probabilities_in_place_of_logits_are_told() -> None:
    found(
        check("Soft"),
        Level.WARNING,
        "its outputs are probabilities: they sum to 1 over the classes (1, Softmax)",
    )
    over_the_batch = check("SoftOverTheBatch")
    found(over_the_batch, Level.WARNING, "depends on the others in the batch (1, Softmax)")
    assert not [finding for finding in over_the_batch.findings if "probabilities" in finding.what]
    assert not [finding for finding in check("Good").findings if finding.level is not Level.NOTE]


def test_the_command_shows_it_and_ends_with_its_code(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "faulty.py:Detached", "--workers", "2"]) == 2
    shown = capsys.readouterr().out
    assert "error: Detached.loss: its value does not depend on the parameters\n    -> does it call" in shown
    assert main(["check", "faulty.py:DataMissing", "--json"]) == 7
    answer = json.loads(capsys.readouterr().out)
    assert answer["ready"] is False
    assert answer["exit_code"] == 7
    assert [entry["level"] for entry in answer["findings"]] == ["error"]


@pytest.mark.usefixtures("alone")
def test_what_takes_too_long_is_left_out_and_said_to_be(module: Path) -> None:
    tried: list[str] = []
    config = configured(None, "faulty.py:Good", 6)
    report = check_config(config, limit_s=1e-9, watch=tried.append)
    note = found(report, Level.NOTE, "leaves out: ")
    for left in (
        "all but 100 examples of workers 4 to 5",
        "loss, gradient and metrics of workers 1 to 5",
        "whether metrics are means",
        "the first rounds, and with them what a run costs: they take",
    ):
        assert left in note.what
    assert note.advice == "afl check --full tries everything"
    assert "Costs" not in report.facts
    assert tried[0] == "the task and its model"
    assert "the data of worker 5 of 6" in tried
    assert "loss, gradient and metrics of worker 0" in tried
    assert "loss, gradient and metrics of worker 1" not in tried
    # Without a limit all is tried.
    assert "Costs" in check_config(config).facts


def test_a_terminal_shows_what_is_being_checked(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["check", "faulty.py:Good", "--workers", "2"]) == 0
    assert "checking " in shown.getvalue()


STAYING = """
import os, sys, time
from pathlib import Path

from faulty import Good


class Staying(Good):
    def data(self, worker, context):
        if "repeating" in sys.argv[0]:
            Path("new").write_text(str(os.getpid()))
            Path("new").rename("second")
            time.sleep(600)
        return super().data(worker, context)
"""


def test_killed_it_leaves_no_second_process(module: Path) -> None:
    (module / "staying.py").write_text(STAYING)
    second = module / "second"
    command = [sys.executable, "-m", "afl_cli", "check", "staying.py:Staying", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 90
        while not second.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child = psutil.Process(int(second.read_text()))
        process.kill()
    left = psutil.wait_procs([child], timeout=30)[1]
    for each in left:
        each.kill()
    assert not left


CONFIG = """
workers: 3
task: {name: "faulty:Good", batch_size: 16}
algorithm:
  name: afl-com
  rounds: 40
  eta_w: 0.1
  eta_q: 0.1
  uplink: {name: rand-k, ratio: 0.25}
evaluation: {every: 10}
run: {seed: 3}
"""


def test_a_good_task_and_what_its_run_really_costs(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes are those that the whole run then counts."""
    (module / "run.yaml").write_text(CONFIG)
    assert main(["check", "--config", "run.yaml", "--json", "--strict"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ready"] is True
    assert {entry["level"] for entry in answer["findings"]} <= {"note"}
    assert answer["model"]["dim"] == 58
    assert [entry["train"] for entry in answer["data"]] == [80, 80, 80]
    directory = module / "simulated"
    summary = simulate(load_config(module / "run.yaml"), directory)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rounds = {line["round"]: line for line in lines if line["event"] == "round"}
    costs = answer["costs"]
    assert rounds[5]["uplink_bytes"] - rounds[4]["uplink_bytes"] == costs["up"]
    assert rounds[5]["downlink_bytes"] - rounds[4]["downlink_bytes"] == costs["down"]
    whole = sum(way["wire_bytes"] for way in summary["communication"].values())
    assert abs(whole - costs["whole_run"]) < 0.02 * whole
    assert summary["uncompressed_bytes"] > 2 * whole


@pytest.mark.usefixtures("alone")
def test_integers_are_tried_and_what_they_cost_is_what_the_run_then_sends(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (module / "run.yaml").write_text(CONFIG)
    bits = ("--set", "algorithm.uplink.bits=4", "--set", "algorithm.rounds=200")
    assert main(["check", "--config", "run.yaml", "--json", *bits]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert not [entry for entry in answer["findings"] if entry["where"].startswith("algorithm.uplink")]
    tried = answer["integers"]
    assert (tried["bits"], tried["rounds"]) == (4, 40)
    assert tried["first_loss"] > tried["integers"]["loss"]
    assert tried["first_loss"] > tried["float32"]["loss"]
    costs = answer["costs"]
    assert (costs["up"], costs["down"]) == (tried["integers"]["up"], tried["integers"]["down"])
    config = load_config(module / "run.yaml", ["algorithm.uplink.bits=4", "algorithm.rounds=200"])
    summary = simulate(config, module / "simulated")
    whole = sum(way["wire_bytes"] for way in summary["communication"].values())
    assert costs["whole_run"] == pytest.approx(whole, rel=0.1)
    assert costs["up"] < tried["float32"]["up"]


def tried_integers(task: str, *overrides: str, dry_seconds: float = 0.1) -> Report:
    """What is found of integers alone."""
    Path("run.yaml").write_text(CONFIG)
    config, report = configured(Path("run.yaml"), task, None, overrides), Report(task)
    loaded = load_task(config.task.name, config.task.options, allow_path=True)
    dim = build_vector(loaded, SharedRandomness.from_int(3)).dim
    check_integers(report, config, loaded, dim=dim, dry_seconds=dry_seconds, round_seconds=0.01)
    return report


def test_integers_are_proposed_where_they_save_and_the_loss_falls_alike() -> None:
    note = found(tried_integers("faulty.py:Wide"), Level.NOTE, "with bits: 8 a round sends")
    assert note.advice == "add bits: 8 to algorithm.uplink"
    identity = tried_integers("faulty.py:Wide", "algorithm.uplink={name: identity}")
    note = found(identity, Level.NOTE, "with bits: 8 a round sends")
    assert "each worker then keeps a residual of 22.41 kB" in note.advice


@pytest.mark.parametrize(
    ("overrides", "is_tried"),
    [
        (["algorithm.uplink.bits=4"], True),
        (["algorithm.uplink={name: top-k, ratio: 0.25}"], False),
        (["algorithm.downlink={name: top-k, ratio: 0.25}"], False),
        (["algorithm.downlink={name: identity, bits: 4}"], False),
        (["algorithm.name=afl-br", "algorithm.uplink=null"], False),
        (["algorithm.name=drfa", "algorithm.uplink=null"], False),
    ],
)
def test_nothing_is_proposed_where_there_are_integers_or_can_be_none(
    overrides: list[str], is_tried: bool
) -> None:
    report = tried_integers("faulty.py:Wide", *overrides)
    assert not report.findings
    assert ("integers" in report.values) is is_tried


def test_integers_that_are_too_coarse_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range so far from the gradients that the tried rounds are over before the grid has found them."""
    monkeypatch.setattr("afl.core.grid.FIRST_RANGE", 1e12)
    report = tried_integers("faulty.py:Wide", "algorithm.uplink.bits=4")
    warning = found(report, Level.WARNING, "with 4 bits the mean loss is")
    assert warning.where == "algorithm.uplink.bits"
    assert not tried_integers("faulty.py:Wide").findings, "nor are they proposed then"


def test_hidden_losses_are_tried_by_their_means() -> None:
    masked = ["algorithm.uplink.bits=16", "privacy.secure_aggregation=true"]
    shown, hidden = (
        tried_integers("faulty.py:Wide", *masked, f"privacy.losses={losses}").values["integers"]
        for losses in ("shown", "hidden")
    )
    assert hidden["first_loss"] == pytest.approx(shown["first_loss"], abs=1e-6)
    for values in ("float32", "integers"):
        assert hidden[values]["loss"] == pytest.approx(shown[values]["loss"], rel=0.01)


def test_a_task_of_long_rounds_is_not_tried() -> None:
    report = tried_integers("faulty.py:Wide", dry_seconds=9.9)
    assert report.facts["Integers"] == {"bits: 8": "not tried: 20 rounds take 10.1 s here"}
    assert not report.values


@pytest.mark.usefixtures("alone")
def test_sites_are_named(module: Path) -> None:
    (module / "run.yaml").write_text(CONFIG)
    sites = "sites=[north, south, St. Mary]"
    report = check_config(load_config(module / "run.yaml", [sites, "task.batch_size=81"]))
    assert list(report.facts["Data"]) == ["worker 0 (north)", "worker 1 (south)", "worker 2 (St. Mary)"]
    assert "worker 2 (St. Mary)'s data" in {finding.where for finding in report.errors}


def test_what_the_configuration_is_warned_of_is_in_the_report(module: Path) -> None:
    (module / "run.yaml").write_text(CONFIG)
    overrides = ["algorithm.rounds=100", "algorithm.block=10", "evaluation.every=20"]
    report = check_config(load_config(module / "run.yaml", overrides), limit_s=0.0)
    warning = found(report, Level.WARNING, "at a block's end")
    assert warning.where == "evaluation.every"
    assert warning.advice == "set it to auto, which is 3 here"
    assert not report.errors


def test_batches_of_one_example_can_be_checked(module: Path) -> None:
    (module / "run.yaml").write_text(CONFIG)
    report = check_config(configured(Path("run.yaml"), None, None, ["task.batch_size=1"]))
    assert not report.errors, report
    found(report, Level.NOTE, "a worker refuses them unless started with --min-batch 1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a task"),
        (["faulty.py:Good", "--set", "workers=3"], "--config FILE"),
        (["faulty.py:Good", "--workers", "0"], "at least 1"),
        (["../faulty.py:Good"], "not in or below the folder"),
        (["my-task.py:Good"], "rename my-task.py"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert said in capsys.readouterr().err
