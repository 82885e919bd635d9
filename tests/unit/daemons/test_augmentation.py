"""What a task changes in its minibatches at random depends on seed, worker and round alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afl import Classification, SharedRandomness, TaskContext, WorkerData
from afl.tasks.initialization import build_vector
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle

WORKERS, EXAMPLES = 2, 24


class Noisy(Classification):
    """Gets noise in place; the losses of the changed and unchanged batch differ."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 3)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        x = torch.randn(EXAMPLES, 6, generator=generator)
        y = torch.randint(3, (EXAMPLES,), generator=generator)
        return WorkerData(train=(x, y), test=(x, y))

    def augment(
        self, batch: tuple[torch.Tensor, ...], generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        batch[0].add_(torch.randn(batch[0].shape, generator=generator))
        return batch


class Plain(Noisy):
    augment = Classification.augment


def oracle_of(task: Noisy, kind: type[TaskOracle] = TaskOracle, clip_norm: float | None = None) -> TaskOracle:
    randomness = SharedRandomness.from_int(3)
    context = TaskContext(WORKERS, randomness)
    data = {worker: task.data(worker, context) for worker in range(WORKERS)}
    # All examples are a batch: nothing but the noise differs from round to round.
    return kind(
        task,
        build_vector(task, randomness),
        data,
        randomness,
        batch_size=EXAMPLES,
        evaluation_batch_size=EXAMPLES,
        clip_norm=clip_norm,
    )


@pytest.mark.parametrize("kind", [TaskOracle, BatchedOracle])
def test_the_noise_is_that_of_the_round_and_worker_whatever_was_drawn_before(kind: type[TaskOracle]) -> None:
    one, other = oracle_of(Noisy(), kind), oracle_of(Noisy(), kind)
    first = one.gradient(0, 1)[2].clone(), one.gradient(1, 1)[2].clone()
    torch.randn(7)
    later = other.gradient(0, 2)[2].clone()
    assert torch.equal(other.gradient(1, 1)[2], first[1])
    assert torch.equal(other.gradient(0, 1)[2], first[0])
    assert not torch.equal(later, first[0])


def test_only_gradients_see_it() -> None:
    noisy, plain = oracle_of(Noisy()), oracle_of(Plain())
    assert noisy.gradient(0, 1)[0] != plain.gradient(0, 1)[0]
    # The examples themselves are as they were.
    assert noisy.loss(0, 1) == plain.loss(0, 1)
    assert noisy.evaluate(0) == plain.evaluate(0)


def test_a_clipped_gradient_has_the_largest_norm_before_its_weight() -> None:
    free = oracle_of(Noisy()).gradient(0, 1, 0.5)[2].numpy()
    found = oracle_of(Noisy(), clip_norm=0.01).gradient(0, 1, 0.5)[2].numpy()
    assert np.linalg.norm(found) == pytest.approx(0.005, rel=1e-6)
    np.testing.assert_allclose(found / np.linalg.norm(found), free / np.linalg.norm(free), rtol=1e-5)
