"""``afl.load_model``: to the bit what a run stored, in the user's own module, by no code of the file's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import afl
from afl.config import config_from_mapping
from afl.core.randomness import SharedRandomness
from afl.tasks.base import Batch
from afl.tasks.initialization import build_vector
from afl.tasks.synthetic import Synthetic
from afl_server.federation.broadcast import ModelCopy
from afl_server.storage.records import RunRecords

CONFIG = {
    "workers": 2,
    "task": {"name": "tests_tasks:Odd", "options": {"width": 3}},
    "algorithm": {"name": "afl-br", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1},
}


class _Base(afl.Task):
    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        raise afl.DataError("no data here")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise AssertionError("not trained here")


class OddModule(nn.Module):
    """Every kind of parameter: bfloat16, frozen, tied, empty, transposed; and two kinds of buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rough = nn.Parameter(torch.randn(width, 2).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(width, dtype=torch.float64), requires_grad=False)
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(2, width).t())
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("table", torch.ones(2), persistent=False)


class Odd(_Base):
    buffers = "local"

    def __init__(self, width: int = 3) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return OddModule(self.width)


class LocalNorm(_Base):
    buffers = "local"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


class MeanNorm(LocalNorm):
    buffers = "mean"


def stored(task: afl.Task, folder: Path, name: str = "tests_tasks:Odd") -> tuple[Path, nn.Module]:
    """A model as a server writes it, and the module that the server has."""
    config = config_from_mapping({**CONFIG, "task": {**CONFIG["task"], "name": name}})
    vector = build_vector(task, SharedRandomness.from_int(5))
    with torch.no_grad():
        vector.values.copy_(torch.randn(vector.dim))
    vector.publish()
    records = RunRecords("20260101-000000-abcdef", folder, config)
    records.save_model("final", ModelCopy(vector), 7)
    return folder / "model-final.safetensors", vector.module


def assert_equal_to_the_bit(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert torch.equal(
            tensor.contiguous().reshape(-1).view(torch.uint8),
            theirs[name].contiguous().reshape(-1).view(torch.uint8),
        ), name


def test_every_kind_of_parameter_comes_back_to_the_bit(tmp_path: Path) -> None:
    path, module = stored(Odd(), tmp_path)
    state = torch.random.get_rng_state()
    loaded = afl.load_model(path, Odd)
    assert torch.equal(torch.random.get_rng_state(), state), "loading disturbs torch's generator"
    assert_equal_to_the_bit(loaded, module)
    assert isinstance(loaded, OddModule)
    assert loaded.first.weight is loaded.second.weight
    assert not loaded.training
    assert not loaded.frozen.requires_grad
    assert torch.equal(loaded.table, torch.ones(2))


def test_options_come_from_the_file_unless_given(tmp_path: Path) -> None:
    path, _ = stored(Odd(), tmp_path)
    with pytest.raises(
        afl.AflError, match=r"first.weight has the shape \[3, 3\], there \[4, 4\].*other options"
    ):
        afl.load_model(path, Odd, options={"width": 4})
    assert afl.load_model(path, Odd(3)) is not None


def test_the_mean_of_buffers_is_in_the_file_and_local_ones_are_warned_of(tmp_path: Path) -> None:
    path, module = _with_statistics(MeanNorm(), tmp_path)
    loaded = afl.load_model(path, MeanNorm())
    assert_equal_to_the_bit(loaded, module)
    assert torch.equal(loaded[1].running_mean, torch.full((3,), 0.25))  # type: ignore[index]
    path, module = _with_statistics(LocalNorm(), tmp_path)
    with pytest.warns(UserWarning, match="statistics of normalization layers stayed at the workers"):
        loaded = afl.load_model(path, LocalNorm())
    assert torch.equal(loaded[1].weight, module[1].weight)  # type: ignore[index]
    assert torch.equal(loaded[1].running_mean, torch.zeros(3))  # type: ignore[index]


def _with_statistics(task: afl.Task, folder: Path) -> tuple[Path, nn.Module]:
    config = config_from_mapping(CONFIG)
    vector = build_vector(task, SharedRandomness.from_int(5))
    vector.module[1].running_mean.fill_(0.25)  # type: ignore[index, union-attr]
    records = RunRecords("20260101-000000-abcdef", folder, config)
    records.save_model("final", ModelCopy(vector), 7)
    return folder / "model-final.safetensors", vector.module


def test_code_that_only_the_file_names_is_not_loaded(tmp_path: Path) -> None:
    path, _ = stored(Odd(), tmp_path, "os:remove")
    with pytest.raises(afl.ConfigError, match=r"its task is os:remove.*give the class: afl.load_model\(path"):
        afl.load_model(path)


def test_an_installed_task_is_found_by_its_name(tmp_path: Path) -> None:
    config = config_from_mapping({**CONFIG, "task": {"name": "synthetic", "options": {"dim": 6}}})
    vector = build_vector(Synthetic(dim=6), SharedRandomness.from_int(5))
    RunRecords("r", tmp_path, config).save_model("best", ModelCopy(vector), 7)
    assert_equal_to_the_bit(afl.load_model(tmp_path / "model-best.safetensors"), vector.module)
    assert_equal_to_the_bit(afl.load_model(tmp_path / "model-best.safetensors", "synthetic"), vector.module)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path, _ = stored(Odd(), tmp_path)
    with pytest.raises(afl.ConfigError, match="no such file"):
        afl.load_model(tmp_path / "nowhere")
    with pytest.raises(afl.ConfigError, match="holds no model that afl export wrote"):
        afl.load_model(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(afl.ConfigError, match="is a run directory; name one of its models"):
        afl.load_model(tmp_path)
    with pytest.raises(afl.AflError, match=r"does not fit the model of MeanNorm: it lacks 0.bias"):
        afl.load_model(path, MeanNorm())
    strange = tmp_path / "strange.safetensors"
    save_file({"a": torch.zeros(2)}, strange)
    with pytest.raises(afl.ConfigError, match="does not say its task"):
        afl.load_model(strange)
    with pytest.raises(afl.ConfigError, match=r"is not a subclass of afl\.Task"):
        afl.load_model(path, OddModule)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(afl.AflError, match="no safetensors file, or a damaged one"):
        afl.load_model(path, Odd)


def test_a_folder_whose_model_is_not_the_cards_is_refused(tmp_path: Path) -> None:
    path, _ = stored(Odd(), tmp_path)
    folder = tmp_path / "exported"
    folder.mkdir()
    path.rename(folder / "model.safetensors")
    task = {"name": "tests_tasks:Odd", "options": {}}
    (folder / "card.json").write_text(json.dumps({"task": task, "model": {"digest": "0" * 32}}))
    with pytest.raises(afl.AflError, match=r"is not the model of card\.json: its digest is"):
        afl.load_model(folder, Odd)
    (folder / "card.json").write_text("{")
    with pytest.raises(afl.AflError, match="damaged, or of another version"):
        afl.load_model(folder, Odd)


@pytest.mark.parametrize(
    "card",
    [
        "[" * 100_000,
        "[1]",
        '{"task": {"name": 5, "options": {}}, "model": {"digest": "0"}}',
        '{"task": {"name": ["a"], "options": {}}, "model": {"digest": "0"}}',
        '{"task": {"name": "a", "options": [1]}, "model": {"digest": "0"}}',
        '{"task": {"name": "a", "options": null}, "model": {"digest": "0"}}',
        '{"task": {"name": "a", "options": {}}, "model": {"digest": 0}}',
    ],
    ids=range(7),
)
def test_a_card_of_another_shape_is_damaged(tmp_path: Path, card: str) -> None:
    (tmp_path / "card.json").write_text(card, encoding="utf-8")
    with pytest.raises(afl.AflError, match=r"card\.json: damaged, or of another version"):
        afl.load_model(tmp_path)


def test_a_card_that_is_a_folder_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "card.json").mkdir()
    with pytest.raises(afl.AflError, match=r"card\.json cannot be read: Is a directory"):
        afl.load_model(tmp_path)
