"""Simulated runs in parallel: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Protocol

from afl.config import load_config
from afl.errors import AflError, ConfigError
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.run import simulate

POLL_S = 0.2
"""How often progress is looked at."""

REPORT_EVERY = 16
"""Progress goes to the parent once in so many synchronizations: it is for people."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with the run's summary, or with an error that is not the run's own."""

    job: Job
    summary: dict[str, Any] | None
    error: str = ""


class Watcher(Protocol):
    """Is told how the jobs get on."""

    def progressed(self, job: Job, rounds: int) -> None:
        """Update rounds that are complete."""

    def ended(self, outcome: Outcome) -> None:
        """One job is over."""


def run_here(jobs: Sequence[Job], processes: int, watcher: Watcher) -> list[Outcome]:
    """Simulate in ``processes`` processes; jobs that were simulated before are not simulated again."""
    todo = [job for job in jobs if not _is_done(job, watcher)]
    outcomes: dict[str, Outcome] = {}
    if todo:
        context = multiprocessing.get_context("spawn")
        progress: Queue[tuple[str, int]] = context.Queue()
        by_name = {job.name: job for job in todo}
        with (
            _environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
            ProcessPoolExecutor(processes, context, _begin, (progress,)) as pool,
        ):
            futures = {pool.submit(_simulate_in_child, job): job for job in todo}
            try:
                for future in _ended(futures, progress, by_name, watcher):
                    outcome = _outcome(futures[future], future)
                    outcomes[outcome.job.name] = outcome
                    watcher.ended(outcome)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
    return [outcomes.get(job.name) or Outcome(job, job.summary()) for job in jobs]


def run_on_ray(jobs: Sequence[Job], address: str | None, watcher: Watcher) -> list[Outcome]:
    """Simulate on a Ray cluster, a CPU for each thread of a run; results come back to this machine.

    Args:
        address: the cluster's, or ``None`` for one that is started here.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray  # noqa: PLC0415  # an optional extra
    except ImportError:
        raise ConfigError("Ray is not installed here; pip install 'afl[ray]'") from None
    todo = [job for job in jobs if not _is_done(job, watcher)]
    outcomes: dict[str, Outcome] = {}
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from error
    try:
        pending = {
            ray.remote(_simulate_far_away)
            .options(num_cpus=job.config.worker.threads)
            .remote(job.text(), batched=job.batched, saves_models=job.saves_models): job
            for job in todo
        }
        while pending:
            (reference, *_), _ = ray.wait(list(pending), num_returns=1)
            job = pending.pop(reference)
            try:
                files = ray.get(reference)
            except ray.exceptions.RayError as error:
                outcome = Outcome(job, None, str(error))
            else:
                job.directory.mkdir(parents=True, exist_ok=True)
                for name, data in files.items():
                    (job.directory / name).write_bytes(data)
                outcome = Outcome(job, job.summary())
            outcomes[job.name] = outcome
            watcher.ended(outcome)
    finally:
        ray.shutdown()
    return [outcomes.get(job.name) or Outcome(job, job.summary()) for job in jobs]


def _is_done(job: Job, watcher: Watcher) -> bool:
    summary = job.summary()
    if summary is None:
        job.clear()
        return False
    watcher.ended(Outcome(job, summary))
    return True


def _ended(
    futures: dict[Future[dict[str, Any]], Job],
    progress: Queue[tuple[str, int]],
    by_name: dict[str, Job],
    watcher: Watcher,
) -> Iterator[Future[dict[str, Any]]]:
    """The futures as they end; progress is passed on meanwhile."""
    left = set(futures)
    while left:
        done, left = wait(left, POLL_S, FIRST_COMPLETED)
        with contextlib.suppress(queue.Empty):
            while True:
                name, rounds = progress.get_nowait()
                watcher.progressed(by_name[name], rounds)
        yield from done


def _outcome(job: Job, future: Future[dict[str, Any]]) -> Outcome:
    try:
        return Outcome(job, future.result())
    except AflError as error:
        return Outcome(job, None, str(error))
    except Exception as error:  # noqa: BLE001  # a task's own code may raise anything; the other runs go on
        return Outcome(job, None, f"{type(error).__name__}: {error}")


_progress: Queue[tuple[str, int]] | None = None


def _begin(progress: Queue[tuple[str, int]]) -> None:
    global _progress  # noqa: PLW0603  # a pool's initializer has no other way to leave something
    _progress = progress


def _simulate_in_child(job: Job) -> dict[str, Any]:
    report: Callable[[int], None] = lambda _: None  # noqa: E731
    if _progress is not None:
        sent = [0]

        def report(rounds: int) -> None:
            sent[0] += 1
            if sent[0] % REPORT_EVERY == 0:
                assert _progress is not None
                _progress.put((job.name, rounds))

    return simulate(
        job.config,
        job.directory,
        batched=job.batched,
        saves_models=job.saves_models,
        on_round=report,
    )


def _simulate_far_away(config: str, *, batched: bool, saves_models: bool) -> dict[str, bytes]:
    """Simulate in a directory of the cluster's own; the run's files by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config, encoding="utf-8")
        directory = Path(folder) / "run"
        simulate(load_config(path, environment={}), directory, batched=batched, saves_models=saves_models)
        return {file.name: file.read_bytes() for file in directory.iterdir()}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
