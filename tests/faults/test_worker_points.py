"""A worker dies at each point that there is, in one run: the result is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_cases import GROUPS, config_of, quickly

from support import Drill, Faults, result_of
from support.longer import but_long

FIRST = (
    "worker.before-journal:3:kill",
    "worker.mid-journal:4:kill",
    "worker.after-journal:3:kill",
    "worker.mid-chunk:4:kill",
    "worker.before-apply:5:kill",
)
SECOND = (
    "worker.after-journal:3:kill",
    "worker.after-journal:2:stop",
)


@pytest.mark.parametrize("algorithm", but_long(quickly("top-k", "integers", "mean-norm"), "integers"))
def test_workers_that_die_at_every_point_lose_nothing(tmp_path: Path, undisturbed, algorithm):
    drill = Drill(config_of(algorithm), tmp_path, GROUPS)
    federation = drill.run(Faults({GROUPS[1]: FIRST, GROUPS[0]: SECOND}))
    assert drill.starts(GROUPS[1]) == len(FIRST) + 1
    assert not any(server.logged("lost_residual") for server in federation.servers)
    assert result_of(federation) == undisturbed(algorithm)
    assert not list(tmp_path.glob("afl-journal/*/*.journal")), "a journal outlives its run"
