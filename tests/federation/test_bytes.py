"""What the server says that crossed the wire is what an observer between the two counts, to the byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import Federation, Http2Observer

DIM = 100_000
K = DIM // 10
WORKERS, ROUNDS, EVALUATE_EVERY = 2, 12, 5
EVALUATIONS = 3
INDEX_ENTROPY_BYTES = (math.lgamma(DIM + 1) - math.lgamma(K + 1) - math.lgamma(DIM - K + 1)) / math.log(2) / 8
"""``log2 C(d, k)`` bits: the least that a uniformly random support takes."""


@dataclass
class Case:
    """A compressor, the processes that run it, and what it must cost.

    Attributes:
        lean: payload bytes a worker and a round; the wire may add 1 %.
        charge: floats that the paper charges for a payload.
    """

    uplink: dict[str, Any]
    groups: list[str]
    lean: float
    charge: float
    chunk_bytes: int = 1 << 20
    values: int = K
    has_indices: bool = False


CASES = {
    # All workers behind one connection, and payloads of several chunks.
    "identity": Case({"name": "identity"}, ["0-1"], 4 * DIM, DIM, chunk_bytes=1 << 16, values=DIM),
    "rand-k": Case({"name": "rand-k", "ratio": 0.1}, ["0", "1"], 4 * K, K),
    "top-k": Case(
        {"name": "top-k", "ratio": 0.1},
        ["1", "0"],
        4 * K + 1.06 * INDEX_ENTROPY_BYTES,
        K + K * math.ceil(math.log2(DIM)) / 32,
        has_indices=True,
    ),
}


@dataclass
class Outcome:
    case: Case
    communication: dict[str, Any]
    observed: dict[str, int]
    streams: int
    sample: dict[str, float]


@pytest.fixture(scope="module", params=CASES)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    case = CASES[request.param]
    config = {
        "workers": WORKERS,
        # A pause, so that the metrics can be read while the run goes on.
        "task": {
            "name": "tests_tasks:Slow",
            "batch_size": 4,
            "options": {"dim": DIM, "examples": 32, "pause": 0.05},
        },
        "algorithm": {
            "name": "afl-com",
            "rounds": ROUNDS,
            "eta_w": 0.5,
            "eta_q": 0.1,
            "uplink": case.uplink,
        },
        "evaluation": {"every": EVALUATE_EVERY},
        # A heartbeat that is under way while the server ends the stream would be seen and not counted.
        "server": {"chunk_bytes": f"{case.chunk_bytes}B", "heartbeat": "1h", "peer_timeout": "24h"},
    }
    folder: Path = tmp_path_factory.mktemp("bytes")
    with Http2Observer() as observer, Federation(config, folder) as federation:
        for ids in case.groups:
            federation.start(ids, "--task", "tests_tasks:Slow", server=observer.address)
        observer.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 2)
        sample = federation.metrics()
        federation.finish()
        yield Outcome(
            case,
            federation.summary()["communication"],
            {"uplink": observer.uplink, "downlink": observer.downlink},
            observer.streams,
            sample,
        )


@pytest.mark.parametrize("direction", ["uplink", "downlink"])
def test_wire_bytes_are_those_on_the_wire(outcome: Outcome, direction: str) -> None:
    counted = outcome.communication[direction]
    assert outcome.streams == len(outcome.case.groups)
    assert counted["wire_bytes"] == outcome.observed[direction]
    assert sum(counted["wire_bytes_by_kind"].values()) == counted["wire_bytes"]
    assert sum(counted["payload_bytes_by_part"].values()) == counted["wire_bytes"]


@pytest.mark.parametrize("direction", ["uplink", "downlink"])
def test_parts_sum_to_the_wire_at_any_moment(outcome: Outcome, direction: str) -> None:
    wire, parts = (
        sum(
            value
            for name, value in outcome.sample.items()
            if name.startswith(f"{metric}{{") and f'direction="{direction}"' in name
        )
        for metric in ("afl_wire_bytes_total", "afl_payload_bytes_total")
    )
    assert 0 < wire == parts


def test_values_and_indices_are_what_the_payloads_hold(outcome: Outcome) -> None:
    up, down = (
        outcome.communication[direction]["payload_bytes_by_part"] for direction in ("uplink", "downlink")
    )
    assert up["values"] == WORKERS * ROUNDS * 4 * outcome.case.values
    # A process's first model, and each round's update once for each process.
    processes = len(outcome.case.groups)
    assert down["values"] == processes * 4 * (DIM + ROUNDS * outcome.case.values)
    assert bool(up["indices"]) == bool(down["indices"]) == outcome.case.has_indices


def test_float_equivalents_follow_the_paper(outcome: Outcome) -> None:
    charge = outcome.case.charge
    up, down = (outcome.communication[direction]["float_equivalents"] for direction in ("uplink", "downlink"))
    assert up == pytest.approx(WORKERS * ROUNDS * (charge + 1), rel=1e-12)
    # A dual weight goes with the first step, with each update, and with each step that follows an evaluation.
    updates = ROUNDS * (charge + 1)
    assert down == pytest.approx(WORKERS * (DIM + 1 + updates + (EVALUATIONS - 1)), rel=1e-12)


def test_the_wire_is_lean(outcome: Outcome) -> None:
    """Gradient traffic, envelopes and scalars included, is within 1 % of the payload's own bound."""
    bar = 1.01 * outcome.case.lean
    up, down = (
        outcome.communication[direction]["wire_bytes_by_kind"] for direction in ("uplink", "downlink")
    )
    assert 4 * outcome.case.values < up["gradient"] / (WORKERS * ROUNDS) <= bar
    # A broadcast crosses a connection once, whatever the number of workers behind it.
    assert down["gradient"] / (len(outcome.case.groups) * ROUNDS) <= bar
