"""Workers' processes that die between any two journal entries, and others that go on from their journals.

The real participants, journals and oracles, without sockets; compared to the bit with a run without deaths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_federation import Federation, Outcome, Subject, TaskSubject
from torch import Tensor, nn

from afl.core.algorithms.registry import worker_side
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice, OptimizerChoice
from afl.core.messages import CommittedStep, Kind, Step
from afl.core.model.parameters import ParameterVector
from afl.core.participant import Answer, Oracle, Participant
from afl.core.randomness import SharedRandomness
from afl.tasks.base import TaskContext
from afl_server.federation.broadcast import model_payloads
from afl_worker.journal import Journals
from afl_worker.training.batched import BatchedOracle
from support.tests_tasks import LocalNorm, MeanNorm

WORKERS = 4
HOSTS = ((0, 1, 3), (2,))
TOP_K = CompressorChoice("top-k", {"ratio": 0.3})
SETTINGS = {
    "top-k": AlgorithmSettings(WORKERS, 8, 3, 0.05, 0.1, TOP_K, TOP_K),
    "rand-k": AlgorithmSettings(WORKERS, 8, 3, 0.05, 0.1, *[CompressorChoice("rand-k", {"ratio": 0.3})] * 2),
    "integers": AlgorithmSettings(WORKERS, 8, 3, 0.05, 0.1, *[CompressorChoice("identity", {"bits": 5})] * 2),
    "identity": AlgorithmSettings(WORKERS, 8, 3, 0.05, 0.1),
    "fedavg": AlgorithmSettings(
        WORKERS, 12, 1, 0.05, 0.0, name="fedavg", local_steps=2, weigh_by_samples=True
    ),
    "fedavg, adam": AlgorithmSettings(
        *(WORKERS, 12, 1, 0.05, 0.0),
        name="fedavg",
        local_steps=2,
        optimizer=OptimizerChoice("adam"),
        server_eta=0.01,
    ),
    "drfa of b": AlgorithmSettings(WORKERS, 12, 1, 0.05, 0.01, name="drfa", local_steps=2, sampled=3),
}


class Cumulative(MeanNorm):
    """Statistics that weigh all batches alike, by a count that no mean is taken of."""

    def model(self) -> nn.Module:
        model = super().model()
        model[1] = nn.BatchNorm1d(5, momentum=None)  # type: ignore[operator]
        return model


class _Memory(nn.Module):
    """Adds the mean of the inputs that it has seen in training, which it has none of at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            mean = inputs.detach().mean(dim=0)
            self.seen = mean if self.seen is None else torch.cat([self.seen, mean])
        return inputs if self.seen is None else inputs + self.seen.mean()


class Growing(LocalNorm):
    """A buffer that is there, and grows, only once there was training."""

    def model(self) -> nn.Module:
        return nn.Sequential(_Memory(), super().model())


class Batched(TaskSubject):
    """All gradients of a process in one call."""

    def oracle(self, vector: ParameterVector, workers: Sequence[int]) -> Oracle:
        context = TaskContext(self.workers, self._randomness)
        data = {worker: self._task.data(worker, context) for worker in workers}
        return BatchedOracle(
            self._task, vector, data, self._randomness, batch_size=self._batch_size, evaluation_batch_size=4
        )


class Mortal:
    """One process's participant, and after its death the next.

    Args:
        dies: after how many of a step's answers it dies, for each step; ``None`` for not.
    """

    def __init__(
        self,
        federation: Federation,
        index: int,
        subject: Subject,
        folder: Path,
        dies: Callable[[int], int | None],
    ) -> None:
        self.workers = federation.participants[index].workers
        self.deaths = 0
        self._federation = federation
        self._index = index
        self._subject = subject
        self._folder = folder
        self._dies = dies
        self._journals: Journals | None = None
        self._start()

    @property
    def vector(self) -> ParameterVector:
        return self._participant.vector

    def _start(self) -> None:
        if self._journals is not None:
            self._journals.close()
        vector = self._subject.vector()
        settings = self._federation.algorithm.settings
        side = worker_side(settings, vector.dim, SharedRandomness.from_int(7), self.workers)
        self._journals = Journals(self._folder, "run", vector.layout_hash(), self.workers, "process")
        oracle = self._subject.oracle(vector, self.workers)
        self._participant = Participant(vector, side, oracle, self.workers, journal=self._journals)
        self._participant.resume(self._journals.read(), self._federation.engine.buffers_averaged)
        self._federation.sides[self._index] = side

    def close(self) -> None:
        assert self._journals is not None
        self._journals.close()

    def take(self, committed: CommittedStep) -> Iterator[tuple[Kind, Answer]]:
        asked = [w for w in self.workers if committed.participants is None or w in committed.participants]
        dies = self._dies(len(asked))
        answers = self._participant.take(committed)
        if dies is None:
            yield from answers
            return
        sent = [flat(answer) for _, (_, answer) in zip(range(dies), answers, strict=False)]
        self.deaths += 1
        self._start()
        position = committed.step.position
        algorithm = self._federation.algorithm
        algorithm.settle()
        params = algorithm.worker_params
        payloads = model_payloads(self._federation.vector, params, algorithm.companions)
        model = Step(position, Kind.MODEL, tuple(payload.header for payload in payloads))
        assert not list(self._participant.take(CommittedStep(model, tuple(p.data for p in payloads), {})))
        rest = [w for w in asked if self._participant.reported(w) != position]
        if committed.step.kind is Kind.TRAIN:
            assert rest == asked[dies:], "what was journalled is not made again"
        repeated = replace(
            committed, step=Step(position, committed.step.kind), payloads=(), participants=frozenset(rest)
        )
        made = {answer[0].worker: (kind, answer) for kind, answer in self._participant.take(repeated)}
        for worker in asked:
            again = made.get(worker) or self._participant.held(worker, position)
            assert again is not None
            if sent:
                assert flat(again[1]) == sent.pop(0), "what was sent is sent again byte for byte"
            yield again


def flat(answer: Answer) -> tuple[Any, bytes]:
    report, payloads = answer
    return report, b"".join(bytes(payload.data) for payload in payloads)


def outcome(
    subject: Subject, settings: AlgorithmSettings, folder: Path | None = None, seed: int = 0
) -> tuple[Outcome, int]:
    """A run, with processes that die if there is a folder for their journals; and how many did."""
    federation = Federation(subject, settings, evaluate_every=4, hosts=HOSTS)
    if folder is None:
        return federation.run(), 0
    chance = random.Random(seed)

    def dies(answers: int) -> int | None:
        return chance.randint(0, answers) if chance.random() < 0.5 else None

    mortals = [Mortal(federation, index, subject, folder, dies) for index in range(len(HOSTS))]
    federation.participants[:] = mortals  # type: ignore[arg-type]
    try:
        return federation.run(), sum(mortal.deaths for mortal in mortals)
    finally:
        for mortal in mortals:
            mortal.close()


def check(subject: Subject, settings: AlgorithmSettings, folder: Path, seeds: int = 2) -> None:
    right, _ = outcome(subject, settings)
    for seed in range(seeds):
        found, deaths = outcome(subject, settings, folder / str(seed), seed)
        assert deaths > 3
        assert found.server.tobytes() == right.server.tobytes(), seed
        assert [model.tobytes() for model in found.models] == [model.tobytes() for model in right.models]
        assert found.uplink_residuals.tobytes() == right.uplink_residuals.tobytes()
        assert found.downlink_residual.tobytes() == right.downlink_residual.tobytes()
        np.testing.assert_array_equal(found.dual_weights, right.dual_weights)
        np.testing.assert_array_equal(found.losses, right.losses)
        assert found.evaluations == right.evaluations


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("task", [MeanNorm, LocalNorm], ids=["mean", "local"])
def test_workers_that_die_between_any_two_entries_lose_nothing(task, name, tmp_path):
    check(TaskSubject(task(), WORKERS, batch_size=6), SETTINGS[name], tmp_path)


@pytest.mark.parametrize("name", ["top-k", "fedavg"])
def test_buffers_that_no_mean_is_taken_of_outlive_a_mean(name, tmp_path):
    check(TaskSubject(Cumulative(), WORKERS, batch_size=6), SETTINGS[name], tmp_path)


def test_buffers_that_training_makes_and_enlarges_are_kept(tmp_path):
    check(TaskSubject(Growing(), WORKERS, batch_size=6), SETTINGS["top-k"], tmp_path)


@pytest.mark.parametrize("name", ["top-k", "drfa of b", "fedavg"])
@pytest.mark.parametrize("task", [MeanNorm, LocalNorm], ids=["mean", "local"])
def test_a_batched_call_for_some_workers_leaves_the_others_as_they_were(task, name, tmp_path):
    """It computes for all asked workers, also for those whose report is in the journal already."""
    check(Batched(task(), WORKERS, batch_size=6), SETTINGS[name], tmp_path)
