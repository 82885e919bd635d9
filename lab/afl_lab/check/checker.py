"""All checks, in the order in which one needs the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from afl.config import Config, config_from_mapping, load_config
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.tasks import Task, TaskContext, WorkerData
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.user_code import as_module_path
from afl_lab.check.averaging import check_averaging
from afl_lab.check.costs import dry_run, estimate, kept_for_backward, show_costs
from afl_lab.check.data import Parts, check_data
from afl_lab.check.examples import Part, look_at
from afl_lab.check.findings import Report, StoppedError, blaming
from afl_lab.check.learning import TRIED_WORKERS, check_learning, check_outputs, describe_model
from afl_lab.check.repeating import check_gradients, check_second_process
from afl_worker.training.oracle import TaskOracle

DEFAULT_WORKERS = 3

SEED = 1
"""Of a configuration that names none."""


def check_task(config: Path | str, *, task: str | None = None, workers: int | None = None) -> Report:
    """Try a task with a run's configuration, for your own tests.

    Args:
        config: the file.
        task: another task than the configuration's: a name, ``package.module:Class`` or ``file.py:Class``.
        workers: another number of workers.

    Raises:
        afl.ConfigError: if the configuration is wrong.
    """
    return check_config(configured(Path(config), task, workers))


def configured(
    path: Path | None, task: str | None, workers: int | None, overrides: Sequence[str] = ()
) -> Config:
    """The configuration in a file, or one that most tasks can be tried with.

    Raises:
        afl.ConfigError: if it is wrong.
    """
    given = list(overrides)
    if workers is not None:
        given.append(f"workers={workers}")
    if path is not None:
        if task is not None:
            given.append(f"task.name={as_module_path(task)}")
        config = load_config(path, given)
    else:
        assert task is not None
        config = load_config_of_defaults(as_module_path(task), workers or DEFAULT_WORKERS)
    return config if config.run.seed is not None else config.with_seed(SEED)


def load_config_of_defaults(task: str, workers: int) -> Config:
    """AFL-Com with a tenth of the values, as ``afl new`` has it."""
    return config_from_mapping(
        {
            "workers": workers,
            "task": {"name": task},
            "algorithm": {
                "name": "afl-com",
                "rounds": 1000,
                "eta_w": 0.1,
                "eta_q": 0.05,
                "uplink": {"name": "rand-k", "ratio": 0.1},
            },
        },
        "afl check's own configuration",
    )


def check_config(config: Config) -> Report:
    """Try a task with a configuration that has its seed; whatever the task's code raises is in the report."""
    report = Report(config.task.name)
    with contextlib.suppress(StoppedError), _threads(config.worker.threads):
        _check(report, config)
    return report


def _check(report: Report, config: Config) -> None:
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    with blaming(report, f"loading {config.task.name}"):
        task = load_task(config.task.name, config.task.options, allow_path=True)
    with blaming(report, "model()"):
        vector = build_vector(task, randomness)
    describe_model(report, task, vector)
    parts, kept = _data(report, config, task, TaskContext(config.workers, randomness))
    check_data(report, task, parts, config.task.batch_size)
    if report.errors:
        raise StoppedError
    with blaming(report, "the workers' data"):
        oracle = _oracle(config, task, vector, kept, randomness)
    check_learning(report, task, vector, oracle, list(kept))
    if report.errors:
        raise StoppedError
    tests = {worker: test.count for worker, (_, test) in parts.items()}
    check_averaging(
        report, task, oracle, list(kept), tests=tests, evaluation_batch_size=config.task.evaluation_batch_size
    )
    # Measured before another gradient replaces what the first has left.
    activations = kept_for_backward(task, oracle, min(kept))
    check_gradients(report, oracle, min(kept))
    check_outputs(report, task, oracle, min(kept))
    # From the beginning again: what was computed has changed buffers.
    check_second_process(report, config, build_vector(task, randomness), parts)
    if report.errors:
        raise StoppedError
    points = dry_run(report, config, task)
    largest = max(train.nbytes + test.nbytes for train, test in parts.values())
    costs = estimate(points, config, vector, activations=activations, data=largest)
    show_costs(report, costs, config)
    if costs.up + costs.down >= costs.uncompressed and config.algorithm.takes("uplink"):
        report.note(
            "algorithm.uplink",
            "it saves nothing: each message is as long as an uncompressed one",
            "rand-k with ratio 0.1 sends a tenth",
        )


def _data(
    report: Report, config: Config, task: Task, context: TaskContext
) -> tuple[Parts, dict[int, WorkerData]]:
    """All workers' examples, looked at; those of the first few are kept."""
    parts: dict[int, tuple[Part, Part]] = {}
    kept: dict[int, WorkerData] = {}
    for worker in range(config.workers):
        with blaming(report, f"data({worker})"):
            data = task.data(worker, context)
            if not isinstance(data, WorkerData):
                report.error(
                    f"data({worker})",
                    f"it returns {type(data).__name__}",
                    "return afl.WorkerData(train=..., test=...)",
                )
                raise StoppedError
            parts[worker] = (look_at(data.train), look_at(data.test))
        if worker < TRIED_WORKERS:
            kept[worker] = data
    return parts, kept


def _oracle(
    config: Config,
    task: Task,
    vector: ParameterVector,
    data: dict[int, WorkerData],
    randomness: SharedRandomness,
) -> TaskOracle:
    return TaskOracle(
        task,
        vector,
        data,
        randomness,
        batch_size=config.task.batch_size,
        evaluation_batch_size=config.task.evaluation_batch_size,
    )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many threads as the run's workers have: a gradient's bits depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
