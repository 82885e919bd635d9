"""What ``afl simulate`` does."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from afl.advice import advice_on
from afl.config.quantities import shown_bytes, shown_seconds
from afl.errors import ExitCode
from afl.runs.metrics import ranked, worst_loss
from afl.terminal.view import make_console, table
from afl_lab.simulation.cluster import run_on_ray
from afl_lab.simulation.jobs import Job, plan
from afl_lab.simulation.pool import News, Outcome, Watch, run_here


def execute(options: argparse.Namespace) -> ExitCode:
    """Simulate what is missing, then show all runs."""
    given, saves = (options.configs, options.seeds, options.out, options.set), not options.no_models
    jobs = plan(*given, batched=options.batched, saves_models=saves)
    for advice in dict.fromkeys(str(advice) for job in jobs for advice in advice_on(job.config)):
        print(f"afl simulate: warning: {advice}", file=sys.stderr)
    with shown_progress(jobs) as watch:
        if options.ray is None:
            outcomes = run_here(jobs, min(options.jobs, len(jobs)), watch)
        else:
            outcomes = run_on_ray(jobs, options.ray, options.jobs, watch)
    console = make_console()
    console.print(table_of(outcomes))
    console.print(where_written(jobs, options.out), soft_wrap=True, highlight=False)
    if any(job.config.privacy.secure_aggregation or job.config.privacy.records for job in jobs):
        console.print("A simulation is not private: one process has the data and messages of all workers.")
    if any(job.config.privacy.records for job in jobs):
        console.print("Noise is drawn as a site would: these runs cannot be repeated to the bit.")
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        print(f"afl simulate: {outcome.job.name}: {outcome.error}", file=sys.stderr)
    if failed:
        return failed[0].code
    diverged = any(outcome.summary and outcome.summary["result"] == "diverged" for outcome in outcomes)
    return ExitCode.DIVERGED if diverged else ExitCode.OK


@contextlib.contextmanager
def shown_progress(jobs: Sequence[Job]) -> Iterator[Watch]:
    """On a terminal a bar for each run that is going on, and one for all; a line when one ends."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=make_console(), disable=not sys.stdout.isatty()) as progress:
        all_runs = progress.add_task("runs", total=len(jobs))
        bars = {}

        def watch(job: Job, news: News) -> None:
            if isinstance(news, int):
                if job.name not in bars:
                    bars[job.name] = progress.add_task(job.name, total=job.config.algorithm.rounds)
                progress.update(bars[job.name], completed=news)
                return
            if not isinstance(news, Outcome):
                return
            if job.name in bars:
                progress.remove_task(bars.pop(job.name))
            progress.advance(all_runs)
            progress.console.print(f"{job.name}: {news.summary['result'] if news.summary else 'failed'}")

        yield watch


def where_written(jobs: Sequence[Job], out: Path) -> str:
    """Where the runs are, in a line, and that it is not where their configurations say, if they do."""
    (first, *more) = [str(job.directory) for job in jobs]
    where = f"{len(jobs)} runs below {out}, such as {first}" if more else first
    directories = {job.config.run.directory for job in jobs}
    named = sorted(str(each) for each in directories if each is not None)
    ignored = f"; run.directory ({', '.join(named)}) is for a server's run" if named else ""
    return f"written: {where} (--out names another folder{ignored})"


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """What each run reached."""
    numbers = ("rounds>", "worst worker, last>", "worst worker, best>", "bytes up>", "bytes down>", "time>")
    found = table("run", "result", *numbers, title="Simulated runs")
    found.columns[0].no_wrap = True
    for outcome in outcomes:
        summary = outcome.summary
        if summary is None:
            found.add_row(outcome.job.name, "failed")
            continue
        found.add_row(
            outcome.job.name,
            summary["result"],
            str(summary["rounds"]),
            *(_standing(summary[which]) for which in ("last", "best")),
            *(shown_bytes(summary["communication"][way]["wire_bytes"]) for way in ("uplink", "downlink")),
            shown_seconds(summary["seconds"]),
        )
    return found


def _standing(standing: Mapping[str, Any] | None) -> str:
    if standing is None:
        return ""
    by = ranked(standing)
    if by.worst is None or by.metric == "loss":
        name, loss = worst_loss(standing)
        return f"{name.removeprefix('largest ')} {loss:.4g}"
    return f"{by.metric if by.metric != 'accuracy' else ''} {by.shown(by.worst, 4)}".strip()
