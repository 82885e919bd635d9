"""Who is to blame, on real processes: the task's code, afl's own, or a machine that is short of memory."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from support.federation import Federation

CONFIG: dict[str, Any] = {
    "workers": 1,
    "algorithm": {"name": "drfa", "rounds": 3, "eta_w": 0.01, "eta_q": 0.1, "local_steps": 1, "sampled": 1},
    "evaluation": {"every": 1},
}
SPARE_KB = 30_000
"""Of address space beyond what the server has when it listens: less than one vector of its model."""


def unlucky(of: str) -> dict[str, Any]:
    return {**CONFIG, "task": {"name": "tests_tasks:Unlucky", "options": {"of": of}, "batch_size": 8}}


@pytest.mark.parametrize(
    ("of", "code", "said", "is_traced"),
    [
        ("memory", ExitCode.SHORTAGE, "out of memory: RuntimeError: ", False),
        (
            "helper",
            ExitCode.SHORTAGE,
            "a helper process of the task",
            False,
        ),
        ("afl", ExitCode.INTERNAL, "afl itself failed: TypeError: 'NoneType'", True),
    ],
)
def test_what_a_worker_ends_on(of: str, code: ExitCode, said: str, is_traced: bool, tmp_path: Path) -> None:
    with Federation(unlucky(of), tmp_path) as federation:
        worker = federation.start("0", "--task", "tests_tasks:Unlucky")
        worker.expect(code)
        (ended,) = worker.logged("ended")
        assert ended["message"].startswith(f"worker 0, round 1: {said}")
        failed = federation.server.wait_for("worker_failed")
        assert failed["message"].startswith(f"worker 0, round 1 failed: {said}")
        for process in (worker, federation.server) if is_traced else ():
            process.expect_traceback("journal.py")


def test_a_task_that_ends_the_process_as_if_all_were_well_is_said_to(tmp_path: Path) -> None:
    with Federation(unlucky("exit"), tmp_path) as federation:
        worker = federation.start("0", "--task", "tests_tasks:Unlucky")
        worker.expect(ExitCode.CONFIG)
        (ended,) = worker.logged("ended")
        said = r".*/tests_tasks\.py:\d+ ended this process with os\._exit\(0\) before the run was over"
        assert re.match(said, ended["message"])


@pytest.mark.long
def test_a_server_that_cannot_allocate_its_broadcast_ends_and_is_resumed(tmp_path: Path) -> None:
    config = {**CONFIG, "task": {"name": "tests_tasks:Wide", "batch_size": 1}}
    # OpenMP ends a process whose threads it cannot start.
    with Federation(config, tmp_path, environment={"OMP_NUM_THREADS": "1"}) as federation:
        server, address = federation.server, federation.address
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
        size = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmSize:"))
        limit = 1024 * (size + SPARE_KB)
        resource.prlimit(server.pid, resource.RLIMIT_AS, (limit, limit))
        worker = federation.start("0", "--task", "tests_tasks:Wide", server=address)
        server.expect(ExitCode.SHORTAGE)
        (over,) = server.logged("run_over")
        assert "out of memory" in over["message"]
        assert worker.is_running, "it waits for the server"
        federation.start_server("--set", f"server.listen={address}")
        federation.finish()
