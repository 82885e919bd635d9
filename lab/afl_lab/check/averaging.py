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
    size: int,
) -> None:
    """Compare the metrics of some test examples with those of unequal parts of them.

    Args:
        workers: those that are tried.
        tests: how many test examples each worker has.
        size: ``task.evaluation_batch_size``.
    """
    told = (
        {"loss"} if any(found.where == f"{type(task).__name__}.loss" for found in report.findings) else set()
    )
    largest = max(tests, key=lambda worker: tests[worker])
    most = tests[largest]
    for worker in workers:
        # No more at once than the run itself puts into one batch.
        count = min(tests[worker], COMPARED_EXAMPLES, max(size, oracle.batch_size(worker)))
        try:
            whole, again = (oracle.metrics(worker, 0, count) for _ in range(2))
            parts = [(stop - start, oracle.metrics(worker, start, stop)) for start, stop in parts_of(count)]
        except Exception as error:  # noqa: BLE001  # a metric of one's own may raise anything of few examples
            if most > size:
                what = f"of a few test examples of worker {worker} it raised {described(error)}"
                advice = "the last batch of an evaluation may have as few, down to one"
                report.note(f"{type(task).__name__}.metrics", what, advice)
            return
        # A metric that draws gives other numbers anyway.
        steady = {name: value for name, value in whole.items() if value == again[name] and name not in told}
        for name, values in no_means(steady, parts).items():
            told.add(name)
            where = f"the metric {name}"
            shown = f"{count} test examples of worker {worker} have {values}"
            what = f"it is not the mean over the examples: {shown}"
            if most <= size:
                fits = "It is right as long as each worker's test examples fit into one batch: at most"
                report.note(where, f"{what}. {fits} {most}, and task.evaluation_batch_size is {size}")
                continue
            report.warn(
                where,
                f"{what}. Evaluation averages it over batches of task.evaluation_batch_size ({size}), and "
                f"worker {largest} has {most} test examples: what is reported depends on that size",
                "return the mean of what is summed, such as the squared error, and take the root when you "
                f"read it; or set task.evaluation_batch_size to at least {most}",
            )


def parts_of(count: int) -> list[tuple[int, int]]:
    """Three unequal parts of the first ``count`` examples, two if there are fewer than six; none of one."""
    return list(itertools.pairwise(sorted({0, count // 6, count // 2, count}))) if count > 1 else []


def no_means(whole: Mapping[str, float], parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, str]:
    """By each metric that is no mean over the examples, what it is of the whole and of the parts.

    Each part is its number of examples and its metrics.
    """
    shown = {}
    for name, value in whole.items():
        values = [(size, metrics[name]) for size, metrics in parts if name in metrics]
        if not parts or len(values) < len(parts):
            continue
        mean = sum(size * part for size, part in values) / sum(size for size, _ in parts)
        scale = max(abs(value), *(abs(part) for _, part in values))
        if not abs(mean - value) <= MEAN_LIKE * scale:
            listed = ", ".join(f"{part:.4g} ({size} of them)" for size, part in values)
            shown[name] = f"{value:.4g}, and parts of them {listed}"
    return shown
