"""Models with running statistics, without sockets: hosting, arrivals and cuts change no bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from core_federation import Federation, Outcome, TaskSubject

from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.tasks.base import Task
from support.tests_tasks import LocalNorm, MeanNorm

WORKERS, ROUNDS, EVERY = 4, 11, 4

TOP_K = CompressorChoice("top-k", {"ratio": 0.3})
SETTINGS = {
    "afl-br": AlgorithmSettings(WORKERS, ROUNDS, 5, 0.05, 0.1, name="afl-com"),
    "top-k": AlgorithmSettings(WORKERS, ROUNDS, 5, 0.05, 0.1, TOP_K, TOP_K, name="afl-com"),
    "drfa": AlgorithmSettings(WORKERS, ROUNDS, 1, 0.05, 0.01, name="drfa", local_steps=3),
    "drfa of b": AlgorithmSettings(WORKERS, ROUNDS, 1, 0.05, 0.01, name="drfa", local_steps=3, sampled=2),
    "fedavg": AlgorithmSettings(WORKERS, ROUNDS, 1, 0.05, 0.0, name="fedavg", local_steps=3),
}

APART = [(0,), (1,), (2,), (3,)]


def run(case: str, task: Task, hosts: Sequence[Sequence[int]], chaos: int | None = None) -> Outcome:
    subject = TaskSubject(task, WORKERS, batch_size=6)
    federation = Federation(subject, SETTINGS[case], evaluate_every=EVERY, hosts=hosts, chaos=chaos)
    outcome = federation.run()
    assert chaos is None or federation.resumed > 0
    return outcome


@pytest.mark.parametrize("task", [LocalNorm, MeanNorm])
@pytest.mark.parametrize("case", SETTINGS)
def test_hosted_together_or_apart_the_results_are_the_same(case: str, task: type[Task]) -> None:
    right = run(case, task(), APART)
    for hosts, chaos in (([(0, 1, 2, 3)], None), ([(0, 2), (1, 3)], 1), ([(3,), (0, 1, 2)], 2)):
        found = run(case, task(), hosts, chaos)
        assert found.server.tobytes() == right.server.tobytes()
        np.testing.assert_array_equal(found.losses, right.losses)
        assert found.evaluations == right.evaluations
    assert all(evaluation.diverged == () for evaluation in right.evaluations)
    assert len(right.evaluations) >= 3
