"""From an algorithm's name to its halves. A new algorithm is added here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afl.algorithms.afl_com import (
    AflComReplica,
    AflComServer,
    AflComSettings,
    AflComWorker,
    Realizations,
)
from afl.algorithms.base import Replica, ServerAlgorithm, WorkerAlgorithm
from afl.randomness import SharedRandomness

ALGORITHMS = ("afl-br", "afl-com")
"""AFL-BR is AFL-Com with the identity compressor."""


def server_half(settings: AflComSettings, params: Tensor, randomness: SharedRandomness) -> ServerAlgorithm:
    """The server's half, which moves ``params`` in place."""
    return AflComServer(settings, params, randomness)


class WorkerSide:
    """What a worker process runs: one model copy and one half for each hosted worker."""

    def __init__(
        self,
        settings: AflComSettings,
        dim: int,
        randomness: SharedRandomness,
        workers: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.realizations = Realizations(settings, dim, randomness, device)
        self.replica: Replica = AflComReplica(settings, self.realizations)
        self.halves: dict[int, WorkerAlgorithm] = {
            worker: AflComWorker(worker, self.realizations, device) for worker in workers
        }
