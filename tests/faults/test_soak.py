"""A long run of a tiny task whose workers are restarted again and again: nothing grows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from support import Federation, Proxy

ROUNDS = int(os.environ.get("AFL_SOAK_ROUNDS", "100000"))
RESTART_EVERY = 1000
LARGEST_SLOPE_KB = 0.05
"""Resident memory of the server a round: 5 MB over 10^5 rounds, the noise of an allocator."""

CONFIG = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": ROUNDS,
        "eta_w": 1e-4,
        "eta_q": 0.01,
        "uplink": {"name": "top-k", "ratio": 0.2},
    },
    "evaluation": {"every": 1000},
    "server": {"checkpoint_every": 200},
}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_files_and_threads_are_flat(tmp_path: Path):
    samples: list[tuple[int, float, int, int, float]] = []
    with Proxy() as door, Federation(CONFIG, tmp_path) as federation:
        workers = [federation.start(ids, server=door.address) for ids in ("0", "1")]
        door.aim(federation.port)
        server = psutil.Process(federation.server.pid)
        for due in range(RESTART_EVERY, ROUNDS, RESTART_EVERY):
            status = federation.wait_until(
                lambda status, due=due: status["round"] >= due or status["state"] == "over", timeout=300
            )
            samples.append(
                (
                    status["round"],
                    server.memory_info().rss / 1024,
                    server.num_fds(),
                    server.num_threads(),
                    server.memory_full_info().uss / 1024,
                )
            )
            turn = due // RESTART_EVERY % 2
            workers[turn].kill()
            federation.workers.remove(workers[turn])
            workers[turn] = federation.start(str(turn), server=door.address)
        federation.finish(timeout=300)
        assert not federation.server.logged("lost_residual")
    rounds, memory, files, threads, own = map(np.array, zip(*samples, strict=True))
    late = len(rounds) // 2
    slope, own_slope = (float(np.polyfit(rounds[late:], values[late:], 1)[0]) for values in (memory, own))
    print(  # noqa: T201  # the figures are what the test is for
        json.dumps(
            {
                "rounds": ROUNDS,
                "kb_a_round": slope,
                "own_kb_a_round": own_slope,
                "mb": [round(value / 1024, 1) for value in memory[:: max(1, len(memory) // 20)]],
                "own_mb": [round(value / 1024, 1) for value in own[:: max(1, len(own) // 20)]],
                "files": [int(files.min()), int(files.max())],
                "threads": [int(threads.min()), int(threads.max())],
                "state_mb": sum(path.stat().st_size for path in (tmp_path / "run/state").iterdir()) / 2**20,
            }
        )
    )
    assert slope < LARGEST_SLOPE_KB * max(1.0, 1e5 / ROUNDS)
    assert files[late:].max() <= files[:late].max() + 2
    assert threads[late:].max() <= threads[:late].max() + 1
