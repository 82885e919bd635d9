"""Simulated runs in parallel: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from afl.errors import AflError, ExitCode
from afl.user_code import worth_tracing
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


class Watcher(Protocol):
    """Receives the progress of jobs."""

    def progressed(self, job: Job, rounds: int) -> None:
        """``rounds`` update rounds of a job are complete."""

    def ended(self, outcome: Outcome) -> None:
        """A job is over, well or badly."""


def run_here(jobs: Sequence[Job], processes: int, watcher: Watcher) -> list[Outcome]:
    """Simulate in ``processes`` processes; jobs that were simulated before are not simulated again.

    A job whose process dies takes no other with it.

    Raises:
        ConfigError: if a job's directory holds another run.
        KeyboardInterrupt: after SIGINT or SIGTERM, when all processes are gone.
    """
    outcomes = found_done(jobs, watcher)
    waiting = deque(job for job in jobs if job.name not in outcomes)
    with interrupts() as seen, _Crew() as crew:
        while waiting or crew.busy:
            while waiting and len(crew.busy) < processes:
                crew.give(waiting.popleft())
            for worker in crew.heard():
                job, message = worker.job, worker.receive()
                assert job is not None
                if isinstance(message, int):
                    watcher.progressed(job, message)
                    continue
                crew.release(worker)
                outcomes[job.name] = message
                watcher.ended(message)
            if seen:
                raise KeyboardInterrupt
    return [outcomes[job.name] for job in jobs]


def found_done(jobs: Sequence[Job], watcher: Watcher) -> dict[str, Outcome]:
    """The outcomes, by name, of what has been simulated before.

    Raises:
        ConfigError: if a job's directory holds another run.
    """
    summaries = {job.name: (job, job.summary()) for job in jobs}
    assert len(summaries) == len(jobs), "two jobs share a name"
    done = {name: Outcome(job, found) for name, (job, found) in summaries.items() if found is not None}
    for outcome in done.values():
        watcher.ended(outcome)
    return done


def outcome_of(job: Job, on_round: Callable[[int], None]) -> Outcome:
    """Simulate it, whatever its task's code raises."""
    try:
        with job.claimed():
            summary = job.summary()
            if summary is None:
                job.clear()
                summary = simulate(
                    job.config, job.directory, saves_models=job.saves_models, on_round=on_round
                )
    except AflError as error:
        return Outcome(job, None, "\n".join([str(error), *_trace(error)]), error.exit_code)
    except (Exception, SystemExit):  # noqa: BLE001  # a task's own code may raise anything; the others go on
        return Outcome(job, None, traceback.format_exc().rstrip(), ExitCode.INTERNAL)
    return Outcome(job, summary)


def _trace(error: AflError) -> list[str]:
    """The lines of the traceback, where the message does not say all."""
    raised = worth_tracing(error)
    return [] if raised is None else ["".join(traceback.format_exception(raised)).rstrip()]


class _Worker:
    """A process that simulates one job after the other.

    Attributes:
        job: the one it has now.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        context = multiprocessing.get_context("spawn")
        self.connection, its = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(its,))
        with _environment(ONE_THREAD), _without_interrupts():
            self.process.start()
        # Its end is now its alone: when it dies, this one says so.
        its.close()

    def receive(self) -> int | Outcome:
        """How many update rounds are complete, or the job's outcome."""
        assert self.job is not None
        try:
            message: int | Outcome = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            why = f"its process ended with exit code {self.process.exitcode}"
            if self.process.exitcode == -signal.SIGKILL:
                why = "its process was killed; the machine may have too little memory for so many at a time"
            return Outcome(self.job, None, why, ExitCode.INTERNAL)
        return message


class _Crew:
    """The processes; none outlives the ``with`` block."""

    def __init__(self) -> None:
        self.busy: list[_Worker] = []
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers = [*self.busy, *self._idle]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join(END_GRACE_S)
            worker.process.kill()
            self._close(worker)

    def give(self, job: Job) -> None:
        """Have a process simulate it, a new one if all are busy."""
        worker = self._idle.pop() if self._idle else _Worker()
        worker.job = job
        self.busy.append(worker)
        # One that has died since is noticed when it is listened to.
        with contextlib.suppress(OSError):
            worker.connection.send(job)

    def heard(self) -> list[_Worker]:
        """Those with something to say, or that have died; waits a moment for one."""
        ready = wait([worker.connection for worker in self.busy], POLL_S)
        return [worker for worker in self.busy if worker.connection in ready]

    def release(self, worker: _Worker) -> None:
        """Take a worker's finished job from it."""
        worker.job = None
        self.busy.remove(worker)
        if worker.process.exitcode is None:
            self._idle.append(worker)
        else:
            self._close(worker)

    @staticmethod
    def _close(worker: _Worker) -> None:
        worker.connection.close()
        worker.process.join()
        worker.process.close()


def _serve(connection: Connection[int | Outcome, Job]) -> None:
    """A process's life: until the other end is closed, or its process gone."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = connection.recv()
            reports = 0

            def report(rounds: int) -> None:
                nonlocal reports
                reports += 1
                if reports % REPORT_EVERY == 0:
                    connection.send(rounds)

            connection.send(outcome_of(job, report))


@contextlib.contextmanager
def interrupts() -> Iterator[Sequence[int]]:
    """The signals that have come meanwhile and ask to end: to be looked at where nothing can be lost."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    # Ignored signals stay ignored: of a job in the background, or under nohup.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
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
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
