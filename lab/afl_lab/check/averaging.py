"""Whether metrics are means over the examples, as evaluation takes them to be.

A worker evaluates its test examples in batches of ``task.evaluation_batch_size`` and averages the batches'
metrics by their examples. Of a mean that gives the mean of all; of a root, a median, a ratio or a sum it
gives something that depends on the size of the batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from afl.tasks import Task
from afl.user_code import described
from afl_lab.check.findings import Report
from afl_lab.check.learning import MEAN_LIKE
from afl_worker.training.oracle import TaskOracle

COMPARED_EXAMPLES = 32
"""So few that their parts differ: a root of the mean of many is nearly that of any large part of them."""


def check_averaging(
    report: Report,
    task: Task,
    oracle: TaskOracle,
    workers: Sequence[int],
    *,
    tests: Mapping[int, int],
    evaluation_batch_size: int,
) -> None:
    """Compare the metrics of some test examples with those of unequal parts of them.

    Args:
        workers: those that are tried.
        tests: how many test examples each worker has.
    """
    told: set[str] = set()
    if any(finding.where == f"{type(task).__name__}.loss" for finding in report.findings):
        told.add("loss")
    largest = max(tests, key=lambda worker: tests[worker])
    for worker in workers:
        # No more at once than the run itself puts into one batch.
        most = max(evaluation_batch_size, oracle.batch_size(worker))
        count = min(tests[worker], COMPARED_EXAMPLES, most)
        try:
            whole, again = (oracle.metrics(worker, 0, count) for _ in range(2))
            parts = [(stop - start, oracle.metrics(worker, start, stop)) for start, stop in parts_of(count)]
        except Exception as error:  # noqa: BLE001  # a metric of one's own may raise anything of few examples
            if tests[largest] > evaluation_batch_size:
                _tell_failure(report, task, worker, error)
            return
        # A metric that draws gives other numbers anyway.
        steady = {name: value for name, value in whole.items() if value == again[name]}
        for name, values in no_means(steady, parts).items():
            if name not in told:
                told.add(name)
                shown = f"{count} test examples of worker {worker} have {values}"
                what = f"it is not the mean over the examples: {shown}"
                _tell(report, name, what, worker=largest, most=tests[largest], size=evaluation_batch_size)


def parts_of(count: int) -> list[tuple[int, int]]:
    """Three unequal parts of the first ``count`` examples, two if there are fewer than six; none of one."""
    if count < 2:
        return []
    bounds = sorted({0, count // 6, count // 2, count})
    return list(itertools.pairwise(bounds))


def no_means(whole: Mapping[str, float], parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, str]:
    """By each metric that is no mean over the examples, what it is of the whole and of the parts.

    Args:
        whole: the metrics of all examples.
        parts: of each part its number of examples and its metrics.
    """
    count = sum(size for size, _ in parts)
    shown = {}
    for name, value in whole.items():
        values = [(size, metrics[name]) for size, metrics in parts if name in metrics]
        if not parts or len(values) < len(parts):
            continue
        mean = sum(size * part for size, part in values) / count
        if not abs(mean - value) <= MEAN_LIKE * max(
            abs(each) for each in (value, *(part for _, part in values))
        ):
            listed = ", ".join(f"{part:.4g} ({size} of them)" for size, part in values)
            shown[name] = f"{value:.4g}, and parts of them {listed}"
    return shown


def _tell_failure(report: Report, task: Task, worker: int, error: Exception) -> None:
    report.note(
        f"{type(task).__name__}.metrics",
        f"of a few test examples of worker {worker} it raised {described(error)}",
        "the last batch of an evaluation may have as few, down to one",
    )


def _tell(report: Report, metric: str, what: str, *, worker: int, most: int, size: int) -> None:
    """How bad it is where ``worker`` has the ``most`` test examples, and batches have the ``size``."""
    where = f"the metric {metric}"
    if most <= size:
        report.note(
            where,
            f"{what}. It is right as long as each worker's test examples fit into one batch: at most {most}"
            f", and task.evaluation_batch_size is {size}",
        )
        return
    report.warn(
        where,
        f"{what}. Evaluation averages it over batches of task.evaluation_batch_size ({size}), and worker "
        f"{worker} has {most} test examples: what is reported depends on that size",
        "return the mean of what is summed, such as the squared error, and take the root when you read it;"
        f" or set task.evaluation_batch_size to at least {most}",
    )
