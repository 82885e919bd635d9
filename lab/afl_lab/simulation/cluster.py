"""Simulated runs on a Ray cluster (the extra ``ray``); their files come back to this machine."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from afl import __version__
from afl.config import dump_config, load_config
from afl.errors import ConfigError, ExitCode, StorageError
from afl.paths import naming_paths
from afl.runs.files import SUMMARY_FILE
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import POLL_S, Outcome, Watch, found_done, interrupts, outcome_of

LOCAL = "local"
"""In place of a cluster's address: one that is started on this machine, and ends with the command."""

CONNECT_TIMEOUT_S = 5.0
"""How long a cluster may take to accept a connection."""

NOT_SENT = [".?*", "?*.*", "!*.py"]
"""What a cluster's nodes are not sent of the working directory, as in .gitignore: hidden names, and those
with an extension but Python's. Whole folders go by their names too, so all others must be let through."""


def run_on_ray(jobs: Sequence[Job], address: str, processes: int, watch: Watch) -> list[Outcome]:
    """Simulate on a Ray cluster, with a CPU for each thread of a run.

    Nodes need the same version of ``afl``, and the tasks' data, where their own ``AFL_DATA`` or the
    configuration says. A task that is named by its class is sent to them: all Python files below the working
    directory.

    Args:
        address: the cluster's, or :data:`LOCAL`.
        processes: CPUs of a local cluster.

    Raises:
        ConfigError: if Ray is not installed, there is no cluster at the address, a run does not fit on it, or
            a job's directory holds another run.
        KeyboardInterrupt: after SIGINT or SIGTERM.
    """
    try:
        import ray  # noqa: PLC0415  # an optional extra
    except ModuleNotFoundError:
        raise ConfigError("the package ray is needed for --ray: pip install 'afl[ray]'") from None
    outcomes = found_done(jobs, watch)
    todo = [job for job in jobs if job.name not in outcomes]
    with _cluster(ray, address, processes, sends_code=any(":" in job.config.task.name for job in todo)):
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes()), default=0)
        function = ray.remote(simulate_there)
        pending = {}
        for job in todo:
            threads = job.config.worker.threads
            if threads > most:
                limit = f"no node has more than {most:g} CPUs"
                raise ConfigError(f"{job.name}: worker.threads is {threads}, and {limit}")
            there = function.options(num_cpus=threads)
            pending[there.remote(dump_config(job.config), __version__, saves_models=job.saves_models)] = job
        # Ray has handlers of its own, which would abort at once.
        with interrupts() as seen:
            while pending:
                ready, _ = ray.wait(list(pending), timeout=POLL_S)
                for reference in ready:
                    job = pending.pop(reference)
                    try:
                        outcome = brought_home(job, *ray.get(reference))
                    except ray.exceptions.RayError as error:
                        outcome = Outcome(job, None, str(error).strip(), ExitCode.INTERNAL)
                    outcomes[job.name] = outcome
                    watch(job, outcome)
                if seen:
                    raise KeyboardInterrupt
    return [outcomes[job.name] for job in jobs]


@contextlib.contextmanager
def _cluster(ray: Any, address: str, processes: int, *, sends_code: bool) -> Iterator[None]:
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        options |= {"num_cpus": processes, "include_dashboard": False}
    elif sends_code:
        options["runtime_env"] = {"working_dir": str(Path.cwd()), "excludes": NOT_SENT}
    try:
        knock(address)
        ray.init(**options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def knock(address: str) -> None:
    """Raise OSError where nothing listens, ValueError for no address: Ray itself would try for minutes."""
    if address in {LOCAL, "auto"}:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError("an address is HOST:PORT, ray://HOST:PORT or auto")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def simulate_there(
    config: str, version: str, *, saves_models: bool
) -> tuple[dict[str, bytes], str, ExitCode]:
    """On a node: simulate in a directory of its own; the run's files by name, or an error."""
    if version != __version__:
        error = f"this node has afl {__version__}, and the command afl {version}; install one on all"
        return {}, error, ExitCode.CONFIG
    try:
        with naming_paths(StorageError), tempfile.TemporaryDirectory() as folder:
            path, directory = Path(folder) / "config.yaml", Path(folder) / "run"
            path.write_text(config, encoding="utf-8")
            job = Job("", load_config(path, environment={}), directory, saves_models)
            outcome = outcome_of(job, lambda _: None)
            if outcome.summary is None:
                return {}, outcome.error, outcome.code
            return {file.name: file.read_bytes() for file in directory.iterdir()}, "", ExitCode.OK
    except StorageError as error:
        return {}, f"on its node: {error}", error.exit_code


def brought_home(job: Job, files: dict[str, bytes], error: str, code: ExitCode) -> Outcome:
    """Its files in its directory, the summary last: only a whole run has one."""
    if error:
        return Outcome(job, None, error, code)
    try:
        with job.claimed():
            job.clear()
            for name in sorted(files, key=lambda name: name == SUMMARY_FILE):
                (job.directory / name).write_bytes(files[name])
    except (OSError, StorageError) as problem:
        return Outcome(job, None, str(problem), ExitCode.STORAGE)
    return Outcome(job, job.summary())
