"""A server put back from a state and the outcomes since goes on as if nothing had happened, to the bit."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from core_federation import Federation, Problem

from afl.core.algorithms.registry import server_half
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice, DualChoice, OptimizerChoice
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.results import Outcome

WORKERS, DIM = 4, 30

TOP_K = CompressorChoice("top-k", {"ratio": 0.3})
RAND_K = CompressorChoice("rand-k", {"ratio": 0.3})
INTEGERS = CompressorChoice("rand-k", {"ratio": 0.3, "bits": 4})

CASES = {
    "afl-br": {"name": "afl-br"},
    "sgda": {"name": "sgda"},
    "kl-regularized": {
        "name": "afl-br",
        "dual": DualChoice("kl-regularized", {"temperature": 1, "beta": 0.9}),
    },
    "fixed-share": {"name": "afl-br", "dual": DualChoice("fixed-share", {"uniform": 0.1})},
    "top-k": {"name": "afl-com", "uplink": TOP_K, "downlink": TOP_K},
    "rand-k": {"name": "afl-com", "uplink": RAND_K, "downlink": RAND_K},
    "integers down alone": {"name": "afl-com", "uplink": TOP_K, "downlink": INTEGERS},
    "rand-k, top-k": {"name": "afl-com", "uplink": RAND_K, "downlink": TOP_K},
    "integers": {"name": "afl-com", "uplink": INTEGERS, "downlink": INTEGERS, "tensors": (7, 23)},
    "drfa": {"name": "drfa", "local_steps": 3},
    "drfa, sampled": {"name": "drfa", "local_steps": 3, "sampled": 2},
    "fedavg, samples": {"name": "fedavg", "local_steps": 2, "weigh_by_samples": True},
    "fedavg, adam": {
        "name": "fedavg",
        "local_steps": 2,
        "optimizer": OptimizerChoice("adam"),
        "server_eta": 0.1,
    },
    "fedavg, half": {"name": "fedavg", "local_steps": 2, "server_eta": 0.5},
}


def settings_of(case: str) -> AlgorithmSettings:
    return AlgorithmSettings(workers=WORKERS, rounds=24, block=5, eta_w=0.01, eta_q=0.02, **CASES[case])


class Recorded(Federation):
    """Keeps every outcome as it would be written down, and the state before each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.outcomes: list[Outcome] = []
        self.states = []

    def run(self):
        engine, plain = self.engine, self.engine.advance

        def advance():
            self.states.append(self.state())
            opening = plain()
            outcome = engine.last_outcome
            kept = {name: read_only(array) for name, array in outcome.unsent.items()}
            payload = outcome.payload
            if payload is not None:
                payload = type(payload)(payload.header, (memoryview(bytes(payload.data)),))
            self.outcomes.append(
                Outcome(outcome.step, outcome.losses.copy(), payload, kept, outcome.evaluation)
            )
            return opening

        engine.advance = advance
        return super().run()

    def state(self):
        values, arrays = self.engine.state()
        copied = {name: read_only(np.asarray(array)) for name, array in arrays.items()}
        return json.loads(json.dumps(values)), copied, self.params.numpy().copy()


def read_only(array: np.ndarray) -> np.ndarray:
    """A copy, as what is read back lies in a file's own pages."""
    return np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape)


def everything(engine, params):
    engine.algorithm.settle()
    values, arrays = engine.state()
    return values, {name: np.asarray(array).tobytes() for name, array in arrays.items()}, params.tobytes()


@cache
def recorded(case: str) -> Recorded:
    federation = Recorded(Problem.random(WORKERS, DIM), settings_of(case), evaluate_every=5)
    federation.run()
    return federation


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("start", [0, 1, 2, 7, 11, -1])
def test_a_state_and_its_outcomes_give_the_same_server(case, start):
    settings, federation = settings_of(case), recorded(case)
    outcomes = federation.outcomes
    start %= len(outcomes)
    values, arrays, params = federation.states[start]

    vector = Problem.random(WORKERS, DIM).vector()
    vector.load(params)
    again = RoundEngine(server_half(settings, vector.values, SharedRandomness.from_int(7)), evaluate_every=5)
    again.restore(values, arrays)
    for outcome in outcomes[start:]:
        position = again.step.position
        assert position == outcome.step.position
        opening = again.replay(outcome)
        again.algorithm.settle()
    assert opening is None
    assert everything(again, vector.numpy()) == everything(federation.engine, federation.params.numpy())
