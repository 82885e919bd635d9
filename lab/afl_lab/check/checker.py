"""All checks, in the order in which one needs the other."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from afl.advice import advice_on
from afl.config import Config, config_from_mapping, load_config
from afl.config.quantities import shown_seconds
from afl.core.randomness import SharedRandomness
from afl.runs.initial_model import load_initial_model
from afl.tasks import Task, TaskContext, WorkerData
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.user_code import as_module_path
from afl_lab.check.averaging import check_averaging
from afl_lab.check.constants import check_constants
from afl_lab.check.costs import check_costs, dry_run, kept_for_backward
from afl_lab.check.data import Parts, check_data
from afl_lab.check.examples import MOST_LOOKED_AT, Part, look_at
from afl_lab.check.findings import Report, StoppedError, blaming
from afl_lab.check.integers import PROPOSED_BITS, check_integers
from afl_lab.check.learning import TRIED_WORKERS, check_learning, check_outputs, describe_model
from afl_lab.check.records import check_records
from afl_lab.check.repeating import COMPARED_WORKERS, check_gradients, check_second_process
from afl_worker.training.oracle import TaskOracle

DEFAULT_WORKERS = 3

FEW_LOOKED_AT = 100
"""Examples of a worker, where there is no time for more."""

DRY_GRADIENTS = 3
"""Of each worker, in the dry run: one a synchronization and step."""

# The share of the time until which these are begun.
DATA_SHARE = 0.3
AVERAGING_SHARE = 0.6

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
    """The configuration in a file; without one AFL-Com that sends a tenth in integers, as ``afl new`` has it.

    Raises:
        afl.ConfigError: if it is wrong.
    """
    if path is not None:
        given = [*overrides]
        given += [] if workers is None else [f"workers={workers}"]
        given += [] if task is None else [f"task.name={as_module_path(task)}"]
        config = load_config(path, given)
    else:
        assert task is not None
        algorithm: dict[str, Any] = {"name": "afl-com", "rounds": 1000, "eta_w": 0.1, "eta_q": 0.05}
        algorithm["uplink"] = {"name": "rand-k", "ratio": 0.1, "bits": PROPOSED_BITS}
        count, name = workers or DEFAULT_WORKERS, as_module_path(task)
        values = {"workers": count, "task": {"name": name}, "algorithm": algorithm}
        config = config_from_mapping(values, "afl check's own configuration")
    return config if config.run.seed is not None else config.with_seed(SEED)


def check_config(
    config: Config,
    *,
    constants: bool = False,
    limit_s: float = math.inf,
    watch: Callable[[str], None] = lambda _: None,
) -> Report:
    """Try a task with a configuration that has its seed; whatever the task's code raises is in the report.

    Args:
        constants: whether the constants of the paper's step sizes are estimated.
        limit_s: what would take longer, and is not essential, is left out, and the report says so.
        watch: is told what is being tried.
    """
    report = Report(config.task.name, limit_s=limit_s, watch=watch)
    with contextlib.suppress(StoppedError), _threads(config.worker.threads):
        _check(report, config, constants=constants)
    report.tell_left_out()
    report.name_sites(config.names)
    return report


def _check(report: Report, config: Config, *, constants: bool) -> None:
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    report.watch("the task and its model")
    with blaming(report, f"loading {config.task.name}"):
        task = load_task(config.task.name, config.task.options, allow_path=True)
    with blaming(report, "model()"):
        vector = build_vector(task, randomness)
    if config.run.initial_model is not None:
        with blaming(report, "run.initial_model"):
            load_initial_model(vector, config.run.initial_model)
    describe_model(report, task, vector)
    for advice in advice_on(config):
        report.warn(*astuple(advice))
    parts, kept = _data(report, task, TaskContext(config.workers, randomness))
    workers, first, size = list(kept), min(kept), config.task.evaluation_batch_size
    check_data(report, task, parts, config.task.batch_size, config.task.held_out)
    report.stop_on_errors()
    with blaming(report, "the workers' data"):
        oracle = TaskOracle(
            task,
            vector,
            kept,
            randomness,
            batch_size=config.task.batch_size,
            evaluation_batch_size=size,
            held_out=config.task.held_out,
            loss_of_held_out=config.algorithm.dual_loss == "held-out",
        )
    rank_by = config.evaluation.rank_by
    evaluation_s = check_learning(report, task, vector, oracle, workers, rank_by=rank_by)
    report.stop_on_errors()
    tests = {worker: test.count for worker, (_, test) in parts.items()}
    if report.has_time("whether metrics are means", share=AVERAGING_SHARE):
        report.watch("whether metrics are means")
        check_averaging(report, task, oracle, workers, tests=tests, size=size)
    # Measured before another gradient replaces what the first has left.
    report.watch("whether gradients repeat")
    activations = kept_for_backward(task, oracle, first)
    started = time.monotonic()
    check_gradients(report, oracle, first)
    gradient_s = (time.monotonic() - started) / 2
    check_outputs(report, task, oracle, first)
    check_records(report, config, task, vector, kept=kept, parts=parts, gradient_s=gradient_s)
    # From the beginning again: what was computed has changed buffers.
    report.watch("a second process")
    check_second_process(report, config, build_vector(task, randomness), parts)
    report.stop_on_errors()
    if constants:
        report.watch("smoothness, and how losses deviate")
        check_constants(report, config, vector, oracle, workers)
    gradients = DRY_GRADIENTS * (config.algorithm.local_steps or 1)
    expected = config.workers * (gradients * gradient_s + evaluation_s)
    what = "the first rounds, and with them what a run costs"
    if not report.has_time(f"{what}: they take {shown_seconds(expected)} here", seconds=expected):
        return
    report.watch(f"the first rounds with {config.workers} workers")
    started = time.monotonic()
    marks = dry_run(report, config, task)
    seconds = time.monotonic() - started
    report.watch("integers in place of float32")
    tried = check_integers(
        report, config, task, dim=vector.dim, dry_seconds=seconds, round_seconds=marks[-1][1] - marks[-2][1]
    )
    largest = max(train.nbytes + test.nbytes for train, test in parts.values())
    check_costs(report, config, marks, vector, tried, activations=activations, data=largest)


def _data(report: Report, task: Task, context: TaskContext) -> tuple[Parts, dict[int, WorkerData]]:
    """All workers' examples, looked at; those of the first few are kept."""
    parts: dict[int, tuple[Part, Part]] = {}
    kept: dict[int, WorkerData] = {}
    most = MOST_LOOKED_AT
    for worker in range(context.workers):
        where = f"data({worker})"
        report.watch(f"the data of worker {worker} of {context.workers}")
        # Another process is asked for those before, and looks at as many.
        if worker == COMPARED_WORKERS or (worker > COMPARED_WORKERS and most > FEW_LOOKED_AT):
            few = f"all but {FEW_LOOKED_AT} examples of workers {worker} to {context.workers - 1}"
            most = most if report.has_time(few, share=DATA_SHARE) else FEW_LOOKED_AT
        with blaming(report, where):
            data = task.data(worker, context)
            if not isinstance(data, WorkerData):
                advice = "return afl.WorkerData(train=..., test=...)"
                report.fail(where, f"it returns {type(data).__name__}", advice)
            parts[worker] = look_at(data.train, most), look_at(data.test, most)
        if worker < TRIED_WORKERS:
            kept[worker] = data
    return parts, kept


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many threads as the run's workers have: a gradient's bits depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
