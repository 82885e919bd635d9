"""A worker whose site lets it out through an HTTP proxy only."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import Federation
from support.identities import Identities, tls
from support.proxy import HttpProxy

HOST = "silo.example.org"
"""No name that this machine knows: what reaches it went through the proxy."""

CONFIG = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-br", "rounds": 30, "eta_w": 0.5, "eta_q": 0.2},
    "evaluation": {"every": 10},
}


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path / "certs")


def test_a_worker_behind_a_proxy_joins_and_comes_back_after_a_cut(
    identities: Identities, tmp_path: Path
) -> None:
    config = {**CONFIG, "server": {"tls": tls(identities.server(hosts=[HOST]), identities.ca)}}
    config["algorithm"] = {**CONFIG["algorithm"], "rounds": 300}
    with HttpProxy() as door, Federation(config, tmp_path / "federation") as federation:
        door.aim(federation.port)
        pair = identities.worker("0-1")
        worker = federation.start(
            "0-1",
            *("--ca", str(identities.ca), *pair.worker_options),
            server=f"{HOST}:50051",
            environment=door.environment,
        )
        federation.wait_until(lambda status: status["round"] >= 20)
        assert door.cut() == 1
        worker.wait_for("reconnecting")
        federation.finish()
        assert door.asked_for == [f"{HOST}:50051"] * 2


def test_a_proxy_that_refuses_is_named(identities: Identities, tmp_path: Path) -> None:
    with HttpProxy(refuses=True) as door, Federation(CONFIG, tmp_path / "federation") as federation:
        door.aim(federation.port)
        worker = federation.start(
            "0",
            *("--ca", str(identities.ca)),
            server=f"{HOST}:50051",
            environment=door.environment,
        )
        worker.wait_for(
            "reconnecting", saying=f"the environment's proxy refused to connect to {HOST}:50051; --no-proxy"
        )


def test_what_a_server_wants_is_found_out_through_the_proxy_too(
    identities: Identities, tmp_path: Path
) -> None:
    config = {**CONFIG, "server": {"tls": tls(identities.server(hosts=[HOST]), identities.ca)}}
    with HttpProxy() as door, Federation(config, tmp_path / "federation") as federation:
        door.aim(federation.port)
        worker = federation.start(
            "0", "--ca", str(identities.ca), server=f"{HOST}:50051", environment=door.environment
        )
        worker.wait_for("reconnecting", saying=f"{HOST}:50051 requires a certificate from this worker")
