"""Why a worker cannot take part, in words that its operator can act on."""

from __future__ import annotations

import hmac

from afl._version import __version__
from afl.errors import ConfigError
from afl.names import ACCEPTED, is_name
from afl.outside import words
from afl.tasks.initialization import realization_digest
from afl.tasks.registry import task_identity
from afl.wire.frames import OLDEST_PROTOCOL, PROTOCOL, spoken_protocol
from afl_server.federation.events import Joined, Ready
from afl_server.federation.run import Run


class Admission:
    """What a worker must have in common with the run."""

    def __init__(self, run: Run) -> None:
        self._run = run.description
        self._layout_hash = run.engine.model.layout_hash()
        self._frozen_digest = run.engine.model.frozen_digest
        algorithm, dim = run.engine.algorithm, run.engine.model.dim
        self.realization_digest = realization_digest(algorithm, algorithm.settings, dim)

    def of_join(self, join: Joined) -> str:
        """Why a Join is refused; empty if it is not."""
        return self._identity_refusal(join) or _name_refusal(join)

    def _identity_refusal(self, join: Joined) -> str:
        run = self._run
        if join.run_id and join.run_id != run.run_id:
            return (
                f"this worker belongs to run {join.run_id}; this server runs {run.run_id}. "
                "Restart the worker to join the new run"
            )
        if join.task and not _is_same_task(join.task, run.task):
            # A worker loads a class that is named by its module only if its own command line says so.
            without = "" if ":" in run.task else ", or without --task"
            return (
                f"this worker was started for the task {join.task!r}; the run's is {run.task!r}. "
                f"Start it with --task {run.task}{without}"
            )
        outside = next((worker for worker in join.workers if worker >= run.workers), None)
        if outside is not None:
            return (
                f"worker {outside} is out of range: the run has {run.workers} workers; start it with an "
                f"--id from 0 to {run.workers - 1}"
            )
        if join.layout_hash and join.layout_hash != self._layout_hash:
            return (
                "the model's layout is not the run's: names, shapes, types and order must be the same; "
                "install the same version of the task at both ends, and start the worker again"
            )
        return ""

    def of_ready(self, ready: Ready) -> str:
        """Why a Ready is refused; empty if it is not."""
        if ready.layout_hash != self._layout_hash:
            return (
                f"the model's layout differs: this worker's has {ready.dim} trainable parameters, the "
                f"run's {self._run.dim}; names, shapes, types and order must be the same; install the "
                "same version of the task at both ends"
            )
        if ready.frozen_digest != self._frozen_digest:
            ours, theirs = (
                digest or "none" for digest in (self._frozen_digest, words(ready.frozen_digest, 40))
            )
            return (
                f"the frozen parameters differ: this worker's digest is {theirs}, the run's {ours}; give "
                "each site the same file, and the same version of the task"
            )
        return ""

    def of_arithmetic(self, ready: Ready, version: str) -> str:
        """Why a Ready is refused that would compute otherwise; empty if it is not."""
        if hmac.compare_digest(ready.realization_digest, self.realization_digest):
            return ""
        return (
            f"the shared randomness differs, or what is computed with it: this worker (afl {version}) "
            "draws or computes something else from the same seed, so it would decode wrongly; install the "
            f"server's afl ({__version__}) and compressors"
        )


def version_refusal(join: Joined) -> str:
    """Why a worker's versions are refused; empty if a protocol is common. One end alone need be upgraded."""
    if spoken_protocol(join.protocol, join.oldest_protocol):
        return ""
    is_old = join.protocol < OLDEST_PROTOCOL
    end, needed = ("worker", __version__) if is_old else ("server", join.package_version)
    return (
        f"this worker (afl {join.package_version}) speaks {_range(join.oldest_protocol, join.protocol)}, the "
        f"server (afl {__version__}) {_range(OLDEST_PROTOCOL, PROTOCOL)}: install afl {needed} at the {end}, "
        "or another version that speaks a protocol of the other end"
    )


def _range(oldest: int, newest: int) -> str:
    return f"protocol {newest}" if oldest == newest else f"protocols {oldest} to {newest}"


def _name_refusal(join: Joined) -> str:
    if join.sites and len(join.sites) != len(join.workers):
        return f"{len(join.sites)} names of sites for {len(join.workers)} workers; give one for each, or none"
    wrong = next((name for name in join.sites if not is_name(name)), None)
    return "" if wrong is None else f"this worker calls its site {wrong!r}; a name has {ACCEPTED}"


def _is_same_task(one: str, other: str) -> bool:
    try:
        return task_identity(one) == task_identity(other)
    except ConfigError:
        return False
