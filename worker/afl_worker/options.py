"""What a worker's command line says. Nothing here imports PyTorch: a wrong option is said at once."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afl.config.address import Address
from afl.site.policy import SitePolicy
from afl_worker.network.credentials import CredentialFiles, PeerFiles

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

DEFAULT_JOURNAL = Path("afl-journal")

LEAST_MIN_WORKERS = 2
DEFAULT_MIN_WORKERS = 3
"""Of a sum of two, each of the two knows the other's part."""


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line says.

    Attributes:
        workers: the hosted ids, ascending.
        task: ``module:Class``, or a name the server must agree with, or ``None`` for the server's choice.
        journal: the folder in which journals are kept, if the run keeps any.
        task_options: the task's options that are this machine's own, such as where its data is.
        credentials: what this process shows of itself, and what it knows the server by.
        peers: in runs with secure aggregation, how it knows the other workers and they know it.
        min_workers: the fewest workers of a federation whose masked sum this process takes part in.
        sites: what the workers' sites call themselves, one for each; or none.
        capture: where all that is sent is kept too.
        policy: what this site allows; by default everything.
        give_up_after: seconds without a server before the worker gives up; ``None`` for never.
        again: whether it takes part in further runs at the same server, one after the other.
    """

    workers: tuple[int, ...]
    server: Address
    task: str | None = None
    device: str = "auto"
    give_up_after: float | None = 600.0
    use_proxy: bool = True
    journal: Path = DEFAULT_JOURNAL
    task_options: Mapping[str, Any] = field(default_factory=dict)
    credentials: CredentialFiles = field(default_factory=CredentialFiles)
    peers: PeerFiles = field(default_factory=PeerFiles)
    min_workers: int = DEFAULT_MIN_WORKERS
    sites: tuple[str, ...] = ()
    capture: Path | None = None
    policy: SitePolicy = field(default_factory=SitePolicy)
    again: bool = False
