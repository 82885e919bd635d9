"""Programs of models with several inputs, and ``predict.py``, which runs where there is no afl."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import afl
from afl.config import config_from_mapping
from afl.runs.export.calls import Call
from afl.runs.export.export import export
from afl_cli.main import main
from afl_lab.simulation.run import simulate
from support.longer import but_long

HAS_ONNX = importlib.util.find_spec("onnx") is not None and importlib.util.find_spec("onnxscript") is not None

needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx and onnxscript (afl[onnx]) are not installed")

TASKS = """
import torch
from torch import nn
from torch.utils.data import Dataset

import afl


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.numbers = nn.Linear(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, numbers, words):
        mixed = self.words(words).mean(dim=1) + self.numbers(numbers)
        return {"scores": self.head(mixed), "hidden": None}


class ByPosition(afl.Task):
    def model(self):
        return Two()

    def data(self, worker, context):
        draw = torch.Generator().manual_seed(worker)
        numbers = torch.randn(16, 3, generator=draw)
        part = (numbers, torch.randint(50, (16, 5), generator=draw), (numbers[:, 0] > 0).long())
        return afl.WorkerData(train=part, test=part)

    def inputs(self, batch):
        return batch[:2]

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(*batch[:2])["scores"], batch[2])


class Rows(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        numbers, words, label = (column[index] for column in self.columns)
        return {"words": words, "numbers": numbers, "label": label}


class ByName(ByPosition):
    inputs = afl.Task.inputs

    def data(self, worker, context):
        data = super().data(worker, context)
        return afl.WorkerData(Rows(data.train), Rows(data.test))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(**afl.Task.inputs(self, batch))["scores"], batch["label"])


class Wordy(ByName):
    def inputs(self, batch):
        return {"text": ["a", "b"]}
"""

WITHOUT_AFL = """
import runpy, sys
sys.path.append(sys.argv[1])  # PyTorch's folder; with -S, what is installed from a checkout is not found
for name in ("afl", "afl_cli", "afl_lab", "afl_server", "afl_worker", "programs_tasks"):
    sys.modules[name] = None  # importing it fails
try:
    import afl
except ImportError:
    script, *batches = sys.argv[2:]
    for batch in batches:
        sys.argv = [script, batch, f"{batch}.answers"]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            print(end, file=sys.stderr)
"""


def config_of(task: str) -> dict[str, Any]:
    return {
        "workers": 2,
        "task": {"name": f"programs_tasks:{task}", "batch_size": 4},
        "algorithm": {"name": "afl-br", "rounds": 3, "eta_w": 0.1, "eta_q": 0.1},
        "run": {"seed": 3},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the tasks' module, and a run of each."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "programs_tasks.py").write_text(TASKS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for task in ("ByPosition", "ByName", "Wordy"):
            simulate(config_from_mapping(config_of(task)), folder / task)
        yield folder
    sys.modules.pop("programs_tasks", None)


def batch_of(count: int) -> dict[str, torch.Tensor]:
    return {"words": torch.randint(50, (count, 5)), "numbers": torch.randn(count, 3)}


def predicted(out: Path, folder: Path, **batches: object) -> tuple[dict[str, Any], str]:
    """What ``predict.py`` answers to batches in files of these names, and says, in a process that has PyTorch
    and no afl."""
    for name, batch in batches.items():
        if isinstance(batch, str):
            (folder / name).write_text(batch, encoding="utf-8")
        elif batch is not None:
            torch.save(batch, folder / name)
    site = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-S", "-c", WITHOUT_AFL, site, str(out / "predict.py"), *batches]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answered = {name: folder / f"{name}.answers" for name in batches}
    found = {name: torch.load(path, weights_only=True) for name, path in answered.items() if path.exists()}
    return found, done.stderr


@pytest.mark.parametrize("task", but_long(["ByPosition", "ByName"], "ByName"))
def test_predict_answers_as_the_module_without_afl(task: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    name = f"programs_tasks:{task}"
    assert main(["export", str(folder / task), "--out", str(out), "--predict", "--task", name]) == 0
    (program,) = json.loads((out / "card.json").read_text(encoding="utf-8"))["programs"]
    shapes = ["numbers [2, 3] float32", "words [2, 5] int64"]
    assert program["input"] == ", ".join(shapes if task == "ByPosition" else shapes[::-1])
    assert program["any_batch"]
    assert "`python predict.py batch.pt` runs it" in (out / "README.md").read_text(encoding="utf-8")
    batch = batch_of(7)
    with torch.no_grad():
        wanted = afl.load_model(out, name)(**batch)["scores"]
    if task == "ByPosition":
        both = {"by_name": batch, "in_order": (batch["numbers"], batch["words"])}
        found, said = predicted(out, tmp_path, **both, text="1,2\n", none=None)
        wrong = ["text: no tensors as torch.save writes them", "none: No such file or directory"]
        assert said.splitlines() == wrong
        assert found.keys() == both.keys()
        assert torch.equal(found["in_order"]["scores"], found["by_name"]["scores"])
    else:
        lacks = {"words": torch.ones(2, 5, dtype=torch.int64)}
        found, said = predicted(out, tmp_path, by_name=batch, lacks=lacks)
        assert "the model takes words, numbers" in said
        assert found.keys() == {"by_name"}
    assert found["by_name"].keys() == {"scores"}
    torch.testing.assert_close(found["by_name"]["scores"], wanted)


def test_inputs_may_be_written_and_must_be_tensors(folder: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"predict": True, "task": "programs_tasks:Wordy"}
    with pytest.raises(afl.ConfigError, match=r"have no tensors that Wordy\.inputs finds"):
        export(folder / "Wordy", "final", tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    shape = "words=2x5:int64,numbers=2x3"
    card = export(folder / "Wordy", "final", tmp_path / "out", shape=shape, **arguments)
    assert card["programs"][0]["input"] == "words [2, 5] int64, numbers [2, 3] float32"


def test_shapes_are_read_with_names_or_without() -> None:
    two = Call.parsed("2x3, 2x5:int64")
    assert [tuple(tensor.shape) for tensor in two.positional] == [(2, 3), (2, 5)]
    assert two.tensors[1].dtype == torch.int64
    for wrong in ("a=2x3,2x5", "a=2x3,a=2x5", "a=1x3", "2x", "a="):
        with pytest.raises(afl.ConfigError, match=f"--input {wrong}: "):
            Call.parsed(wrong)


@needs_onnx
@pytest.mark.parametrize("task", ["ByPosition", "ByName"])
def test_onnx_takes_several_inputs(task: str, folder: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", f"programs_tasks:{task}"
    (program,) = export(folder / task, "final", out, onnx=True, task=name)["programs"]
    assert program["any_batch"]
    reference = importlib.import_module("onnx.reference")
    evaluator = reference.ReferenceEvaluator(str(out / program["file"]))
    assert set(evaluator.input_names) == {"numbers", "words"}
    batch = batch_of(6)
    (found,) = evaluator.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), afl.load_model(out, name)(**batch)["scores"])
