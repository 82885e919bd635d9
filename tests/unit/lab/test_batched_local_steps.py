"""Local steps of several workers in lockstep against those of one worker after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from afl import Classification, SharedRandomness, TaskContext, WorkerData
from afl.core.algorithms.registry import worker_side
from afl.core.algorithms.schedule import Schedule
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import CommittedStep, Kind, Payload, Position, Report, Step
from afl.core.model.parameters import ParameterVector
from afl.core.participant import Participant
from afl.tasks.base import Batch
from afl.tasks.initialization import build_vector
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle

WORKERS = 5
RANDOMNESS = SharedRandomness.from_int(11)
SETTINGS = AlgorithmSettings(
    workers=WORKERS, rounds=20, block=5, eta_w=0.2, eta_q=0.1, name="drfa", local_steps=3
)


class Plain(Classification):
    """Each worker has as many examples as no other, and one minibatch size fits all."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        count = 12 + 5 * worker
        x = torch.randn(count, 6, generator=generator) * (1 + worker)
        y = torch.randint(3, (count,), generator=generator)
        return WorkerData(train=(x, y), test=(x, y))


class Noisy(Plain):
    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        return batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]


class Normalized(Plain):
    buffers = "mean"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class TiedAndFrozen(Plain):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        model[3].weight = model[2].weight
        model[2].bias.requires_grad_(False)
        return model


class Broken(Plain):
    """Worker 2's loss is not a number from the second step on, since its first goes so far."""

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        whole = super().data(worker, context)
        x, y = whole.train
        return WorkerData(train=(x * (1e30 if worker == 2 else 1.0), y), test=whole.test)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


class Process:
    """All workers in one process."""

    def __init__(
        self, kind: type[TaskOracle], task: Classification, settings: AlgorithmSettings, **options: Any
    ) -> None:
        self.vector: ParameterVector = build_vector(task, RANDOMNESS)
        context = TaskContext(WORKERS, RANDOMNESS)
        data = {worker: task.data(worker, context) for worker in range(WORKERS)}
        self.oracle = kind(
            task,
            self.vector,
            data,
            RANDOMNESS,
            batch_size=8,
            evaluation_batch_size=50,
            clip_norm=settings.clip_norm,
            **options,
        )
        side = worker_side(settings, self.vector.dim, RANDOMNESS, range(WORKERS))
        self.participant = Participant(self.vector, side, self.oracle, range(WORKERS), skips_non_finite=True)

    def train(self, round_: int, asked: Sequence[int] = range(WORKERS)) -> list[tuple[Report, list[Payload]]]:
        step = Step(Position(round_, 0), Kind.TRAIN)
        before = self.vector.numpy().copy()
        answers = [
            answer for _, answer in self.participant.take(CommittedStep(step, (), {}, frozenset(asked)))
        ]
        assert np.array_equal(self.vector.numpy(), before)
        return answers


def assert_alike(
    found: list[tuple[Report, list[Payload]]], right: list[tuple[Report, list[Payload]]]
) -> None:
    assert len(found) == len(right)
    for (report, payloads), (right_report, right_payloads) in zip(found, right, strict=True):
        assert report == replace(right_report, loss=report.loss)
        assert report.loss == pytest.approx(right_report.loss, rel=1e-5)
        for payload, right_payload in zip(payloads, right_payloads, strict=True):
            values, wanted = (np.frombuffer(each.data, dtype="<f4") for each in (payload, right_payload))
            assert np.linalg.norm(values - wanted) <= 1e-5 * np.linalg.norm(wanted)


CHANGES: dict[str, dict[str, Any]] = {
    "drfa": {},
    "fedavg": {"name": "fedavg", "weigh_by_samples": True},
    "decay": {"weight_decay": 0.1, "schedule": Schedule(then="cosine")},
    "clipped": {"clip_norm": 0.4},
}


@pytest.mark.parametrize("memory", [1, 64 << 20], ids=["one by one", "at once"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("task", [Plain, Noisy, Normalized, TiedAndFrozen])
def test_they_are_the_same_to_rounding(task: type[Plain], changes: dict[str, Any], memory: int) -> None:
    settings = replace(SETTINGS, **changes)
    batched = Process(BatchedOracle, task(), settings, memory=memory)
    plain = Process(TaskOracle, task(), settings)
    # The last synchronization is shorter.
    for round_ in (1, 2, 7):
        assert_alike(batched.train(round_), plain.train(round_))
    for worker in range(WORKERS):
        for process in (batched, plain):
            process.vector.buffers.select(worker)
        for found, right in zip(batched.vector.module.buffers(), plain.vector.module.buffers(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_only_the_asked_workers_steps_are_computed() -> None:
    drawn: list[int] = []

    class Seen(BatchedOracle):
        def minibatch(self, worker: int, *given: Any) -> Batch:
            drawn.append(worker)
            return super().minibatch(worker, *given)

    batched, plain = (Process(kind, Normalized(), SETTINGS) for kind in (Seen, TaskOracle))
    for round_, asked in ((1, [0, 3, 4]), (2, [1, 3])):
        drawn.clear()
        assert_alike(batched.train(round_, asked), plain.train(round_, asked))
        assert sorted(drawn) == sorted(asked * SETTINGS.local_steps)


def test_a_worker_whose_steps_are_not_finite_leaves_the_others_as_they_were() -> None:
    batched, plain = (Process(kind, Broken(), SETTINGS) for kind in (BatchedOracle, TaskOracle))
    found, right = batched.train(1), plain.train(1)
    assert [bool(report.missing) for report, _ in found] == [False, False, True, False, False]
    assert found[2][0].missing == right[2][0].missing
    assert_alike(found, right)


def test_losses_where_nothing_is_a_number_are_told() -> None:
    class NoNumber(Plain):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return super().loss(model, batch) * math.nan

    for kind in (BatchedOracle, TaskOracle):
        process = Process(kind, NoNumber(), SETTINGS)
        assert {report.missing for report, _ in process.train(1)} == {"the loss is nan"}
