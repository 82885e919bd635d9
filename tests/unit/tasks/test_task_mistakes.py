"""The usual mistakes in a task's model and data, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.errors import AflError, DataError, TaskError
from afl.tasks import Classification, TaskContext, WorkerData
from afl.tasks.base import form_problem
from afl.tasks.dtypes import telling_types
from afl.tasks.initialization import worker_data
from afl_worker.training.oracle import TaskOracle

X, Y = torch.ones(8, 5), torch.zeros(8, dtype=torch.int64)


class Numbers(nn.Module):
    """Indices into a table, which integers are good for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs)  # type: ignore[no-any-return]


class Site(Classification):
    def __init__(self, data: object = None) -> None:
        self._data = data

    def model(self) -> nn.Module:
        return nn.Linear(5, 3)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        return self._data  # type: ignore[return-value]


def oracle(task: Site, train: Any, test: Any = (X, Y)) -> TaskOracle:
    data = {0: WorkerData(train, test)}
    vector = ParameterVector(task.model())
    return TaskOracle(
        task, vector, data, SharedRandomness.from_int(1), batch_size=4, evaluation_batch_size=64
    )


class Endless(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return X[index % len(X)]


class Stream(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ((X, Y), ""),
        ([X], ""),
        (X, "it is a Tensor, not a tuple of tensors or a map-style dataset"),
        (None, "it is a NoneType, not a tuple"),
        ((), "it is a sequence of nothing; tensors are needed"),
        (
            (np.ones(3), np.ones(3)),
            "it is a sequence of ndarray, ndarray; tensors are needed (torch.from_numpy)",
        ),
        ((X, Y[:7]), "its tensors have [8, 7] examples; their first dimensions must be equal"),
        (Endless(), "it is a Endless without a length, not a map-style dataset"),
        (Stream(), "it is a Stream, a stream; minibatches are drawn by index"),
        (DataLoader(TensorDataset(X, Y)), "it is a DataLoader; return its dataset (loader.dataset)"),
    ],
)
def test_what_keeps_examples_from_being_examples(examples: object, problem: str) -> None:
    found = form_problem(examples)
    assert found.startswith(problem)
    assert bool(found) is bool(problem)


@pytest.mark.parametrize("part", ["train", "test"])
def test_examples_that_do_not_fit_together_are_refused_before_training(part: str) -> None:
    parts: dict[str, Any] = {"train": (X, Y), "test": (X, Y)} | {part: (X, Y[:7])}
    with pytest.raises(
        DataError, match=rf"gives worker 0 as {part} cannot be used: its tensors have \[8, 7\]"
    ):
        oracle(Site(), **parts)


@pytest.mark.parametrize("returned", [None, (X, Y)])
def test_data_that_is_no_worker_data(returned: object) -> None:
    with pytest.raises(TaskError, match=r"^Site\.data\(3\) returned \w+; it must return afl\.WorkerData"):
        worker_data(Site(returned), 3, TaskContext(4, SharedRandomness.from_int(1)))


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (
            X.double(),
            Y,
            r"the inputs of a batch are torch\.float64 and the model is torch\.float32; convert them",
        ),
        (X, Y.float(), r"the labels of a batch are torch\.float32; torch\.int64 is needed"),
        (X, Y + 3, "the labels of a batch go from 3 to 3; the model gives 3 classes, so they must be 0 to 2"),
        (X, Y - 1, "the labels of a batch go from -1 to -1; the model gives 3 classes"),
    ],
)
def test_data_that_does_not_fit_the_model(inputs: Tensor, labels: Tensor, message: str) -> None:
    made = oracle(Site(), (inputs, labels), (inputs, labels))
    with pytest.raises(DataError, match=message):
        made.gradient(0, 1)
    with pytest.raises(DataError, match=message):
        made.evaluate(0)


SITE_32 = "torch.float32; convert them in data() with .float()"


@pytest.mark.parametrize(
    ("module", "batch", "call", "problem"),
    [
        (
            nn.Linear(5, 1),
            (X.double(), X),
            "",
            f"the inputs of a batch are torch.float64 and the model is {SITE_32}",
        ),
        (
            nn.Linear(5, 1),
            (X.long(), X),
            "",
            f"the inputs of a batch are torch.int64 and the model is {SITE_32}",
        ),
        (
            nn.Linear(5, 1),
            (X.double(), X.double()),
            "",
            f"the inputs and the targets of a batch are torch.float64 and the model is {SITE_32}",
        ),
        (
            nn.Linear(5, 1).double(),
            (X,),
            "",
            "the values at [0] of a batch are torch.float32 and the model is torch.float64; convert them in",
        ),
        (
            nn.LSTM(5, 2),
            (X.double(), X),
            "",
            f"the inputs of a batch are torch.float64 and the model is {SITE_32}",
        ),
        (
            nn.LayerNorm(5),
            (X.double(), X),
            "",
            f"the inputs of a batch are torch.float64 and the model is {SITE_32}",
        ),
        (
            Numbers(),
            (torch.zeros(8).double(), X),
            "",
            "the inputs of a batch are torch.float64, where torch needs integers; convert them in",
        ),
        (
            nn.Linear(5, 1),
            {"age": X.double()},
            "age",
            f"the values of 'age' of a batch are torch.float64 and the model is {SITE_32}",
        ),
        (Numbers(), (Y + 4, X), "", ""),
        (nn.Linear(4, 1), (X, X), "", ""),
        (nn.Linear(4, 1), (X, X.double()), "", ""),
        (nn.Identity(), (X.double(), X), "", ""),
    ],
)
def test_numbers_of_another_type_than_the_model(
    module: nn.Module, batch: Any, call: str, problem: str
) -> None:
    with pytest.raises(Exception) as caught, telling_types(module, batch):  # noqa: PT011, PT012
        module(batch[call or 0]).mean()
        raise RuntimeError("none of the mistakes")
    if problem:
        assert isinstance(caught.value, DataError)
        assert str(caught.value).startswith(problem)
        assert f"({type(caught.value.__cause__).__name__}: " in str(caught.value), "torch's own words follow"
    else:
        assert not isinstance(caught.value, AflError)


def test_what_is_none_of_the_usual_mistakes_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        oracle(Site(), (X[:, :4], Y)).gradient(0, 1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "Site.metrics returned NoneType; a dict of scalar tensors with a `loss` is needed"),
        ({"accuracy": 1.0}, "Site.metrics returned the keys accuracy; a dict"),
        (
            {"loss": torch.ones(3)},
            "Site.metrics returned a tensor of shape [3] as loss; a scalar tensor is needed",
        ),
        ({"loss": 1.0, "odd": "high"}, "Site.metrics returned str as odd; a scalar tensor is needed"),
        (
            {"loss": 1.0, "\x1b[2J": 1.0},
            r"Site.metrics returned a metric called \x1b[2J; a metric's name has 1",
        ),
        ({"loss": 1.0, "m" * 65: 1.0}, "returned a metric called mmm"),
        ({"loss": 1.0, 3: 1.0}, "returned a metric called int; a metric's name"),
        (dict.fromkeys(["loss", *map(str, range(64))], 1.0), "returned 65 metrics; 64 are the most"),
    ],
)
def test_metrics_that_are_none(
    returned: Mapping[str, object] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Site, "metrics", lambda *_: returned)
    with pytest.raises(TaskError) as caught:
        oracle(Site(), (X, Y)).evaluate(0)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda out: out,
            "returned a tensor of shape [4, 3]; a scalar tensor is needed: the mean over the batch",
        ),
        (
            lambda out: out.mean().detach(),
            "does not depend on the parameters; does it call .detach(), .item()",
        ),
    ],
)
def test_losses_that_are_none(loss: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "loss", lambda _self, module, batch: loss(module(batch[0])))
    with pytest.raises(AflError) as caught:
        oracle(Site(), (X, Y)).gradient(0, 1)
    assert message in str(caught.value)


def test_a_layer_that_has_no_shape_yet() -> None:
    with pytest.raises(
        TaskError, match=r"the parameter weight .* has no shape yet \(a lazy layer\); call the"
    ):
        ParameterVector(nn.LazyLinear(3))
