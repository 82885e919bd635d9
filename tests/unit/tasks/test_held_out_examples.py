"""What is held out of a worker's training examples: in no gradient, and all that a held-out loss sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from afl import Task, TaskContext, WorkerData
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import DataError, TaskError
from afl.tasks.base import Batch, Examples
from afl.tasks.initialization import build_vector
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle

RANDOMNESS = SharedRandomness.from_int(3)


class Numbers(Task):
    """The examples are the numbers 0 to n-1; what a batch held is seen in ``seen``."""

    allow_smaller_batch = True

    def __init__(self, metric: str = "sum") -> None:
        self.seen: list[Tensor] = []
        self.metric = metric

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.seen.append(batch[0])
        return (model(batch[0].reshape(-1, 1)) ** 2).mean()

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": batch[0].mean(), self.metric: batch[0].mean()}


def numbers(count: int) -> tuple[Tensor]:
    return (torch.arange(count, dtype=torch.float32),)


def oracle_of(task: Task, train: dict[int, Examples], **options: Any) -> TaskOracle:
    data = {worker: WorkerData(examples, (torch.full((3,), -1.0),)) for worker, examples in train.items()}
    given = {"batch_size": 4, "evaluation_batch_size": 2, "loss_of_held_out": True, **options}
    return TaskOracle(task, build_vector(task, RANDOMNESS), data, RANDOMNESS, **given)


@pytest.mark.parametrize("form", [tuple, lambda tensors: TensorDataset(*tensors)], ids=["tensors", "dataset"])
@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 60), share=st.floats(0.01, 0.99), worker=st.integers(0, 5))
def test_gradients_and_held_out_losses_have_no_example_in_common(
    form: Callable[[Any], Examples], count: int, share: float, worker: int
) -> None:
    held = round(share * count)
    if not 0 < held < count:
        return
    task = Numbers()
    oracle = oracle_of(task, {worker: form(numbers(count))}, held_out=share)
    assert oracle.train_examples(worker) == count - held
    rounds = range(1, 12)
    sizes = [oracle.gradient(worker, round_)[1] for round_ in rounds]
    trained, task.seen = task.seen, []
    sizes_of_losses = [oracle.loss(worker, round_)[1] for round_ in rounds]
    measured = task.seen
    assert sizes == [min(4, count - held)] * len(rounds) == [len(batch) for batch in trained]
    assert sizes_of_losses == [min(4, held)] * len(rounds) == [len(batch) for batch in measured]
    for batch in trained + measured:
        assert len(batch.unique()) == len(batch), "drawn with replacement"
    drawn = set(RANDOMNESS.stream(Purpose.HELD_OUT_SPLIT, worker=worker).subset(count, held).tolist())
    assert set(torch.cat(measured).tolist()) <= drawn
    assert set(torch.cat(trained).tolist()).isdisjoint(drawn)
    found, examples = oracle.evaluate(worker)
    assert examples == 3
    assert found == pytest.approx(
        {"loss": -1.0, "sum": -1.0} | dict.fromkeys(("held_out_loss", "held_out_sum"), sum(drawn) / held)
    )


def test_without_it_nothing_is_held_out_and_a_loss_is_of_training_examples() -> None:
    task = Numbers()
    oracle = oracle_of(task, {0: numbers(4)})
    assert oracle.train_examples(0) == 4
    oracle.loss(0, 1)
    assert task.seen[0].tolist() == [0, 1, 2, 3]
    assert oracle.evaluate(0)[0] == {"loss": -1.0, "sum": -1.0}


def test_batched_gradients_are_of_the_same_examples() -> None:
    task = Numbers()
    data = {worker: WorkerData(numbers(20), numbers(3)) for worker in (0, 1)}
    options: dict[str, Any] = {"batch_size": 4, "evaluation_batch_size": 2, "held_out": 0.4}
    alone = TaskOracle(task, build_vector(task, RANDOMNESS), data, RANDOMNESS, **options)
    batched = BatchedOracle(task, build_vector(task, RANDOMNESS), data, RANDOMNESS, **options)
    for worker in data:
        loss = batched.loss(worker, 1)
        assert loss == pytest.approx(alone.loss(worker, 1), rel=1e-6)
        torch.testing.assert_close(batched.gradient(worker, 1, 1.0)[2], alone.gradient(worker, 1, 1.0)[2])


@pytest.mark.parametrize(("count", "share", "held"), [(4, 0.1, 0), (4, 0.9, 4), (1, 0.5, 0), (1, 0.6, 1)])
def test_one_example_must_be_on_either_side(count: int, share: float, held: int) -> None:
    expected = (
        rf"worker 2 has {count} training examples, of which task.held_out \({share}\) would hold out {held}; "
        "at least one must be held out and one be left to train with"
    )
    with pytest.raises(DataError, match=expected):
        oracle_of(Numbers(), {1: numbers(50), 2: numbers(count)}, held_out=share)


def test_what_is_held_out_is_missing_from_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "allow_smaller_batch", False)
    expected = r"worker 0 has 3 training examples besides the 2 that are held out, fewer than task.batch_size"
    expected += r" \(\d+\); lower task.batch_size or task.held_out, or set"
    with pytest.raises(DataError, match=expected):
        oracle_of(Numbers(), {0: numbers(5)}, held_out=0.4)


@pytest.mark.parametrize("name", ["held_out_sum", "n" * 56])
def test_a_metric_leaves_room_for_its_name_with_what_is_held_out(name: str) -> None:
    oracle_of(Numbers(name), {0: numbers(5)}).evaluate(0)
    with pytest.raises(
        TaskError, match=f"Numbers.metrics returned a metric called {name}; with task.held_out"
    ):
        oracle_of(Numbers(name), {0: numbers(5)}, held_out=0.4).evaluate(0)
    longest = oracle_of(Numbers("n" * 55), {0: numbers(5)}, held_out=0.4).evaluate(0)[0]
    assert max(map(len, longest)) == 64
