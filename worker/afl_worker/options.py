"""What a worker's command line says. Nothing here imports PyTorch: a wrong option is said at once."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afl.config.address import Address
from afl.site.policy import SitePolicy
from afl_worker.network.credentials import CredentialFiles

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

DEFAULT_JOURNAL = Path("afl-journal")


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line says.

    Attributes:
        workers: the hosted ids, ascending.
        task: ``module:Class``, or a name the server must agree with, or ``None`` for the server's choice.
        journal: the folder in which journals are kept, if the run keeps any.
        task_options: the task's options that are this machine's own, such as where its data is.
        credentials: what this process shows of itself, and what it knows the server by.
        policy: what this site allows; by default everything.
        give_up_after: seconds without a server before the worker gives up; ``None`` for never.
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
    policy: SitePolicy = field(default_factory=SitePolicy)
