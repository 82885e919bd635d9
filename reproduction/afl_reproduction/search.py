"""The trials of a search: which there are, and what their run directories show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afl_lab.plots.points import Point, points_of
from afl_lab.simulation.jobs import Job
from afl_reproduction.condensed import plain_config
from afl_reproduction.experiment import Experiment, Score, Steps
from afl_reproduction.search_log import Trial


def score_of(points: Sequence[Point], rounds: int, score: Score = "worst_accuracy") -> float:
    """The worst worker's accuracy, or the maximum loss negated: the second half's mean over evaluations."""
    sign = 1 if score == "worst_accuracy" else -1
    late: list[float] = [sign * getattr(point, score) for point in points if 2 * point.round > rounds]
    return sum(late) / len(late)


def trial_jobs(
    experiment: Experiment, part: str, overrides: Sequence[str], out: Path
) -> list[tuple[str, Steps, Job]]:
    """All trials of a part, each with its method and what it tries.

    A trial's dual weights restart as often as those of the final runs: eta_q, which it chooses, depends on B,
    and B, where nothing sets it, on the number of rounds, of which a trial has fewer.
    """
    own = experiment.parts[part]
    search = own.search
    assert search is not None
    jobs = []
    for method, grid in search.grids.items():
        # Of several variants the first: methods as they are come before others.
        final = next(variant for variant in experiment.variants(part).values() if variant.method == method)
        algorithm = experiment.config(method, [*own.set, *final.set, *overrides]).algorithm
        block = [f"algorithm.block={algorithm.block_length}"] if algorithm.takes("block") else []
        for steps in grid.trials:
            name = f"{part}/{method}/{steps}"
            config = experiment.config(
                method,
                [
                    *own.set,
                    *([] if search.every is None else [f"evaluation.every={search.every}"]),
                    *overrides,
                    *([] if search.rounds is None else [f"algorithm.rounds={search.rounds}"]),
                    *block,
                    "task.options.evaluate_on=validation",
                    *steps.overrides,
                ],
            ).with_seed(search.seed)
            job = Job(f"search {name}", config, out / "search" / name, saves_models=False)
            jobs.append((method, steps, job))
    return jobs


def trial_of(
    part: str, method: str, steps: Steps, job: Job, summary: Mapping[str, Any], *, score: Score
) -> Trial:
    """What a trial's run directory shows."""
    points = points_of(job.directory)
    is_whole = summary["result"] == "ok"
    return Trial(
        part,
        method,
        steps,
        round(score_of(points, job.config.algorithm.rounds, score), 6) if is_whole else None,
        summary["result"],
        summary["seconds"],
        [(point.round, point.worst_accuracy) for point in points if point.worst_accuracy is not None],
        plain_config(job.config),
    )
