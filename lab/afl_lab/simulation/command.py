"""What ``afl simulate`` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from afl.config.quantities import shown_bytes, shown_seconds
from afl.errors import ExitCode
from afl.terminal.view import make_console
from afl_lab.simulation.cluster import run_on_ray
from afl_lab.simulation.jobs import Job, plan
from afl_lab.simulation.pool import Outcome, run_here


def execute(options: argparse.Namespace) -> ExitCode:
    """Simulate what is missing, then show all runs."""
    jobs = plan(
        options.configs,
        options.seeds,
        options.out,
        options.set,
        batched=options.batched,
        saves_models=not options.no_models,
    )
    with ProgressView(jobs) as view:
        if options.ray is None:
            outcomes = run_here(jobs, min(options.jobs, len(jobs)), view)
        else:
            outcomes = run_on_ray(jobs, options.ray, options.jobs, view)
    console = make_console()
    console.print(table_of(outcomes))
    console.print(where_written(jobs, options.out), soft_wrap=True, highlight=False)
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    for outcome in failed:
        print(f"afl simulate: {outcome.job.name}: {outcome.error}", file=sys.stderr)
    if failed:
        return failed[0].code
    diverged = any(outcome.summary and outcome.summary["result"] == "diverged" for outcome in outcomes)
    return ExitCode.DIVERGED if diverged else ExitCode.OK


class ProgressView:
    """On a terminal a bar for each run that is going on, and one for all; a line when one ends."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=make_console(),
            disable=not sys.stdout.isatty(),
        )
        self._all = self._progress.add_task("runs", total=len(jobs))
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def progressed(self, job: Job, rounds: int) -> None:
        """Move the run's bar."""
        if job.name not in self._bars:
            self._bars[job.name] = self._progress.add_task(job.name, total=job.config.algorithm.rounds)
        self._progress.update(self._bars[job.name], completed=rounds)

    def ended(self, outcome: Outcome) -> None:
        """Replace the run's bar by its result."""
        name = outcome.job.name
        if name in self._bars:
            self._progress.remove_task(self._bars.pop(name))
        self._progress.advance(self._all)
        result = outcome.summary["result"] if outcome.summary else "failed"
        self._progress.console.print(f"{name}: {result}")


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
    table = Table(title="Simulated runs", title_justify="left")
    table.add_column("run", no_wrap=True)
    table.add_column("result")
    for name in ("rounds", "worst worker, last", "worst worker, best", "bytes up", "bytes down", "time"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        summary = outcome.summary
        if summary is None:
            table.add_row(outcome.job.name, "failed", *[""] * 6)
            continue
        up, down = (summary["communication"][way]["wire_bytes"] for way in ("uplink", "downlink"))
        table.add_row(
            outcome.job.name,
            summary["result"],
            str(summary["rounds"]),
            _standing(summary["last"]),
            _standing(summary["best"]),
            shown_bytes(up),
            shown_bytes(down),
            shown_seconds(summary["seconds"]),
        )
    return table


def _standing(standing: dict[str, float] | None) -> str:
    if standing is None:
        return ""
    if standing["worst_accuracy"] is None:
        return f"loss {standing['max_loss']:.4g}"
    return f"{standing['worst_accuracy']:.4f}"
