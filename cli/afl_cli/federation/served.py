"""Runs one after the other over a real federation: a server for each, and workers that stay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import afl_server
from afl.config import Config, dump_config
from afl.errors import AflError, ExitCode
from afl.runs.durable import own_folder, write_whole
from afl.runs.files import STATE_FOLDER, SUMMARY_FILE, read_summary
from afl_cli.federation.children import Children
from afl_cli.federation.local import failure_of

if TYPE_CHECKING:
    from afl_lab.simulation.jobs import Job
    from afl_lab.simulation.pool import Outcome


class Served(Children):
    """Begins a server for each run; a run that a killed command has left goes on.

    Args:
        config: what says where the servers listen.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._listen = config.server.listen
        self._has_told = False

    def run(self, jobs: Sequence[Job], watch: Callable[[Job, Outcome], object]) -> list[Outcome]:
        """Run each job to its end.

        Raises:
            AflError: if a server cannot begin, or ends before its run.
            KeyboardInterrupt: after SIGINT or SIGTERM.
        """
        from afl_lab.simulation.pool import Outcome  # noqa: PLC0415  # PyTorch takes seconds to import

        outcomes = []
        for job in jobs:
            summary = _ended(job.directory) or self._serve(job)
            outcomes.append(Outcome(job, summary))
            watch(job, outcomes[-1])
        return outcomes

    def _serve(self, job: Job) -> dict[str, Any]:
        own_folder(job.directory.parent)
        if (job.directory / STATE_FOLDER).is_dir():
            arguments = ["--resume", str(job.directory)]
        else:
            path = job.directory.with_name(f"{job.directory.name}.yaml")
            run = job.config.run.model_copy(update={"directory": job.directory})
            write_whole(path, dump_config(job.config.model_copy(update={"run": run})).encode())
            arguments = ["--config", str(path)]
        log = job.directory.with_name(f"{job.directory.name}.log")
        server = self.start("server", afl_server.__name__, [*arguments, "--no-live"], log)
        while (event := self.next_event()) is None or event.fields:
            if event is not None and event.name == "listening" and not self._has_told:
                self._has_told = True
                told = f"Waiting for the workers at {self._listen}; start them with --again"
                print(f"{told}. The server's log: {log}", file=sys.stderr)
        if (code := server.wait()) not in {ExitCode.OK, ExitCode.DIVERGED}:
            raise failure_of(server)
        if (summary := _ended(job.directory)) is None:
            raise AflError(f"the server of {job.name} ended with exit code {code} and without a summary")
        return summary


def _ended(directory: Path) -> dict[str, Any] | None:
    """The summary of a run that is over."""
    try:
        summary = read_summary(directory / SUMMARY_FILE)
    except FileNotFoundError:
        return None
    return summary if summary["result"] in {"ok", "diverged"} else None
