"""A run in one process, without sockets: the engine's steps go to one participant that hosts all workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from afl.algorithms.registry import WorkerSide, server_half
from afl.algorithms.settings import AlgorithmSettings
from afl.engine import Opening, RoundEngine
from afl.initialization import build_vector
from afl.messages import Kind
from afl.participant import CommittedStep, Participant
from afl.randomness import SharedRandomness
from afl.tasks import Task, TaskContext
from afl_worker.oracle import TaskOracle


def trained_models(
    task: Task, settings: AlgorithmSettings, *, seed: int, batch_size: int
) -> Iterator[NDArray[np.float32]]:
    """The models ``w_1 .. w_T`` of a run, each ``[d]``: those at which gradients are taken.

    The server's and the workers' halves are those of a federation, and so is the task's oracle; only
    what lies between them is left out.
    """
    randomness = SharedRandomness.from_int(seed)
    context = TaskContext(settings.workers, randomness)
    workers = range(settings.workers)
    vector = build_vector(task, randomness)
    algorithm = server_half(settings, vector.values.clone(), randomness)
    engine = RoundEngine(algorithm, evaluate_every=settings.rounds)
    data = {worker: task.data(worker, context) for worker in workers}
    oracle = TaskOracle(
        task, vector, data, randomness, batch_size=batch_size, evaluation_batch_size=batch_size
    )
    participant = Participant(vector, WorkerSide(settings, vector.dim, randomness, workers), oracle, workers)
    opening: Opening | None = engine.opening()
    while opening is not None:
        for _, (report, payloads) in participant.take(_committed(opening)):
            engine.begin_report(report)
            for index, payload in enumerate(payloads):
                engine.add_piece(report.worker, index, 0, b"".join(payload.sections))
        if opening.step.kind is Kind.TRAIN:
            yield vector.numpy().copy()
        algorithm.settle()
        opening = engine.advance()


def _committed(opening: Opening) -> CommittedStep:
    return CommittedStep(
        opening.step,
        tuple(memoryview(b"".join(payload.sections)) for payload in opening.payloads),
        {worker: float(weight) for worker, weight in enumerate(opening.dual_weights)},
    )
