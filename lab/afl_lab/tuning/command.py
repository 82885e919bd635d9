"""What ``afl tune`` does."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import optuna
from rich.console import Console

from afl.config import Config, load_config
from afl.core.rounds.results import Evaluation
from afl.errors import ConfigError, ExitCode
from afl.paths import as_argument
from afl.terminal.view import make_console
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import News, Outcome, Pool, Watch
from afl_lab.tuning.curve import WINDOW, Curve, Judge
from afl_lab.tuning.report import (
    check_output,
    curve_of,
    evaluations_of,
    rivals,
    show_comparison,
    shown_params,
    shown_worst,
    write_choice,
)
from afl_lab.tuning.search import Search, Trial, best_of
from afl_lab.tuning.space import Params, fixed_overrides, overrides_of, unaliased

DEFAULT_TRIALS = 40

SEED = 1
"""Of a configuration that names none."""


class Runs(Protocol):
    """What runs jobs: :class:`afl_lab.simulation.pool.Pool`, or a federation."""

    def run(self, jobs: Sequence[Job], watch: Watch) -> list[Outcome]:
        """As :meth:`afl_lab.simulation.pool.Pool.run`."""


def execute(
    options: argparse.Namespace, federation: contextlib.AbstractContextManager[Runs] | None = None
) -> ExitCode:
    """Search, compare the best with what else there is, and write it down.

    Args:
        federation: what runs the trials; ``None`` for simulation.
    """
    console = make_console()
    output = options.output or options.config.with_suffix(".tuned.yaml")
    check_output(output)
    folder = options.out / options.config.stem
    own = options.config, options.set, folder, console
    tuning = Tuning(*own, most_lost=options.most_lost, is_served=federation is not None)
    ends = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    trials = options.trials or (DEFAULT_TRIALS if options.minutes is None else sys.maxsize)
    try:
        with Pool(options.jobs) if federation is None else federation as runs:
            tuning.begin(runs)
            while len(tuning.search.trials) < trials and time.monotonic() < ends:
                tuning.group(runs, trials - len(tuning.search.trials))
            best = tuning.best
            if best is None:
                raise ConfigError("no trial came to a value; their errors are above")
            outcomes = runs.run(tuning.rivals(), lambda _job, _news: None)
    except KeyboardInterrupt:
        if tuning.best is not None:
            tuning.write(output, tuning.best)
        print("afl tune: interrupted; the same command goes on", file=sys.stderr)
        return ExitCode.INTERRUPTED
    called = tuning.config.algorithm.name, tuning.directory(best.number)
    show_comparison(console, tuning.judge, called, outcomes)
    console.print(tuning.left_out, end="", soft_wrap=True)
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

    Args:
        most_lost: what a site may have less than under plain averaging, as :meth:`Judge.with_floor` has it.
        is_served: whether the trials are runs of a federation.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        folder: Path,
        console: Console,
        *,
        most_lost: float,
        is_served: bool,
    ) -> None:
        given = load_config(path, overrides)
        self._path, self.folder, self._console = path, folder, console
        self._most_lost, self._is_served = most_lost, is_served
        self._overrides = [*overrides, *fixed_overrides(given), "run.directory=null"]
        self.config = self.with_params({})
        self._holds_out = not given.task.held_out
        self._spacing = self.config.evaluate_every
        self.judge = Judge.of(self.config)
        self.search = Search(self.config, folder, most_lost)
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
        ends = ["run.trackers=[]", "evaluation.patience=null"]
        config = load_config(self._path, [*self._overrides, *ends, *given])
        return config if config.run.seed is not None else config.with_seed(SEED)

    def directory(self, number: int) -> Path:
        """A trial's run directory."""
        return self.folder / "trials" / f"{number:04}"

    @property
    def best(self) -> Trial | None:
        """The best trial, also of a group that has not ended."""
        return best_of([*self.search.trials, *self._ended.values()])

    def begin(self, runs: Runs) -> None:
        """Run plain averaging, which says what no site should lose much of.

        Raises:
            ConfigError: if it cannot be run.
        """
        for job in self.rivals()[:1]:
            (outcome,) = runs.run([job], lambda _job, _news: None)
            if outcome.summary is None:
                raise ConfigError(f"plain averaging, which trials are compared with, fails: {outcome.error}")
            curve = curve_of(self.judge, job)
            self.judge = self.judge.with_floor(evaluations_of(job.directory), curve.round, self._most_lost)

    def rivals(self) -> list[Job]:
        """What trials are compared with, with the configuration's own settings.

        In a federation no site alone, which is the site's to try, and nothing that would send unmasked what
        is masked.
        """
        jobs = rivals(self.config, self.folder / "rivals")
        if not self._is_served:
            return jobs
        if self.config.privacy.secure_aggregation:
            return []
        served = {"server": self.config.server, "faults": self.config.faults}
        return [replace(job, config=job.config.model_copy(update=served)) for job in jobs if job.site is None]

    @property
    def left_out(self) -> str:
        """A line on what the table lacks, and why."""
        if not self._is_served:
            return ""
        if self.config.privacy.secure_aggregation:
            return "Without FedAvg, which would send unmasked what the run masks, and without sites alone.\n"
        return "Without each site alone: its data is there, so that is its own to try, with afl simulate.\n"

    def group(self, runs: Runs, most: int) -> None:
        """Run the next trials, at most so many, and remember what they gave."""
        asked = {f"trial {trial.number}": trial for trial in self.search.ask(most)}
        jobs = [
            Job(
                name,
                unaliased(self.with_params(trial.params)),
                self.directory(trial.number),
                False,
                asks=True,
            )
            for name, trial in asked.items()
        ]
        curves = {job.name: Curve(self.judge, is_whole=True, spacing=self._spacing) for job in jobs}

        def watch(job: Job, news: News) -> bool:
            trial, curve = asked[job.name], curves[job.name]
            if isinstance(news, Outcome):
                self._ended[trial.number] = self._trial(trial, news, curve)
            if not isinstance(news, Evaluation):
                return False
            if not curve.see(news.round, news.metrics):
                return False
            round_, mean = curve.means[-1]
            trial.report(mean, round_)
            return bool(news.round < job.config.algorithm.rounds and trial.should_prune())

        runs.run(jobs, watch)
        ended = [(trial, self._ended.pop(trial.number)) for trial in asked.values()]
        self.search.tell(ended)
        for _, trial in ended:
            self._console.print(self._line(trial), soft_wrap=True, highlight=False)

    def write(self, output: Path, best: Trial) -> None:
        """Write the chosen configuration, and how it was found."""
        trials = self.search.trials
        pruned = sum(trial.result == "pruned" for trial in trials)
        metric, shown = self._shown(best)
        own = next((trial for trial in trials if trial.number == 0 and trial.score is not None), None)
        gave = "" if own is None else f"; the configuration's own settings gave {self._shown(own)[1]}"
        about = [
            f"trial {best.number} of {len(trials)} ({pruned} pruned) of {self._path.name}.",
            f"The worst worker's held-out {metric} was {shown}, its last {WINDOW} evaluations' mean{gave}.",
        ]
        if self._holds_out:
            about.append("task.held_out was set by the search: the training records left are those it knew.")
        config = load_config(self._path, [*self._overrides, *overrides_of(self.config, best.params)])
        write_choice(output, unaliased(config), about)
        self._console.print(f"written: {output}", soft_wrap=True)

    def _trial(self, asked: optuna.Trial, outcome: Outcome, seen: Curve) -> Trial:
        number, params = asked.number, dict(asked.params)
        if outcome.summary is None:
            return Trial(number, params, "failed", None, error=outcome.error)
        evaluations = evaluations_of(self.directory(number))
        # From the files: a trial that had ended before an interruption was not seen.
        curve = Curve.of(self.judge, evaluations, is_whole=True, spacing=self._spacing)
        for round_, mean in curve.means[len(seen.means) :]:
            asked.report(mean, round_)
        result = outcome.summary["result"]
        if result == "ok" and evaluations[-1]["round"] < self.config.algorithm.rounds:
            result = "pruned"
        return Trial(number, params, result, curve.best if result == "ok" else None, curve.means)

    def _shown(self, trial: Trial) -> tuple[str, str]:
        """The metric, and what the trial gave the worst worker of it."""
        directory = self.directory(trial.number)
        metric = self.judge.ranking(evaluations_of(directory)[0]["workers"]).metric
        return metric, shown_worst(self.judge, trial, directory)

    def _line(self, trial: Trial) -> str:
        found = trial.error.splitlines()[0] if trial.error else trial.result
        if trial.score is not None:
            found = "worst held-out {} {}".format(*self._shown(trial))
            found += ", the best so far" if self.search.best is trial else ""
        return f"trial {trial.number}: {found}; {shown_params(trial.params)}"
