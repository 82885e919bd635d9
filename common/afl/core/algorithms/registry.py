"""From an algorithm's name to its halves. A new algorithm is added here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afl.core.algorithms.afl_com import AflComReplica, AflComServer, AflComWorker, Realizations
from afl.core.algorithms.base import Replica, ServerAlgorithm, WorkerAlgorithm
from afl.core.algorithms.drfa import DrfaServer
from afl.core.algorithms.fedavg import FedAvgServer
from afl.core.algorithms.local_sgd import IterateReplica, LocalSgdWorker, snapshot_offset
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.dual import ProjectedAscent
from afl.core.randomness import SharedRandomness

ALGORITHMS = ("afl-br", "afl-com", "sgda", "drfa", "fedavg")
"""AFL-BR is AFL-Com with the identity compressor; SGDA is AFL-BR with projected ascent."""


def server_half(settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness) -> ServerAlgorithm:
    """The server's half, which moves ``params`` in place."""
    if settings.name == "fedavg":
        return FedAvgServer(settings, params)
    if settings.name == "drfa":
        return DrfaServer(settings, params, randomness)
    if settings.name == "sgda":
        return AflComServer(settings, params, randomness, ProjectedAscent(settings.workers, settings.eta_q))
    return AflComServer(settings, params, randomness)


class WorkerSide:
    """What a worker process runs: one model copy and one half for each hosted worker.

    Args:
        resends: whether a report must stay as it is until the worker's next one, to be sent again after a
            cut; otherwise it may share memory with what the next worker computes.
        keeps_old: whether a residual whose sum overflows must stay as it was: a step that has no finite
            answer is then left out, and the next one goes on.
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        dim: int,
        randomness: SharedRandomness,
        workers: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        resends: bool = True,
        keeps_old: bool = False,
    ) -> None:
        self.settings = settings
        self._randomness = randomness
        self._realizations: Realizations | None = None
        self.replica: Replica
        self.halves: dict[int, WorkerAlgorithm]
        if settings.name in {"fedavg", "drfa"}:
            snapshots = randomness if settings.name == "drfa" else None
            self.replica = IterateReplica()
            self.halves = {worker: LocalSgdWorker(worker, settings, snapshots) for worker in workers}
            return
        realizations = Realizations(settings, dim, randomness, device)
        self._realizations = realizations
        self.replica = AflComReplica(settings, realizations)
        self.halves = {
            worker: AflComWorker(worker, realizations, device, resends=resends, keeps_old=keeps_old)
            for worker in workers
        }

    def prepare(self, synchronization: int) -> None:
        """Draw a coming round's randomness, off the critical path."""
        if self._realizations is not None and synchronization <= self.settings.synchronizations:
            self._realizations.prepare(synchronization)

    def digest_material(self) -> bytes:
        """As :meth:`afl.core.algorithms.base.ServerAlgorithm.digest_material`."""
        if self._realizations is not None:
            return self._realizations.digest_material()
        if self.settings.name == "drfa":
            steps = len(self.settings.updates_of(1))
            return snapshot_offset(self._randomness, 1, steps).to_bytes(8, "little")
        return b""
