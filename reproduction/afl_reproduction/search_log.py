"""A search as it is written down: every trial, and which one is chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afl.config import Config
from afl.errors import ConfigError
from afl_reproduction.condensed import is_same
from afl_reproduction.experiment import Experiment, Grid, Steps

LOG_FILE = "search.jsonl"


@dataclass(frozen=True)
class Trial:
    """A trial that has been made.

    Attributes:
        score: the worst worker's validation accuracy or the negated maximum loss, mean over the second half's
            evaluations; None for a trial that diverged.
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
                    steps = values["steps"]
                    settings = tuple(steps.get("settings", ()))  # searches of step sizes alone had none
                    values["steps"] = Steps(**{**steps, "settings": settings})
                    self.trials.append(Trial(**values))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(f"{path}:{number} is no trial: {error}; delete the line") from error

    def add(self, trial: Trial) -> None:
        """Write it down at once: a search that is cut short goes on from here."""
        self.trials.append(trial)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial)) + "\n")

    def holds(self, part: str, method: str, steps: Steps, config: Config) -> bool:
        """Whether the trial has been made.

        Raises:
            ConfigError: if one with other settings has: then trials are not comparable.
        """
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
        """What the grid's best trial tried; of equal ones the smaller steps. None if none ended well."""
        found = [
            (-trial.score, trial.steps.eta_w, trial.steps.eta_q or 0.0, trial.steps.settings, trial.steps)
            for trial in self.trials
            if (trial.part, trial.method) == (part, method)
            and trial.steps in grid.trials
            and trial.score is not None
        ]
        return min(found, key=lambda entry: entry[:4])[4] if found else None


CLOSE = 0.02
"""Scores so near to the best are shown: single evaluations differ by more."""


def search_table(experiment: Experiment, part: str, log: SearchLog) -> str:
    """What the search of a part chose, in markdown; empty where a method has no choice yet."""
    search = experiment.parts[part].search
    assert search is not None
    has_others = any(grid.set for grid in search.grids.values())
    shown = ["eta_w", "eta_q", *(["other settings"] if has_others else [])]
    columns = ["method", "trials", "diverged", *shown, "score", f"within {CLOSE:g}", "at the grid's edge"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for method, grid in search.grids.items():
        chosen = log.choice(part, method, grid)
        if chosen is None:
            return ""
        own = [
            trial
            for trial in log.trials
            if (trial.part, trial.method) == (part, method) and trial.steps in grid.trials
        ]
        scores = {trial.steps: trial.score for trial in own if trial.score is not None}
        near = [str(steps) for steps, score in scores.items() if score >= scores[chosen] - CLOSE]
        others = [", ".join(chosen.shown_settings) or "-"] if has_others else []
        cells = [
            experiment.methods[method].label,
            f"{len(own)}",
            f"{len(own) - len(scores)}",
            f"{chosen.eta_w:g}",
            "-" if chosen.eta_q is None else f"{chosen.eta_q:g}",
            *others,
            f"{scores[chosen]:.3f}",
            ", ".join(sorted(set(near) - {str(chosen)})) or "-",
            ", ".join(grid.edges(chosen)) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
