"""Whether the same is computed twice: by one process, and by another.

``python -m afl_lab.check.repeating PARENT CONFIG WORKER...`` is that other process: it prints as JSON what it
makes of the task: the model's layout and parameters, and the workers' examples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from afl.config import Config, dump_config, load_config
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.tasks import TaskContext
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.terminal.children import end_with
from afl_lab.check.data import Parts
from afl_lab.check.examples import look_at
from afl_lab.check.findings import Report, blaming
from afl_worker.training.oracle import TaskOracle

COMPARED_WORKERS = 4
"""Workers whose examples another process is asked for."""


def check_gradients(report: Report, oracle: TaskOracle, worker: int) -> None:
    """Compute one gradient twice, from the same batch."""

    def bits() -> bytes:
        loss, _, gradient = oracle.gradient(worker, 1)
        return repr(loss).encode() + gradient.numpy().tobytes()

    with blaming(report, f"a second gradient of worker {worker}"):
        if bits() == bits():
            return
    report.warn(
        f"worker {worker}'s gradient",
        "two calls with the same batch give different numbers",
        "a run cannot be repeated to the bit then. Does the task draw from numpy's or Python's generator, or"
        " from one of its own (torch's is seeded for each gradient), or keep state between calls?"
        " torch.use_deterministic_algorithms(True) names operations that differ from call to call",
    )


def check_second_process(report: Report, config: Config, vector: ParameterVector, parts: Parts) -> None:
    """Have a process of its own make model and examples, and compare."""
    workers = list(parts)[:COMPARED_WORKERS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        answer = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(path), *map(str, workers)],
            # Where this process finds modules, that one does too; but its sets have an order of their own.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        what = f"it cannot make the task: {said[-1]}"
        advice = "each worker is a process of its own: what does the task need that a new process lacks?"
        report.error("a second process", what, advice)
        return
    theirs = json.loads(answer.stdout.splitlines()[-1])
    ours = digests(vector, {worker: parts[worker] for worker in workers})
    different = [name for name, digest in ours.items() if theirs.get(name) != digest]
    if "frozen" in different:
        report.error(
            "model()",
            "another process makes other frozen parameters",
            'the server refuses such a worker (frozen = "local" in the task): load them from a file',
        )
    if "layout" in different:
        report.error(
            "model()",
            "another process makes a model with other names, shapes or types of parameters",
            "the server refuses such a worker; does the model depend on data, time, or the order of a set?",
        )
    elif "parameters" in different:
        report.note(
            "model()",
            "another process draws other initial parameters, from the same seed",
            "every worker is sent the server's, so nothing is wrong; but another run begins elsewhere."
            " torch's own generator is seeded, numpy's and Python's are not",
        )
    if data := [name for name in different if name not in {"layout", "frozen", "parameters"}]:
        report.error(
            f"worker {data[0].split()[1]}'s data",
            f"another process finds other examples, or in another order ({', '.join(data)})",
            "draw the split from context.randomness or from fixed seeds, and sort what comes from a set or"
            " a folder: a worker that is started again must find the same",
        )


def digests(vector: ParameterVector, parts: Parts) -> dict[str, str]:
    """What two processes must agree on, by name."""
    found = {
        "layout": vector.layout_hash().hex(),
        "frozen": vector.frozen_digest,
        "parameters": vector.digest().hex(),
    }
    for worker, (train, test) in parts.items():
        found[f"train {worker}"], found[f"test {worker}"] = train.digest, test.digest
    return found


def main(parent: str, path: str, *workers: str) -> None:
    """Print as JSON the digests of what a configuration's task makes, for these workers; not longer than the
    process ``parent`` is there."""
    end_with(int(parent))
    config = load_config(Path(path), environment={})
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    task = load_task(config.task.name, config.task.options, allow_path=True)
    vector, context = build_vector(task, randomness), TaskContext(config.workers, randomness)
    data = {worker: task.data(worker, context) for worker in map(int, workers)}
    parts = {worker: (look_at(own.train), look_at(own.test)) for worker, own in data.items()}
    print(json.dumps(digests(vector, parts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
