"""What a fresh process makes of a task: the same model layout and the same examples, or not.

``python -m afl_lab.check.division CONFIG WORKER...`` prints it as JSON, for :mod:`afl_lab.check.repeating`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afl.config import Config, load_config
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.tasks import Task, TaskContext
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl_lab.check.data import Parts
from afl_lab.check.examples import look_at


def digests(vector: ParameterVector, parts: Parts) -> dict[str, str]:
    """What two processes must agree on, by name."""
    found = {"layout": vector.layout_hash().hex(), "parameters": vector.digest().hex()}
    for worker, (train, test) in parts.items():
        found[f"train {worker}"], found[f"test {worker}"] = train.digest, test.digest
    return found


def looked_at(task: Task, context: TaskContext, workers: Sequence[int]) -> Parts:
    """The workers' examples, asked of the task once more."""
    parts = {}
    for worker in workers:
        data = task.data(worker, context)
        parts[worker] = (look_at(data.train), look_at(data.test))
    return parts


def made_anew(config: Config, workers: Sequence[int]) -> Mapping[str, str]:
    """:func:`digests` of a task that is made from its configuration."""
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    task = load_task(config.task.name, config.task.options, allow_path=True)
    context = TaskContext(config.workers, randomness)
    return digests(build_vector(task, randomness), looked_at(task, context, workers))


def main(arguments: Sequence[str]) -> None:
    """The command."""
    path, *workers = arguments
    found: Mapping[str, Any] = made_anew(load_config(Path(path), environment={}), [int(w) for w in workers])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
