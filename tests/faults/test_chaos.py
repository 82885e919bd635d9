"""Processes killed and links cut at random: the result is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_cases import ALGORITHMS, GROUPS, config_of

from support import Drill, Faults, result_of, run_together


def test_twenty_kills_and_five_cuts(tmp_path: Path):
    config = config_of("top-k", checkpoint_every=25)
    config["algorithm"] = {**ALGORITHMS["top-k"], "rounds": 200}
    config["evaluation"] = {"every": 50}
    expected = result_of(run_together(config, tmp_path / "quiet", GROUPS))
    drill = Drill(config, tmp_path / "chaos", GROUPS)
    federation = drill.run(Faults(kills=20, cuts=5, pause=0.7))
    assert (drill.kills, drill.cuts) == (20, 5)
    assert result_of(federation) == expected


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
