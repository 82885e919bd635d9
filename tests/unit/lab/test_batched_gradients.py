"""Gradients of all workers in one call against those of one worker after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from afl import Task, TaskContext, WorkerData
from afl.config import config_from_mapping
from afl.core.randomness import SharedRandomness
from afl.errors import TaskError
from afl.tasks.base import Batch
from afl.tasks.digits import Digits
from afl.tasks.initialization import build_vector
from afl.tasks.synthetic import Synthetic
from afl_lab.simulation.run import simulate
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle

RANDOMNESS = SharedRandomness.from_int(5)


class Mappings(Task):
    """Batches are dictionaries, one of them inside another; some parameters are tied or frozen."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"first": nn.Linear(4, 3), "gate": nn.Linear(3, 3), "last": nn.Linear(3, 3)})
        model["last"].weight = model["gate"].weight
        model["first"].bias.requires_grad_(False)
        return model

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        rows = [
            {"x": torch.randn(4, generator=generator), "more": {"y": torch.randn(3, generator=generator)}}
            for _ in range(30)
        ]
        return WorkerData(train=Rows(rows[:20]), test=Rows(rows[20:]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        layers: Any = model
        hidden = layers["gate"](layers["first"](batch["x"]).tanh())
        return (layers["last"](hidden) - batch["more"]["y"]).square().mean()


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Uneven(Mappings):
    """Worker 1 has fewer examples than a batch."""

    allow_smaller_batch = True

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        whole = super().data(worker, context)
        return WorkerData(Rows(whole.train.rows[:4]), whole.test) if worker == 1 else whole  # type: ignore[union-attr]


TASKS: dict[str, Callable[[], Task]] = {
    "digits": Digits,
    "synthetic": lambda: Synthetic(dim=9),
    "mappings": Mappings,
}


def oracle_of(kind: type[TaskOracle], task: Task, workers: list[int], batch_size: int = 8) -> TaskOracle:
    context = TaskContext(max(workers) + 1, RANDOMNESS)
    return kind(
        task,
        build_vector(task, RANDOMNESS),
        {worker: task.data(worker, context) for worker in workers},
        RANDOMNESS,
        batch_size=batch_size,
        evaluation_batch_size=50,
    )


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("workers", [[0], [0, 1, 2, 3], [1, 3]], ids=str)
def test_they_are_the_same_to_rounding(name: str, workers: list[int]) -> None:
    batched = oracle_of(BatchedOracle, TASKS[name](), workers)
    plain = oracle_of(TaskOracle, TASKS[name](), workers)
    for round_ in (1, 2, 7):
        for worker in workers:
            scale = 0.3 + worker
            loss, examples, gradient = batched.gradient(worker, round_, scale)
            found = gradient.numpy().copy()
            right_loss, right_examples, right = plain.gradient(worker, round_, scale)
            assert loss == pytest.approx(right_loss, rel=1e-5)
            assert examples == right_examples == 8
            error = np.linalg.norm(found - right.numpy()) / np.linalg.norm(right.numpy())
            assert error <= 1e-5
        # What is asked for again is the same, though the first answer was free to change.
        gradient.fill_(torch.nan)
        assert batched.gradient(worker, round_, scale)[2].numpy() == pytest.approx(found, rel=0, abs=0)


def test_everything_else_is_the_plain_oracle_s() -> None:
    task = Digits()
    batched, plain = (oracle_of(kind, task, [0, 1]) for kind in (BatchedOracle, TaskOracle))
    batched.gradient(0, 1)
    assert batched.evaluate(1) == plain.evaluate(1)
    for worker in (0, 1):
        loss, examples = batched.loss(worker, 4)
        right_loss, right_examples = plain.loss(worker, 4)
        assert (loss, examples) == (pytest.approx(right_loss, rel=1e-5), right_examples)
    assert batched.train_examples(1) == plain.train_examples(1)


def test_each_worker_drops_out_on_its_own() -> None:
    """Random layers draw for each worker anew, as in calls of their own."""

    class Dropping(Mappings):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            dropped = nn.functional.dropout(torch.ones(1000), 0.5, model.training)
            return super().loss(model, batch) * 0 + dropped.mean() * next(model.parameters()).sum()

    oracle = oracle_of(BatchedOracle, Dropping(), [0, 1, 2])
    losses = [oracle.gradient(worker, 1)[0] for worker in (0, 1, 2)]
    assert len(set(losses)) == 3


def test_minibatches_of_different_sizes_are_refused() -> None:
    with pytest.raises(
        TaskError, match=r"worker 1 has minibatches of 4 examples and others of 8; .* needs one size for all"
    ):
        oracle_of(BatchedOracle, Uneven(), [0, 1, 2])
    assert oracle_of(BatchedOracle, Uneven(), [0, 1, 2], batch_size=4).gradient(1, 1)[1] == 4


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "afl-br", "eta_q": 0.1},
        {"name": "sgda", "eta_q": 0.1},
        {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "rand-k", "ratio": 0.2}},
        {"name": "drfa", "eta_q": 0.1, "local_steps": 3},
        {"name": "drfa", "eta_q": 0.1, "local_steps": 3, "sampled": 2},
        {"name": "fedavg", "local_steps": 3},
    ],
    ids=lambda algorithm: f"{algorithm['name']} {algorithm.get('sampled', '')}".strip(),
)
def test_a_batched_run_is_close_to_a_plain_one(algorithm: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "workers": 4,
        "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [16]}},
        "algorithm": {"rounds": 15, "eta_w": 0.05, **algorithm},
        "evaluation": {"every": 5},
        "run": {"seed": 2},
    }
    plain = simulate(config_from_mapping(config), tmp_path / "plain")
    batched = simulate(
        config_from_mapping({**config, "worker": {"batch_oracles": True}}), tmp_path / "batched"
    )
    assert batched["communication"] == plain["communication"]
    assert batched["last"]["max_loss"] == pytest.approx(plain["last"]["max_loss"], rel=1e-4)


def test_a_round_that_comes_again_is_computed_at_the_model_as_it_now_is() -> None:
    """As when a server that was put back to an older state leads elsewhere from there."""
    task, workers = Synthetic(), range(3)
    found = []
    for kind in (TaskOracle, BatchedOracle):
        vector = build_vector(task, RANDOMNESS)
        data = {worker: task.data(worker, TaskContext(3, RANDOMNESS)) for worker in workers}
        oracle = kind(task, vector, data, RANDOMNESS, batch_size=4, evaluation_batch_size=4)
        own = []
        for moved in (0.0, 0.5):
            vector.values.add_(moved)
            vector.publish()
            oracle.announce(workers)
            own += [oracle.gradient(worker, 1)[2].clone() for worker in workers]
            own += [torch.tensor([oracle.loss(worker, 1)[0]]) for worker in workers]
        found.append(torch.cat(own))
    torch.testing.assert_close(found[1], found[0])
