"""What a run is to be measured by, simulated with its data, seed, step size and batches: plain averaging
(FedAvg with equal weights), and each worker alone, which trains on its own examples only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from afl.config import Config, load_config
from afl.config.quantities import shown_bytes
from afl.config.schema import Algorithm, Run
from afl.core.algorithms.registry import algorithm_named
from afl.errors import ExitCode
from afl.names import Names, named, names_of
from afl.runs.files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, metrics_entries, of_event, read_summary
from afl.runs.metrics import Ranked, ranked
from afl.terminal.view import table
from afl_lab.simulation.command import shown_progress
from afl_lab.simulation.jobs import Job, Site
from afl_lab.simulation.pool import outcome_of, run_here

FOLDER: Final = "baselines"
"""In the run's directory: where the simulated runs are."""

AVERAGING: Final = "fedavg"

MOST_SITES: Final = 20
"""Rows of workers; of more, those that the run serves worst."""


@dataclass(frozen=True)
class Standing:
    """How the workers are served in the end by one way to train.

    Attributes:
        values: of the metric that ranks, by worker, as far as they are known.
        sent: bytes on the wire, both ways.
    """

    name: str
    values: Mapping[int, float]
    mean: float | None
    sent: int


def compare(
    console: Console, directory: Path, name: str, *, alone: bool, options: Mapping[str, Any] | None = None
) -> ExitCode:
    """Simulate what the complete run in ``directory`` is to be measured by, and print one table of all.

    Args:
        name: the run's, in the table.
        alone: whether each worker is trained alone too.
        options: the task's, of this machine.
    """
    config = load_config(directory / CONFIG_FILE, environment={})
    if options:
        task = config.task.model_copy(update={"options": {**config.task.options, **options}})
        config = config.model_copy(update={"task": task})
    last = _last(directory)
    by = ranked(last)
    jobs = baselines(config, directory / FOLDER, rounds=last["round"], alone=alone)
    with shown_progress(jobs) as watch:
        if len(jobs) == 1:
            outcomes = [outcome_of(jobs[0], partial(watch, jobs[0]))]
        else:
            outcomes = run_here(jobs, min(len(jobs), os.cpu_count() or 1), watch)
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        print(f"{outcome.job.name}: {outcome.error}", file=sys.stderr)
    if failed:
        return failed[0].code
    standings = [_standing(name, directory), _standing(jobs[0].name, jobs[0].directory)]
    if alone:
        ended = {job.site.worker: ranked(_last(job.directory)).worst for job in jobs if job.site}
        values = {worker: value for worker, value in ended.items() if value is not None}
        standings.append(Standing("each alone", values, sum(values.values()) / max(1, len(values)), 0))
    alike = "the same data, seed, step size and batches; the others simulated"
    console.print(f"\nTest {by.metric} after {last['round']} rounds ({alike}):", soft_wrap=True)
    console.print(comparison_table(standings, by, names_of(last), by_site=alone))
    left = [key for key in config.algorithm.stepping if key not in _plain_options()]
    if left:
        what = f"The others take plain steps of this eta_w, without {' and '.join(left)}"
        console.print(f"{what}: with the run's they might do better, or worse.", soft_wrap=True)
    return ExitCode.OK


def baselines(config: Config, folder: Path, *, rounds: int, alone: bool) -> list[Job]:
    """Plain averaging, and each worker alone if wanted, of a configuration with its seed."""
    own = config.algorithm
    # Whatever else the two algorithms share, such as local steps, stays as it is.
    shared = {key: getattr(own, key, None) for key in _plain_options()}
    chosen = {"local_steps": 1, **{key: value for key, value in shared.items() if value is not None}}
    averaging = Algorithm(
        **{
            **chosen,
            "name": AVERAGING,
            "rounds": rounds,
            "eta_w": own.eta_w_value,
            "weighting": "uniform",
        }
    )
    plain = Config(
        workers=config.workers,
        task=config.task,
        algorithm=averaging,
        # They take as many rounds as the run has taken.
        evaluation=config.evaluation.model_copy(update={"patience": None}),
        run=Run(seed=config.run.seed, initial_model=config.run.initial_model),
        worker=config.worker,
    )
    jobs = [Job("plain averaging (FedAvg)", plain, folder / "averaging", saves_models=False)]
    single = plain.model_copy(update={"workers": 1})
    for worker in range(config.workers if alone else 0):
        site = Site(worker, config.workers)
        jobs.append(Job(f"worker {worker} alone", single, folder / f"alone-{worker}", False, site))
    return jobs


def _plain_options() -> frozenset[str]:
    """What averaging takes, but for its server's steps: with them it is not plain, and another ``optimizer``
    than the run's."""
    return algorithm_named(AVERAGING).takes - {"optimizer", "server_eta"}


def comparison_table(standings: Sequence[Standing], by: Ranked, names: Names, *, by_site: bool) -> Table:
    """A column for each way to train; rows for the worst worker, the mean and what was sent, and by worker
    if wanted."""
    shown = table("", *(f"{each.name}>" for each in standings))
    if by_site:
        known = next(each.values for each in standings if each.values)
        worst_first = sorted(known, key=lambda worker: known[worker], reverse=not by.higher_is_better)
        for worker in sorted(worst_first[:MOST_SITES]):
            figures = (_figure(by, each.values.get(worker)) for each in standings)
            shown.add_row(f"worker {named(worker, names)}", *figures)
        if len(worst_first) > MOST_SITES:
            shown.add_row(f"({len(worst_first) - MOST_SITES} served better)")
        shown.add_section()
    shown.add_row("worst worker", *(_worst(by, each) for each in standings))
    shown.add_row("mean", *(_figure(by, each.mean) for each in standings))
    shown.add_row("sent", *(shown_bytes(each.sent) if each.sent else "nothing" for each in standings))
    return shown


def _worst(by: Ranked, standing: Standing) -> str:
    if not standing.values:
        return "hidden"
    worst = min if by.higher_is_better else max
    value, worker = worst((value, worker) for worker, value in standing.values.items())
    return f"{_figure(by, value)} (worker {worker})"


def _figure(by: Ranked, value: float | None) -> str:
    return "hidden" if value is None else by.shown(value, 4)


def _last(directory: Path) -> Mapping[str, Any]:
    """The last evaluation in a run's metrics."""
    entries, _ = metrics_entries(directory / METRICS_FILE)
    return of_event(entries, "evaluation")[-1]


def _standing(name: str, directory: Path) -> Standing:
    last = _last(directory)
    by = ranked(last)
    summary = read_summary(directory / SUMMARY_FILE)
    sent = sum(count["wire_bytes"] for count in summary["communication"].values())
    workers = enumerate(last.get("workers") or [])
    values = {worker: metrics[by.metric] for worker, metrics in workers if by.metric in metrics}
    return Standing(name, values, by.mean, sent)
