"""Why a worker cannot take part, in words that its operator can act on."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from afl._version import __version__
from afl.errors import ConfigError
from afl.tasks.registry import task_identity
from afl.wire.frames import PROTOCOL
from afl_server.federation.events import Joined, Ready


@dataclass(frozen=True)
class Admission:
    """What a worker must have in common with the run.

    Attributes:
        layout_hash: of the model's parameters.
        dim: their number.
        realization_digest: of the first round's shared randomness.
    """

    run_id: str
    task: str
    workers: int
    layout_hash: bytes
    dim: int
    realization_digest: bytes

    def of_join(self, join: Joined) -> str:
        """Why a Join is refused; empty if it is not."""
        return self._version(join) or self._identity(join)

    @staticmethod
    def _version(join: Joined) -> str:
        if join.protocol != PROTOCOL:
            return (
                f"protocol version {join.protocol} (afl {join.package_version}) cannot talk to "
                f"protocol version {PROTOCOL} (afl {__version__}); install the same afl at both ends"
            )
        if join.package_version != __version__:
            return (
                f"this worker runs afl {join.package_version}, the server afl {__version__}; "
                "mixed versions are refused: install the same at both ends"
            )
        return ""

    def _identity(self, join: Joined) -> str:
        if join.run_id and join.run_id != self.run_id:
            return (
                f"this worker belongs to run {join.run_id}; this server runs {self.run_id}. "
                "Restart the worker to join the new run"
            )
        if join.task and not _is_same_task(join.task, self.task):
            # A worker loads a class that is named by its module only if its own command line says so.
            without = "" if ":" in self.task else ", or without --task"
            return (
                f"this worker was started for the task {join.task!r}; the run's is {self.task!r}. "
                f"Start it with --task {self.task}{without}"
            )
        outside = next((worker for worker in join.workers if worker >= self.workers), None)
        if outside is not None:
            return (
                f"worker {outside} is out of range: the run has {self.workers} workers; start it with an "
                f"--id from 0 to {self.workers - 1}"
            )
        if join.layout_hash and join.layout_hash != self.layout_hash:
            return (
                "the model's layout is not the run's: names, shapes, types and order must be the same; "
                "install the same version of the task at both ends, and start the worker again"
            )
        return ""

    def of_ready(self, ready: Ready) -> str:
        """Why a Ready is refused; empty if it is not."""
        if ready.layout_hash != self.layout_hash:
            return (
                f"the model's layout differs: this worker's has {ready.dim} trainable parameters, the "
                f"run's {self.dim}; names, shapes, types and order must be the same; install the "
                "same version of the task at both ends"
            )
        if not hmac.compare_digest(ready.realization_digest, self.realization_digest):
            return (
                "the shared randomness differs: this worker draws another first realization from the same "
                "seed, so it would decode wrongly; install the same afl and compressors at both ends"
            )
        return ""


def _is_same_task(one: str, other: str) -> bool:
    try:
        return task_identity(one) == task_identity(other)
    except ConfigError:
        return False
