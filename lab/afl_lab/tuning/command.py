"""What ``afl tune`` does."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import optuna
from rich.console import Console

from afl.config import Config, load_config
from afl.core.rounds.policy import RankBy
from afl.core.rounds.results import Evaluation
from afl.errors import ConfigError, ExitCode
from afl.paths import as_argument
from afl.terminal.view import make_console
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import News, Outcome, Pool
from afl_lab.tuning.curve import Curve, Judge
from afl_lab.tuning.report import (
    check_output,
    evaluations_of,
    found_by,
    rivals,
    show_comparison,
    shown_params,
    shown_score,
    write_choice,
)
from afl_lab.tuning.search import Search, Trial, best_of
from afl_lab.tuning.space import Params, can_be_cut, fixed_overrides, overrides_of

DEFAULT_TRIALS = 40

SEED = 1
"""Of a configuration that names none."""


def execute(options: argparse.Namespace) -> ExitCode:
    """Search, compare the best with what else there is, and write it down."""
    console = make_console()
    output = options.output or options.config.with_suffix(".tuned.yaml")
    check_output(output)
    tuning = Tuning(options.config, options.set, options.out / options.config.stem, console)
    ends = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    trials = options.trials or (DEFAULT_TRIALS if options.minutes is None else sys.maxsize)
    try:
        with Pool(options.jobs) as pool:
            while len(tuning.search.trials) < trials and time.monotonic() < ends:
                tuning.group(pool, trials - len(tuning.search.trials))
            best = tuning.best
            if best is None:
                raise ConfigError("no trial came to a value; their errors are above")
            outcomes = pool.run(
                rivals(tuning.with_params(best.params), tuning.folder / "rivals" / f"{best.number:04}"),
                lambda _job, _news: None,
            )
    except KeyboardInterrupt:
        if tuning.best is not None:
            tuning.write(output, tuning.best)
        print("afl tune: interrupted; the same command goes on", file=sys.stderr)
        return ExitCode.INTERRUPTED
    called = tuning.config.algorithm.name, tuning.directory(best.number)
    show_comparison(console, tuning.judge, best, called, outcomes)
    tuning.write(output, best)
    console.print(f"\nNext:  afl run {as_argument(output)}", soft_wrap=True)
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        print(f"afl tune: {outcome.job.name}: {outcome.error}", file=sys.stderr)
    return failed[0].code if failed else ExitCode.OK


class Tuning:
    """One search: the configuration that it is about, and all trials so far.

    Attributes:
        config: with its seed, and what all trials set.
        folder: where all of it is written.
    """

    def __init__(self, path: Path, overrides: Sequence[str], folder: Path, console: Console) -> None:
        given = load_config(path, overrides)
        self._path, self.folder, self._console = path, folder, console
        self._overrides = [*overrides, *fixed_overrides(given), "run.directory=null"]
        self.config = self.with_params({})
        self._holds_out = not given.task.held_out
        self._is_whole = not can_be_cut(self.config)
        self.judge = Judge.of(self.config)
        self.search = Search(self.config, folder)
        self._ended: dict[int, Trial] = {}
        """Of the group that is going on."""
        if self._holds_out:
            told = "The configuration holds no records out; here a share of each site's training records is"
            console.print(f"{told} (task.held_out: {self.config.task.held_out:g}).", soft_wrap=True)
        if count := len(self.search.trials):
            console.print(f"{count} trials are there already.")

    def with_params(self, params: Params) -> Config:
        """A trial's configuration."""
        given = [*overrides_of(self.config, params)] if params else []
        config = load_config(
            self._path, [*self._overrides, "run.trackers=[]", "evaluation.patience=null", *given]
        )
        return config if config.run.seed is not None else config.with_seed(SEED)

    def directory(self, number: int) -> Path:
        """A trial's run directory."""
        return self.folder / "trials" / f"{number:04}"

    @property
    def best(self) -> Trial | None:
        """The best trial, also of a group that has not ended."""
        return best_of([*self.search.trials, *self._ended.values()])

    def group(self, pool: Pool, most: int) -> None:
        """Run the next trials, at most so many, and remember what they gave."""
        asked = {f"trial {trial.number}": trial for trial in self.search.ask(most)}
        jobs = [
            Job(name, self.with_params(trial.params), self.directory(trial.number), False, asks=True)
            for name, trial in asked.items()
        ]
        curves = {name: Curve(self._is_whole) for name in asked}

        def watch(job: Job, news: News) -> bool:
            trial, curve = asked[job.name], curves[job.name]
            if isinstance(news, Outcome):
                self._ended[trial.number] = self._trial(trial, news, curve)
            if not isinstance(news, Evaluation):
                return False
            mean = curve.see(news.round, self.judge.score(news.metrics))
            if mean is None:
                return False
            trial.report(mean, news.round)
            return news.round < job.config.algorithm.rounds and trial.should_prune()

        pool.run(jobs, watch)
        ended = [(trial, self._ended.pop(trial.number)) for trial in asked.values()]
        self.search.tell(ended)
        for _, trial in ended:
            self._console.print(self._line(trial), soft_wrap=True, highlight=False)

    def write(self, output: Path, best: Trial) -> None:
        """Write the chosen configuration."""
        about = found_by(best, self.search.trials, self._by(best), self._path)
        if self._holds_out:
            about.append("task.held_out was set by the search: the training records left are those it knew.")
        rounds = [f"algorithm.rounds={best.round}"]
        config = load_config(self._path, [*self._overrides, *overrides_of(self.config, best.params), *rounds])
        write_choice(output, config, about)
        self._console.print(f"written: {output}", soft_wrap=True)

    def _trial(self, asked: optuna.Trial, outcome: Outcome, seen: Curve) -> Trial:
        number, params = asked.number, dict(asked.params)
        if outcome.summary is None:
            return Trial(number, params, "failed", None, 0, error=outcome.error)
        evaluations = evaluations_of(self.directory(number))
        # From the files: a trial that had ended before an interruption was not seen.
        curve = Curve.of(self.judge, evaluations, is_whole=self._is_whole)
        for round_, mean in curve.means[len(seen.means) :]:
            asked.report(mean, round_)
        result = outcome.summary["result"]
        if result == "ok" and evaluations[-1]["round"] < self.config.algorithm.rounds:
            result = "pruned"
        score = None if result == "diverged" or (self._is_whole and result == "pruned") else curve.best
        return Trial(number, params, result, score, curve.round, curve.means)

    def _by(self, trial: Trial) -> RankBy:
        return self.judge.ranking(evaluations_of(self.directory(trial.number))[0]["workers"])

    def _line(self, trial: Trial) -> str:
        found = trial.error.splitlines()[0] if trial.error else trial.result
        if trial.score is not None:
            by = self._by(trial)
            found = f"worst held-out {by.metric} {shown_score(by, trial.score)} after {trial.round} rounds"
            found += " (pruned)" if trial.result == "pruned" else ""
            found += ", the best so far" if self.search.best is trial else ""
        return f"trial {trial.number}: {found}; {shown_params(trial.params)}"
