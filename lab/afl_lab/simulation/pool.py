"""Simulated runs in parallel: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, TypeAlias

from afl.core.rounds.results import Evaluation
from afl.errors import STOPS, AflError, ExitCode
from afl.paths import begin_here, from_start, naming_paths
from afl.terminal.children import comes_again, end_children, prepare_forks
from afl.user_code import shortage, worth_tracing
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.run import simulate

POLL_S = 0.2
"""How long an interruption may go unnoticed."""

END_GRACE_S = 5.0
"""How long a process may take to end after SIGTERM before it is killed."""

REPORT_EVERY = 16
"""Progress is reported once in so many synchronizations: it is for people."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""What a run computes with is in its configuration; libraries must not take a thread for each core."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with the run's summary, or with an error that is not the run's own.

    Attributes:
        error: with a traceback where it is a fault of the program or of the task's code.
        code: what the error means.
    """

    job: Job
    summary: dict[str, Any] | None
    error: str = ""
    code: ExitCode = ExitCode.OK


News: TypeAlias = int | Evaluation | Outcome
"""Of a job: how many update rounds are complete; an evaluation, if it asks; at last how it ended."""

Watch: TypeAlias = Callable[[Job, News], object]
"""Is told the news; if its answer to an evaluation is true, the run ends there."""


class Pool(contextlib.ExitStack):
    """At most ``processes`` processes that simulate; none outlives the ``with`` block.

    A job whose process dies takes no other with it.
    """

    def __init__(self, processes: int) -> None:
        super().__init__()
        self._processes = processes
        self._idle: list[_Worker] = []

    def run(self, jobs: Sequence[Job], watch: Watch) -> list[Outcome]:
        """Simulate; jobs that were simulated before are not simulated again.

        Raises:
            ConfigError: if a job's directory holds another run.
            KeyboardInterrupt: after SIGINT or SIGTERM; jobs may be going on until the block ends.
        """
        outcomes = found_done(jobs, watch)
        waiting = deque(job for job in jobs if job.name not in outcomes)
        busy: dict[Any, tuple[_Worker, Job]] = {}
        with interrupts() as seen:
            while waiting or busy:
                while waiting and len(busy) < self._processes:
                    worker, job = self._idle.pop() if self._idle else self._begun(), waiting.popleft()
                    busy[worker.connection] = worker, job
                    # One that has died since is noticed when it is listened to.
                    with contextlib.suppress(OSError):
                        worker.connection.send(job)
                for connection in wait(list(busy), POLL_S):
                    worker, job = busy[connection]
                    news = worker.receive(job)
                    if isinstance(news, Outcome):
                        del busy[connection]
                        outcomes[job.name] = news
                        self._idle += [worker] if worker.process.exitcode is None else []
                    ends = watch(job, news)
                    if isinstance(news, Evaluation):
                        with contextlib.suppress(OSError):
                            worker.connection.send(bool(ends))
                if seen:
                    raise KeyboardInterrupt
        return [outcomes[job.name] for job in jobs]

    def _begun(self) -> _Worker:
        return self.enter_context(_started())


def run_here(jobs: Sequence[Job], processes: int, watch: Watch) -> list[Outcome]:
    """Simulate in a :class:`Pool` of its own; errors as of :meth:`Pool.run`, when all processes are gone."""
    with Pool(processes) as pool:
        return pool.run(jobs, watch)


def found_done(jobs: Sequence[Job], watch: Watch) -> dict[str, Outcome]:
    """The outcomes, by name, of what has been simulated before."""
    assert len({job.name for job in jobs}) == len(jobs), "two jobs share a name"
    summaries = [(job, job.summary()) for job in jobs]
    done = {job.name: Outcome(job, summary) for job, summary in summaries if summary is not None}
    for outcome in done.values():
        watch(outcome.job, outcome)
    return done


def outcome_of(
    job: Job, on_round: Callable[[int], object], goes_on: Callable[[Evaluation], bool] = lambda _: True
) -> Outcome:
    """Simulate it, whatever its task's code raises."""
    try:
        with naming_paths(), job.claimed():
            summary = job.summary()
            if summary is None:
                job.clear()
                summary = simulate(
                    job.config,
                    job.directory,
                    saves_models=job.saves_models,
                    on_round=on_round,
                    site=job.site,
                    goes_on=goes_on,
                )
    except AflError as error:
        # With the traceback where the message does not say all.
        raised = worth_tracing(error)
        trace = "" if raised is None else "".join(["\n", *traceback.format_exception(raised)]).rstrip()
        return Outcome(job, None, f"{error}{trace}", error.exit_code)
    except STOPS:
        raise
    except BaseException as error:  # noqa: BLE001  # the others go on
        lack = shortage(error)
        code = ExitCode.INTERNAL if lack is None else lack.exit_code
        return Outcome(job, None, str(lack or traceback.format_exc().rstrip()), code)
    return Outcome(job, summary)


@dataclass(frozen=True)
class _Worker:
    """A process that simulates one job after the other."""

    process: SpawnProcess
    connection: Connection[Job | bool, News]

    def receive(self, job: Job) -> News:
        """The job's next news."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            if self.process.exitcode == -signal.SIGKILL:
                why = "its process was killed; the machine may have too little memory for so many at a time"
                return Outcome(job, None, why, ExitCode.SHORTAGE)
            why = f"its process ended with exit code {self.process.exitcode}"
            return Outcome(job, None, why, ExitCode.INTERNAL)


@contextlib.contextmanager
def _started() -> Iterator[_Worker]:
    """A new process, which does not outlive the ``with`` block."""
    context = multiprocessing.get_context("spawn")
    connection, its = context.Pipe()
    process = context.Process(target=_serve, args=(its,))
    with _environment(ONE_THREAD), _without_interrupts():
        process.start()
    # Its end is now its alone: when it dies, this one says so.
    its.close()
    try:
        yield _Worker(process, connection)
    finally:
        process.terminate()
        process.join(END_GRACE_S)
        process.kill()
        process.join()
        process.close()
        connection.close()


def _serve(connection: Connection[News, Job | bool]) -> None:
    """A process's life: until the other end is closed, or its process gone."""
    prepare_forks()
    begin_here()
    signal.signal(signal.SIGTERM, _end_in_order)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            job, counted = connection.recv(), itertools.count(1)
            assert isinstance(job, Job)
            job = replace(job, directory=from_start(job.directory))

            def report(rounds: int, counted: Iterator[int] = counted) -> None:
                if next(counted) % REPORT_EVERY == 0:
                    connection.send(rounds)

            def goes_on(evaluation: Evaluation, asks: bool = job.asks) -> bool:
                if asks:
                    connection.send(evaluation)
                return not (asks and connection.recv())

            connection.send(outcome_of(job, report, goes_on))


def _end_in_order(number: int, _frame: FrameType | None) -> None:
    if comes_again(number):
        return
    end_children()
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts() -> Iterator[Sequence[int]]:
    """The signals that have come meanwhile and ask to end: to be looked at where nothing can be lost."""
    seen: list[int] = []
    # Ignored signals stay ignored: of a job in the background, or under nohup.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda came, _: seen.append(came)) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never see SIGINT: Ctrl-C is the parent's to handle."""
    # It would be started with the first process, and then lets SIGINT through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
