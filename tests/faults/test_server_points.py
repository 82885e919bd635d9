"""The server dies at each point that there is, in one run: the result is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_cases import GROUPS, config_of, quickly

from support import Drill, Faults, result_of

POINTS = (
    "server.before-log:3:kill",
    "server.mid-log:4:kill",
    "server.mid-replay:1:kill",
    "server.after-log:3:kill",
    "server.mid-broadcast:5:kill",
    "server.mid-checkpoint:1:kill",
    "server.mid-checkpoint:2:kill",
    "server.before-rename:1:kill",
    "server.before-rename:2:kill",
    "server.mid-log:2:stop,server.after-log:4:delay=0.5",
)


@pytest.mark.parametrize("algorithm", quickly("top-k"))
def test_a_server_that_dies_at_every_point_loses_nothing(tmp_path: Path, undisturbed, algorithm):
    drill = Drill(config_of(algorithm), tmp_path, GROUPS)
    federation = drill.run(Faults({"server": POINTS}))
    assert drill.starts("server") >= len(POINTS)
    assert result_of(federation) == undisturbed(algorithm)
