"""What a server says of a round's integer messages is what they were."""

from __future__ import annotations

import json

import numpy as np
import pytest
from core_federation import Federation, Problem

from afl.core.algorithms.registry import server_half
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.payload import unpack
from afl.core.grid import IntegerRound, counted_integers
from afl.core.messages import Payload, Report
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine

WORKERS, DIM, ROUNDS = 3, 40, 12

CASES = {
    "both ways": (CompressorChoice("rand-k", {"ratio": 0.5, "bits": 3}),) * 2,
    "whole vectors": (CompressorChoice("identity", {"bits": 8}),) * 2,
    "of a projection": (CompressorChoice("dct-projection", {"ratio": 0.5, "bits": 4}),) * 2,
    "down alone": (CompressorChoice("top-k", {"ratio": 0.5}), CompressorChoice("identity", {"bits": 4})),
}


def settings_of(case: str) -> AlgorithmSettings:
    up, down = CASES[case]
    return AlgorithmSettings(WORKERS, ROUNDS, 5, 0.01, 0.02, up, down, tensors=(30, 10))


class Watched(Federation):
    """Looks into the messages of each training round, and at what the server says of them."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        super().__init__(Problem.random(WORKERS, DIM), settings, evaluate_every=4, chaos=3)
        self.expected: list[IntegerRound] = []
        self.told: list[IntegerRound | None] = []

    def _deliver(self, answers: list[tuple[Report, list[Payload]]]) -> None:
        super()._deliver(answers)
        self._up = [payload for _, payloads in answers for payload in payloads]
        self._advance, self.engine.advance = self.engine.advance, self._watched  # type: ignore[method-assign]

    def _watched(self) -> object:
        engine, before = self.engine, self.engine.last_round
        self.engine.advance = self._advance  # type: ignore[method-assign]
        engine.catch_up()
        assert self.algorithm.grid is not None
        exponents, limit = self.algorithm.grid.exponents.copy(), self.algorithm.grid.limit
        opening = engine.advance()
        if engine.last_round is before:
            return opening
        outcome = engine.last_outcome
        assert outcome is not None
        assert outcome.payload is not None
        down = outcome.payload
        has_uplink = self._up[0].header.bits > 0
        # Behind the values each message has an integer for each group.
        groups, count = len(exponents), down.header.count - len(exponents)
        seen = np.concatenate(
            [unpack(each.header, each.data).values[:-groups] for each in (self._up if has_uplink else [down])]
        )
        assert len(seen) == count * (WORKERS if has_uplink else 1)
        up_bytes = sum(len(each.data) for each in self._up)
        self.expected.append(
            IntegerRound(
                8 * up_bytes / len(seen) if has_uplink else None,
                8 * len(down.data) / count,
                float(np.mean(seen == 0)),
                float(np.mean(np.abs(seen) == limit)),
                int(min(exponents)),
                int(max(exponents)),
                of_update=not has_uplink,
            )
        )
        assert engine.last_round is not None
        self.told.append(engine.last_round.integers)
        return opening


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_round_is_what_its_messages_were(case: str) -> None:
    federation = Watched(settings_of(case))
    federation.run()
    assert len(federation.told) == ROUNDS
    assert federation.told == federation.expected
    first = federation.expected[0]
    assert 0 < first.at_limit <= 1, "the problem's first gradients lie beyond the first grid"
    assert any(each.smallest_exponent != first.smallest_exponent for each in federation.expected)


def test_nothing_is_said_of_float32() -> None:
    settings = AlgorithmSettings(WORKERS, 2, 5, 0.01, 0.02)
    federation = Federation(Problem.random(WORKERS, DIM), settings, evaluate_every=4)
    federation.run()
    assert federation.engine.last_round is not None
    assert federation.engine.last_round.integers is None
    assert federation.algorithm.unsent() == {}


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_comes_back_says_the_same(case: str) -> None:
    """From a checkpoint; :mod:`test_core_replay` closes rounds again from what was written down."""
    settings, problem = settings_of(case), Problem.random(WORKERS, DIM)
    federation = Federation(problem, settings, evaluate_every=4)
    federation.run()
    engine = federation.engine
    values, arrays = engine.state()
    again = RoundEngine(
        server_half(settings, problem.vector().values, SharedRandomness.from_int(7)), evaluate_every=4
    )
    again.restore(json.loads(json.dumps(values)), {name: np.array(array) for name, array in arrays.items()})
    assert again.last_round is not None
    assert engine.last_round is not None
    assert engine.last_round.integers is not None
    assert again.last_round.integers == engine.last_round.integers


def test_a_state_of_before_there_were_integers_is_read() -> None:
    settings = settings_of("both ways")
    federation = Federation(Problem.random(WORKERS, DIM), settings, evaluate_every=4)
    federation.run()
    values, arrays = federation.engine.state()
    del values["last_round_integers"]
    federation.engine.restore(values, arrays)
    assert federation.engine.last_round is not None
    assert federation.engine.last_round.integers is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_counting_in_blocks(dtype: type) -> None:
    integers = np.random.default_rng(2).integers(-3, 4, 100_003).astype(dtype)
    assert counted_integers(integers, 3).tolist() == [
        len(integers),
        int((integers == 0).sum()),
        int((np.abs(integers) == 3).sum()),
    ]
    assert counted_integers(integers[:0], 3).tolist() == [0, 0, 0]
