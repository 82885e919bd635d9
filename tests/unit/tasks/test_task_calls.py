"""A task whose loss or metrics change the model: its worker's copy would no longer be the server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afl.config import config_from_mapping
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.core.record_privacy import RecordPrivacy
from afl.errors import TaskError
from afl.tasks import Classification, TaskContext, WorkerData
from afl_lab.check import check_config
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle
from afl_worker.training.private import PrivateOracle


class Limited(nn.Module):
    """A layer that does something to its weights whenever it is called."""

    def __init__(self, change: Callable[[nn.Linear], None], *, frozen: bool = False) -> None:
        super().__init__()
        self.limited, self.out = nn.Linear(5, 4), nn.Linear(4, 3)
        self.limited.weight.requires_grad_(not frozen)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self.limited)
        out: Tensor = self.out(self.limited(inputs))
        return out


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.01, 0.01)


def behind_its_back(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.01, 0.01)


def replaced(layer: nn.Linear) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.01)


def another(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clamp(-0.01, 0.01))


def in_evaluation(layer: nn.Linear) -> None:
    if not layer.training:
        in_place(layer)


class Site(Classification):
    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model

    def model(self) -> nn.Module:
        return self._model()

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        inputs = torch.randint(0, 4, (8, 5), generator=torch.Generator().manual_seed(worker))
        pair = (inputs.float() if isinstance(self._model(), Limited) else inputs, torch.zeros(8).long())
        return WorkerData(train=pair, test=pair)


def oracle(task: Site, kind: Callable[..., TaskOracle] = TaskOracle) -> TaskOracle:
    randomness = SharedRandomness.from_int(1)
    context = TaskContext(2, randomness)
    data = {worker: task.data(worker, context) for worker in range(2)}
    return kind(task, ParameterVector(task.model()), data, randomness, batch_size=4, evaluation_batch_size=8)


def embedding(max_norm: float | None) -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3, max_norm=max_norm), nn.Flatten(), nn.Linear(15, 3))


CHANGES = {
    "in place": lambda: Limited(in_place),
    "in place, frozen": lambda: Limited(in_place, frozen=True),
    "through .data": lambda: Limited(behind_its_back),
    "replaced": lambda: Limited(replaced),
    "another": lambda: Limited(another),
    "an embedding's max_norm": lambda: embedding(0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_changes_a_parameter_is_refused(change: str) -> None:
    with pytest.raises(TaskError, match=r"changed its parameter (limited|0)\.weight"):
        oracle(Site(CHANGES[change])).gradient(0, 1)


def test_so_is_one_of_several_workers_together() -> None:
    with pytest.raises(TaskError, match=r"changed its parameter limited\.weight"):
        oracle(Site(lambda: Limited(in_place)), BatchedOracle).gradient(0, 1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_so_is_one_record_by_record() -> None:
    records = RecordPrivacy(clip=1.0, loss_clip=5.0, delta=0.01, noise=1.0)

    def private(*args: Any, **options: Any) -> TaskOracle:
        return PrivateOracle(*args, records=records, rounds=2, **options)

    with pytest.raises(TaskError, match=r"changed its parameter 0\.weight"):
        oracle(Site(CHANGES["an embedding's max_norm"]), private).gradient(0, 1)


def test_an_evaluation_that_changes_a_parameter_is_refused() -> None:
    own = oracle(Site(lambda: Limited(in_evaluation)))
    own.gradient(0, 1)
    with pytest.raises(TaskError, match=r"changed its parameter limited\.weight"):
        own.evaluate(0)


def test_a_later_change_is_seen_too() -> None:
    calls = []

    def third(layer: nn.Linear) -> None:
        calls.append(layer)
        if len(calls) == 3:
            in_place(layer)

    own = oracle(Site(lambda: Limited(third)))
    own.gradient(0, 1)
    own.gradient(0, 2)
    with pytest.raises(TaskError, match=r"changed its parameter limited\.weight"):
        own.gradient(0, 3)


def test_a_limited_copy_is_no_change() -> None:
    class Copying(Limited):
        def forward(self, inputs: Tensor) -> Tensor:
            weight = torch.renorm(self.limited.weight, 2, 0, 0.01)
            out: Tensor = self.out(nn.functional.linear(inputs, weight, self.limited.bias))
            return out

    for kind in (TaskOracle, BatchedOracle):
        own = oracle(Site(lambda: Copying(in_place)), kind)
        own.gradient(0, 1)
        own.evaluate(0)


class Words(Site):
    def __init__(self) -> None:
        super().__init__(lambda: embedding(0.1))


def test_a_check_says_so() -> None:
    report = check_config(
        config_from_mapping(
            {
                "workers": 2,
                "task": {"name": f"{__file__}:Words", "batch_size": 4},
                "algorithm": {"name": "afl-br", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1},
                "run": {"seed": 1},
            }
        )
    )
    assert any("changed its parameter 0.weight" in finding.what for finding in report.errors), report.findings
