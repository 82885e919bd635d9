"""A process that a task's code forks never goes on as the one that it was forked from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
import torch
import afl
from afl.config import config_from_mapping
from afl_lab.simulation.run import simulate

class Forking(afl.Task):
    def __init__(self, where="", how=""):
        self._where, self._how = where, how

    def fork(self, where):
        if where != self._where:
            return
        self._where = ""
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == {"raises": 1, "returns": 1, "exits": 3, "ends": 4, "closes": 1}[self._how], code
        elif self._how == "raises":
            raise KeyError("in the child")
        elif self._how == "exits":
            sys.exit(3)
        elif self._how == "ends":
            os._exit(4)
        elif self._how == "closes":
            os.close(2)

    def model(self):
        self.fork("model")
        return torch.nn.Linear(2, 1)

    def data(self, worker, context):
        self.fork("data")
        rows = torch.arange(16.0).reshape(8, 2) / 16 + worker
        return afl.WorkerData(train=(rows, rows.sum(1)), test=(rows, rows.sum(1)))

    def loss(self, model, batch):
        self.fork("loss")
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def metrics(self, model, batch):
        self.fork("metrics")
        return {"loss": self.loss(model, batch)}

sys.modules["forking"] = sys.modules["__main__"]
for place, case in enumerate(sys.argv[1:]):
    where, how, *batched = case.split()
    local = {"name": "drfa", "local_steps": 2, "sampled": 2} if batched else {"name": "afl-br"}
    config = config_from_mapping({
        "workers": 2,
        "task": {"name": "forking:Forking", "batch_size": 4, "options": {"where": where, "how": how}},
        "algorithm": {**local, "rounds": 2, "eta_w": 0.01, "eta_q": 0.1},
        "worker": {"batch_oracles": bool(batched)},
        "run": {"seed": 3},
    })
    try:
        simulate(config, Path(str(place)))
    except OSError:
        print("went on", flush=True)
        raise
    print(case, "is complete", flush=True)
"""

CASES = (
    "model raises",
    "data returns",
    "loss raises",
    "loss returns",
    "loss exits",
    "loss ends",
    "loss closes",
    "loss returns batched",
    "metrics raises",
)


@pytest.mark.long
def test_a_forked_process_that_comes_back_from_a_task_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *CASES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{case} is complete" for case in CASES]
    told = [line for line in done.stderr.splitlines() if line.startswith("a process that the task")]
    hows = [case.split()[1] for case in CASES]
    right = {"raises": "has raised KeyError: 'in the child'", "returns": "has returned"}
    for line, how in zip(told, (how for how in hows if how in right), strict=True):
        assert f"forked {right[how]}, and is ended" in line
