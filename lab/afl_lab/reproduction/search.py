"""The search of step sizes: equal numbers of trials, judged on validation parts, all of them logged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afl.config import Config
from afl.errors import ConfigError
from afl_lab.reproduction.condensed import Point, is_same, plain_config
from afl_lab.reproduction.condensing import points_of
from afl_lab.reproduction.experiment import Experiment, Grid, Steps
from afl_lab.simulation.jobs import Job

LOG_FILE = "search.jsonl"


@dataclass(frozen=True)
class Trial:
    """A trial that has been made.

    Attributes:
        score: see :func:`score_of`; None for a trial that diverged.
        curve: ``[round, worst accuracy]`` at each evaluation.
        config: as it was run.
    """

    part: str
    method: str
    steps: Steps
    score: float | None
    result: str
    seconds: float
    curve: Sequence[tuple[int, float]]
    config: Mapping[str, Any]


class SearchLog:
    """The trials so far, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.trials: list[Trial] = []
        if path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                try:
                    values = json.loads(line)
                    self.trials.append(Trial(**{**values, "steps": Steps(**values["steps"])}))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(f"{path}:{number} is no trial: {error}; delete the line") from error

    def add(self, trial: Trial) -> None:
        """Write it down at once: a search that is cut short goes on from here."""
        self.trials.append(trial)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial)) + "\n")

    def holds(self, part: str, method: str, config: Config) -> bool:
        """Whether the trial has been made.

        Raises:
            ConfigError: if one with other settings has: then trials are not comparable.
        """
        steps = Steps(config.algorithm.eta_w_value, config.algorithm.eta_q)  # type: ignore[arg-type]
        for trial in self.trials:
            if (trial.part, trial.method, trial.steps) == (part, method, steps):
                if is_same(trial.config, config):
                    return True
                raise ConfigError(
                    f"{self._path} holds a trial of {method} with {steps} in {part} under another "
                    "configuration; name another folder with --results, or delete the file"
                )
        return False

    def choice(self, part: str, method: str, grid: Grid) -> Steps | None:
        """The step sizes of the grid's best trial; of equal ones the smaller. None if none ended well."""
        found = [
            (-trial.score, trial.steps.eta_w, trial.steps.eta_q or 0.0, trial.steps)
            for trial in self.trials
            if (trial.part, trial.method) == (part, method)
            and trial.steps in grid.trials
            and trial.score is not None
        ]
        return min(found, key=lambda entry: entry[:3])[3] if found else None


def score_of(points: Sequence[Point], rounds: int) -> float:
    """The worst worker's accuracy, mean over the evaluations of the second half of ``rounds``."""
    late = [point.worst_accuracy for point in points if 2 * point.round > rounds]
    return sum(late) / len(late)


def trial_jobs(
    experiment: Experiment, part: str, overrides: Sequence[str], out: Path
) -> list[tuple[str, Job]]:
    """All trials of a part, each with its method."""
    own = experiment.parts[part]
    search = own.search
    assert search is not None
    jobs = []
    for method, grid in search.grids.items():
        for steps in grid.trials:
            name = f"{part}/{method}/{steps}"
            config = experiment.config(
                method,
                [
                    *own.set,
                    f"evaluation.every={search.every}",
                    *overrides,
                    f"algorithm.rounds={search.rounds}",
                    "task.options.evaluate_on=validation",
                    *steps.overrides,
                ],
            ).with_seed(search.seed)
            jobs.append((method, Job(f"search {name}", config, out / "search" / name, saves_models=False)))
    return jobs


def trial_of(part: str, method: str, job: Job, summary: Mapping[str, Any]) -> Trial:
    """What a trial's run directory shows."""
    points = points_of(job.directory)
    algorithm = job.config.algorithm
    is_whole = summary["result"] == "ok"
    return Trial(
        part,
        method,
        Steps(algorithm.eta_w_value, algorithm.eta_q),  # type: ignore[arg-type]
        round(score_of(points, algorithm.rounds), 6) if is_whole else None,
        summary["result"],
        summary["seconds"],
        [(point.round, point.worst_accuracy) for point in points],
        plain_config(job.config),
    )
