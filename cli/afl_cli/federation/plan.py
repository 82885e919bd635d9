"""What a federation on this machine is made of: its processes, who hosts whom, and their arguments."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from afl.config.address import is_wildcard
from afl.errors import ConfigError

FEWEST_PROCESSES: Final = 4
"""Each process imports PyTorch, seconds of one core: on two cores ten would take half a minute to start."""

MOST_RESTARTS: Final = 3
"""How often in a row a worker process is started again while no round is closed."""


@dataclass(frozen=True)
class FederationPlan:
    """What is started.

    Attributes:
        server: arguments of ``afl-server``.
        groups: the worker ids of each worker process.
        worker: arguments of each ``afl-worker``, but for its ids and the server.
        own: further ones, of each group's process.
        logs: the folder for their logs.
        http_host: where the server's status is asked for.
        http_certificate: what the page is known by, if it speaks TLS.
        restarts: how often in a row a worker process that dies is started again; 0: its death ends the run.
        stops_softly: whether the first Ctrl-C lets the open round end; otherwise it ends everything.
    """

    server: Sequence[str]
    groups: Sequence[range]
    worker: Sequence[str]
    logs: Path
    http_host: str = "127.0.0.1"
    http_certificate: Path | None = None
    restarts: int = 0
    stops_softly: bool = False
    own: Mapping[range, Sequence[str]] = field(default_factory=dict)


def processes_option(parser: argparse.ArgumentParser) -> None:
    """How many processes host the workers."""
    default = f"one a worker, but no more than {FEWEST_PROCESSES} or the number of cores"
    processes = f"processes that host the workers (default: {default})"
    parser.add_argument("--processes", type=int, metavar="P", help=processes)


def groups_of(workers: int, processes: int | None) -> tuple[range, ...]:
    """The ids 0 to ``workers - 1`` of each process, in runs whose lengths differ by at most one."""
    if processes is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = min(workers, max(FEWEST_PROCESSES, cores))
    if not 1 <= processes <= workers:
        raise ConfigError(f"--processes {processes}: 1 to the number of workers ({workers})")
    edges = [workers * index // processes for index in range(processes + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(edges))


def setting(key: str, value: object) -> list[str]:
    """``--set KEY=VALUE``, with what would be filled in from the environment escaped."""
    return ["--set", f"{key}={json.dumps(value, ensure_ascii=False).replace('${', '$${')}"]


def reachable(host: str) -> str:
    """How this machine reaches itself at what it listens on."""
    return host if not is_wildcard(host) else "::1" if ":" in host else "127.0.0.1"
