"""The runs that faults are tried on: a few seconds each, with every kind of state that there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support import Federation, Process

TASK = "tests_tasks:Slow"

GROUPS = ("0", "1-2")

_TOP_K = {"name": "top-k", "ratio": 0.2}
_RAND_K = {"name": "rand-k", "ratio": 0.2}
_COM = {"name": "afl-com", "rounds": 40, "eta_w": 0.5, "eta_q": 0.3, "block": 7}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "top-k": {**_COM, "uplink": _TOP_K},
    "rand-k": {**_COM, "uplink": _RAND_K},
    "integers": {**_COM, "uplink": {**_RAND_K, "bits": 4}},
    "masked": {**_COM, "uplink": {**_RAND_K, "bits": 16}},
    "hidden": {**_COM, "uplink": {**_RAND_K, "bits": 16}},
    "drfa": {"name": "drfa", "rounds": 60, "eta_w": 0.3, "eta_q": 0.05, "local_steps": 3},
    "fedavg": {"name": "fedavg", "rounds": 60, "eta_w": 0.3, "local_steps": 2, "weighting": "samples"},
}


PRIVACY = {
    "masked": {"secure_aggregation": True},
    "hidden": {"secure_aggregation": True, "losses": "hidden"},
}

BATCH_NORM = {"mean-norm": "tests_tasks:PartlyFrozen", "local-norm": "tests_tasks:LocalNorm"}


def config_of(algorithm: str, **server: Any) -> dict[str, Any]:
    """A run of three workers with an evaluation every seven rounds and a checkpoint every ten.

    Args:
        algorithm: one of :data:`ALGORITHMS`; ``mean-norm`` (with a frozen layer) and ``local-norm`` are Top-k
            with BatchNorm.
    """
    task = {"name": TASK, "batch_size": 8, "options": {"pause": 0.01}}
    if algorithm in BATCH_NORM:
        task = {"name": BATCH_NORM[algorithm], "batch_size": 6, "evaluation_batch_size": 4}
    own = {"checkpoint_every": 10, "heartbeat": "0.2s", "peer_timeout": "5s", **server}
    return {
        "workers": 3,
        "task": task,
        "algorithm": ALGORITHMS.get(algorithm, {**ALGORITHMS["top-k"], "eta_w": 0.05}),
        "evaluation": {"every": 7},
        "server": own,
        "privacy": PRIVACY.get(algorithm, {}),
    }


def quickly(*algorithms: str) -> list[Any]:
    """Every case as a parameter of a test: these in every run of the tests, the others by ``--slow``."""
    return [
        name if name in algorithms else pytest.param(name, marks=pytest.mark.slow)
        for name in (*ALGORITHMS, *BATCH_NORM)
    ]


class Lowered(Federation):
    """A federation whose server is allowed few descriptors.

    Args:
        limit: that its administrator sets; its shell allows it fewer still.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        limit: int,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(config, folder, environment=environment)
        self._limit = limit

    def start_server(self, *options: str, environment: Any = None) -> Process:
        code = (
            "import resource, runpy; "
            f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {self._limit})); "
            "runpy.run_module('afl_server', run_name='__main__', alter_sys=True)"
        )
        arguments = ["-c", code, "--config", str(self.folder / "server.yaml"), *options]
        there = {**self._environment, **(environment or {})}
        self.servers.append(Process("server", arguments, folder=self.folder, environment=there))
        return self.servers[-1]
