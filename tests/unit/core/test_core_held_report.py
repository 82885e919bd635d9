"""How long a worker keeps what it has reported: until it knows that it counted."""

from __future__ import annotations

import numpy as np
from core_federation import Problem

from afl.core.algorithms.local_sgd import model_payload
from afl.core.algorithms.registry import worker_side
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import CommittedStep, Kind, Position, Role, Step
from afl.core.participant import Participant
from afl.core.randomness import SharedRandomness

TRAIN, LOSS = Position(1, 0), Position(1, 1)


def trained(*drawn: int) -> Participant:
    """A process of workers 0 to 2 of which some were drawn to train in round 1, and have."""
    problem, randomness = Problem.random(3, 4), SharedRandomness.from_int(7)
    settings = AlgorithmSettings(3, 9, 1, 0.1, 0.1, name="drfa", local_steps=3, sampled=2)
    vector = problem.vector()
    side = worker_side(settings, vector.dim, randomness, [0, 1, 2])
    participant = Participant(vector, side, problem.oracle(vector, [0, 1, 2]), [0, 1, 2])
    opening = CommittedStep(Step(TRAIN, Kind.TRAIN), (), {}, frozenset(drawn))
    assert [report.worker for _, (report, _) in participant.take(opening)] == list(drawn)
    return participant


def test_it_is_kept_until_its_answer_says_that_it_counted() -> None:
    participant = trained(0, 2)
    participant.counted(0, LOSS)
    assert participant.held(0, TRAIN) is not None, "another report's answer"
    participant.counted(0, TRAIN)
    assert participant.held(0, TRAIN) is None
    assert participant.held(2, TRAIN) is not None
    assert not participant.late(0, TRAIN), "there is nothing to put back"


def test_the_next_step_of_the_process_says_that_all_its_reports_counted() -> None:
    participant = trained(0, 2)
    snapshot = model_payload(np.ones(4, dtype=np.float32), Role.SNAPSHOT)
    step = Step(LOSS, Kind.LOSS, (snapshot.header,))
    committed = CommittedStep(step, (memoryview(bytes(snapshot.data)),), {}, frozenset({1, 2}))
    assert [report.worker for _, (report, _) in participant.take(committed)] == [1, 2]
    assert participant.held(0, TRAIN) is None
    assert participant.held(1, LOSS) is not None
    assert participant.held(2, LOSS) is not None
    # Some may be asked again alone, after a cut: the others' reports for that very step are kept.
    again = CommittedStep(Step(LOSS, Kind.LOSS), (), {}, frozenset({1}))
    assert len(list(participant.take(again))) == 1
    assert participant.held(2, LOSS) is not None
