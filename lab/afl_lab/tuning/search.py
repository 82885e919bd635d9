"""The search: which trials there are, what they gave, and what is tried next. A file remembers.

Trials are asked for in groups, and Optuna hears of a group when all of it has ended. So the same search, cut
short and gone on with, or with more processes, tries the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.trial import TrialState

from afl.config import Config, dump_config
from afl.errors import ConfigError, StorageError, why_unwritable
from afl.paths import read_plain
from afl_lab.tuning.space import Params, first_params, space_of

TRIALS_FILE: Final = "trials.jsonl"

GROUP: Final = 4
"""Trials that are asked for at once: as many as may run side by side."""

RANDOM_TRIALS: Final = 8
"""So many come before Optuna models what is good: the first ones, and some that are drawn at random."""

FORMAT: Final = 4


@dataclass(frozen=True)
class Trial:
    """A trial that has ended.

    Attributes:
        result: ``ok``, ``pruned``, ``diverged`` or ``failed``.
        score: the worst worker's value in the end, negated where less is better; ``None`` if it came to
            none.
        means: by round, as :class:`afl_lab.tuning.curve.Curve` has it, what pruning compares.
    """

    number: int
    params: Params
    result: str
    score: float | None
    means: Sequence[tuple[int, float]] = field(default_factory=list)
    error: str = ""


class Search:
    """What has been tried, in a folder.

    Args:
        config: what is tuned, with its seed and what all trials set.
        most_lost: what a site may lose; other trials were judged otherwise.

    Raises:
        ConfigError: if the folder holds the trials of another configuration.
        StorageError: if it cannot be written.
    """

    def __init__(self, config: Config, folder: Path, most_lost: float) -> None:
        assert config.run.seed is not None
        self._config = config
        self._head = {"format": FORMAT, "most_lost": most_lost, "config": dump_config(config)}
        self._space = space_of(config)
        self._path = folder / TRIALS_FILE
        self.trials: list[Trial] = []
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.MedianPruner(RANDOM_TRIALS, config.algorithm.rounds // 2)
        self._study = optuna.create_study(direction="maximize", pruner=pruner)
        self._open()

    def ask(self, most: int = GROUP) -> list[optuna.Trial]:
        """The next trials, at most :data:`GROUP`."""
        asked = []
        for number in range(len(self.trials), len(self.trials) + min(GROUP, most)):
            # Not one generator that goes on: a search that is gone on with could not put it back.
            seed = (self._config.run.seed or 0) * 1_000_003 + number
            self._study.sampler = optuna.samplers.TPESampler(
                seed=seed % 2**32, n_startup_trials=RANDOM_TRIALS
            )
            if number < len(first := first_params(self._config)):
                self._study.enqueue_trial(first[number])
            # The configuration itself may lie outside what is searched.
            asked.append(self._study.ask(self._space if number else {}))
        return asked

    def tell(self, ended: Sequence[tuple[optuna.Trial, Trial]]) -> None:
        """A group has ended; it is written down."""
        for asked, trial in ended:
            state = _state(trial)
            self._study.tell(asked, trial.score if state is TrialState.COMPLETE else None, state)
            self._write(asdict(trial))
            self.trials.append(trial)

    @property
    def best(self) -> Trial | None:
        """As :func:`best_of`."""
        return best_of(self.trials)

    def _open(self) -> None:
        try:
            lines = read_plain(self._path).splitlines(keepends=True) if self._path.exists() else []
            if lines and not lines[-1].endswith(b"\n"):
                # A process that was killed wrote half of it.
                with self._path.open("rb+") as file:
                    file.truncate(sum(map(len, lines[:-1])))
                del lines[-1]
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {error.strerror}") from error
        if not lines:
            self._write(self._head)
            return
        try:
            first, *entries = map(json.loads, lines)
            trials = [Trial(**entry) for entry in entries] if first == self._head else []
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._path} is damaged: {error}; delete it to begin again") from error
        if first != self._head:
            held = f"{self._path} holds the trials of another configuration, or of another version of afl"
            raise ConfigError(f"{held}; name another folder with --out, or delete it")
        for trial in trials:
            self._study.add_trial(self._frozen(trial))
            self.trials.append(trial)

    def _frozen(self, trial: Trial) -> optuna.trial.FrozenTrial:
        reported = dict(trial.means)
        state = _state(trial)
        # Of a pruned trial Optuna takes what was reported last.
        values = {
            TrialState.COMPLETE: trial.score,
            TrialState.PRUNED: reported[max(reported)] if reported else None,
        }
        return optuna.trial.create_trial(
            state=state,
            value=values.get(state),
            params=dict(trial.params),
            distributions={name: self._space[name] for name in trial.params},
            intermediate_values=reported,
        )

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {why_unwritable(error)}") from error


def _state(trial: Trial) -> TrialState:
    if trial.result == "ok" and trial.score is not None:
        return TrialState.COMPLETE
    return TrialState.PRUNED if trial.result == "pruned" and trial.means else TrialState.FAIL


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the highest score, of equals the first."""
    scored = [(trial.score, -trial.number, trial) for trial in trials if trial.score is not None]
    return max(scored)[2] if scored else None
