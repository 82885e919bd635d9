"""What a task draws from PyTorch's generator depends on seed, worker and round alone; an oracle's time."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from afl import Classification, SharedRandomness, TaskContext, WorkerData
from afl.tasks.initialization import build_vector
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle
from afl_worker.training.timings import Spent

WORKERS = 2


class Dropping(Classification):
    """Dropout in training, and a metric that is drawn."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        x = torch.randn(40, 6, generator=generator)
        y = torch.randint(3, (40,), generator=generator)
        return WorkerData(train=(x, y), test=(x, y))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {**super().metrics(model, batch), "drawn": torch.rand(())}


def make_oracle(
    spent: Spent | None = None,
    kind: type[TaskOracle] = TaskOracle,
    *,
    task: Dropping | None = None,
    evaluation_batch_size: int = 40,
) -> TaskOracle:
    task, randomness = task or Dropping(), SharedRandomness.from_int(3)
    context = TaskContext(WORKERS, randomness)
    data = {worker: task.data(worker, context) for worker in range(WORKERS)}
    # The whole training part is a batch, so that nothing but dropout differs from round to round.
    return kind(
        task,
        build_vector(task, randomness),
        data,
        randomness,
        batch_size=40,
        evaluation_batch_size=evaluation_batch_size,
        spent=spent,
    )


@pytest.fixture
def oracle() -> TaskOracle:
    return make_oracle()


def gradient(oracle: TaskOracle, worker: int, round_: int) -> bytes:
    return oracle.gradient(worker, round_)[2].numpy().tobytes()


def test_a_gradient_with_dropout_is_the_same_whatever_was_drawn_before(oracle: TaskOracle) -> None:
    first = {(worker, round_): gradient(oracle, worker, round_) for worker in (0, 1) for round_ in (1, 2)}
    torch.rand(17)
    again = {(worker, round_): gradient(oracle, worker, round_) for round_ in (2, 1) for worker in (1, 0)}
    assert again == first
    assert len(set(first.values())) == 4


def test_an_evaluation_that_draws_is_the_same(oracle: TaskOracle) -> None:
    first = oracle.evaluate(0)
    torch.rand(17)
    assert oracle.evaluate(0) == first
    assert oracle.evaluate(1)[0]["drawn"] != first[0]["drawn"]


@pytest.mark.parametrize("kind", [TaskOracle, BatchedOracle])
def test_the_time_of_gradients_losses_and_evaluations_is_counted_once(kind: type[TaskOracle]) -> None:
    spent = Spent()
    oracle = make_oracle(spent, kind)
    began = time.perf_counter()
    for compute in (lambda: oracle.gradient(0, 1), lambda: oracle.loss(0, 1), lambda: oracle.evaluate(0)):
        before = spent.wall
        compute()
        assert spent.wall > before
    assert spent.wall <= time.perf_counter() - began


class Large(Dropping):
    """A metric near the end of what a float holds."""

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": torch.tensor(1e308, dtype=torch.float64)}


@pytest.mark.parametrize("batch", [7, 40])
def test_a_finite_mean_is_not_made_infinite_by_its_sum(batch: int) -> None:
    assert make_oracle(task=Large(), evaluation_batch_size=batch).evaluate(0) == ({"loss": 1e308}, 40)
