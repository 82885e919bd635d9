"""Processes killed and links cut at random: the result is the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults_cases import ALGORITHMS, GROUPS, config_of

from support import Drill, Faults, result_of, run_together


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    ["top-k", "hidden", *(pytest.param(name, marks=pytest.mark.slow) for name in ("integers", "masked"))],
)
def test_twenty_kills_and_five_cuts(tmp_path: Path, algorithm):
    config = config_of(algorithm, checkpoint_every=25)
    config["algorithm"] = {**ALGORITHMS[algorithm], "rounds": 200}
    config["evaluation"] = {"every": 50}
    expected = result_of(run_together(config, tmp_path / "quiet", GROUPS))
    drill = Drill(config, tmp_path / "chaos", GROUPS)
    federation = drill.run(Faults(kills=20, cuts=5, pause=0.4))
    assert (drill.kills, drill.cuts) == (20, 5)
    assert result_of(federation) == expected


LARGE = {
    "whole": {"name": "afl-br", "eta_w": 0.5, "eta_q": 0.3},
    "top-k": {"name": "afl-com", "eta_w": 0.5, "eta_q": 0.3, "uplink": {"name": "top-k", "ratio": 0.4}},
    "drfa": {"name": "drfa", "eta_w": 0.3, "eta_q": 0.05, "local_steps": 2},
}


def large(algorithm: str, rounds: int) -> dict[str, Any]:
    """A run whose messages take a second to send, so that most faults find one under way."""
    return {
        "workers": 3,
        "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": 150_000, "examples": 16}},
        "algorithm": {**LARGE[algorithm], "rounds": rounds},
        "evaluation": {"every": 4},
        "server": {"checkpoint_every": 3, "heartbeat": "0.5s", "peer_timeout": "5s", "chunk_bytes": "64KiB"},
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    ["whole", *(pytest.param(name, marks=pytest.mark.slow) for name in ("top-k", "drfa"))],
)
def test_messages_that_are_cut_in_the_middle_go_on_where_they_were(tmp_path: Path, algorithm):
    config = large(algorithm, rounds=5)
    expected = result_of(run_together(config, tmp_path / "quiet", GROUPS))
    drill = Drill(config, tmp_path / "chaos", GROUPS)
    federation = drill.run(Faults(kills=3, cuts=12, pause=1.0, rate=800_000))
    assert result_of(federation) == expected
    kept = [line["kept"] for worker in federation.workers for line in worker.logged("joined_again")]
    assert sum(size > 0 for size in kept) >= 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_hundred_kills_and_fifty_cuts(tmp_path: Path, algorithm):
    config = config_of(algorithm, checkpoint_every=100)
    config["algorithm"] = {**ALGORITHMS[algorithm], "rounds": 2500}
    config["evaluation"] = {"every": 250}
    expected = result_of(run_together(config, tmp_path / "quiet", GROUPS, timeout=1200))
    drill = Drill(config, tmp_path / "chaos", GROUPS)
    federation = drill.run(Faults(kills=200, cuts=50, pause=1.0), timeout=2400)
    assert (drill.kills, drill.cuts) == (200, 50)
    assert result_of(federation) == expected
