"""What stands between workers and their server limits size or time: the run goes on, and costs little more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import Federation, Proxy, run_together
from support.nginx import nginx

RATE = 200_000
"""Bytes a second each way, as a site's uplink may have."""


def config_of(dim: int, workers: int, rounds: int) -> dict[str, Any]:
    return {
        "workers": workers,
        "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": dim}},
        "algorithm": {"name": "afl-br", "rounds": rounds, "eta_w": 0.9, "eta_q": 0.3},
        "evaluation": {"every": rounds},
    }


class Result:
    """A run through a proxy: its model, and how many bytes went through."""

    def __init__(self, config: dict[str, Any], folder: Path, door: Proxy, federation: Federation) -> None:
        for worker in range(config["workers"]):
            federation.start(str(worker), server=door.address)
        door.aim(federation.port)
        federation.finish(900)
        self.model = federation.model_bytes()
        self.moved = door.moved
        self.connections = door.links_made
        self.log = "".join(process.text for process in federation.workers)


def through(config: dict[str, Any], folder: Path, *, rate: int = 0, lifetime: float = 0.0) -> Result:
    with Proxy() as door, Federation(config, folder) as federation:
        door.rate, door.lifetime = rate, lifetime
        return Result(config, folder, door, federation)


def through_nginx(config: dict[str, Any], folder: Path) -> Result:
    with (
        Proxy() as door,
        Federation(config, folder) as federation,
        nginx(federation.port, folder / "nginx") as port,
    ):
        for worker in range(config["workers"]):
            federation.start(str(worker), server=door.address)
        door.aim(port)
        federation.finish(900)
        return Result(config, folder, door, federation)
