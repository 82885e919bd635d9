"""What stands between workers and their server limits size or time: the run goes on, at little cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import Federation, Process, Proxy
from support.reverse_proxies import haproxy, nginx

NO_LIMITS = "client_max_body_size 0; grpc_read_timeout 1h; grpc_send_timeout 1h;"
"""As docs/proxies.md has it."""


def config_of(dim: int, workers: int, rounds: int, **server: Any) -> dict[str, Any]:
    return {
        "workers": workers,
        "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": dim}},
        "algorithm": {"name": "afl-br", "rounds": rounds, "eta_w": 0.9, "eta_q": 0.3},
        "evaluation": {"every": rounds},
        "server": server,
    }


@dataclass
class Result:
    """A run through a door: its model, and the bytes that went through the door."""

    model: dict[str, bytes]
    moved: int
    connections: int
    workers: list[Process]


Before = Callable[[int], AbstractContextManager[int]]
"""From the server's port to the one that workers are led to."""


def run(
    config: dict[str, Any],
    folder: Path,
    before: Before = contextlib.nullcontext,
    *,
    rate: int = 0,
    lifetime: float = 0.0,
) -> Result:
    """One process a worker, through a door that carries ``rate`` bytes a second and shuts after ``lifetime``
    seconds, and what is ``before`` the server."""
    with Proxy() as door, Federation(config, folder) as federation, before(federation.port) as port:
        door.rate, door.lifetime = rate, lifetime
        for worker in range(config["workers"]):
            federation.start(str(worker), server=door.address)
        door.aim(port)
        federation.finish(1500)
        return Result(federation.model_bytes(), door.moved, door.links_made, federation.workers)


def behind_nginx(folder: Path, settings: str = "") -> Before:
    return lambda port: nginx(port, folder / "proxy", settings)


@pytest.mark.long
def test_a_link_that_ends_every_connection_after_a_second(tmp_path: Path):
    config = config_of(dim=150_000, workers=2, rounds=2)
    quiet = run(config, tmp_path / "quiet")
    cut = run(config, tmp_path / "cut", rate=300_000, lifetime=1.0)
    assert cut.model == quiet.model
    assert cut.connections > 2 * 6
    # A quarter of a second of each second is lost to starting anew, at worst, and one piece each way.
    assert cut.moved < 1.3 * quiet.moved
    assert all(worker.logged("cut_short", connections=4) for worker in cut.workers)


LARGE = config_of(dim=400_000, workers=2, rounds=2)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Messages of more than a megabyte, with nothing in between."""
    return run(LARGE, tmp_path_factory.mktemp("quiet"))


@pytest.mark.long
def test_nginx_as_it_comes(tmp_path: Path, quiet: Result):
    cut = run(LARGE, tmp_path / "nginx", behind_nginx(tmp_path))
    assert cut.model == quiet.model
    assert cut.connections > 2
    assert cut.moved < 1.3 * quiet.moved


@pytest.mark.long
def test_proxies_as_the_documentation_sets_them_cut_nothing(tmp_path: Path, quiet: Result):
    for name, before in {
        "nginx": behind_nginx(tmp_path, NO_LIMITS),
        "haproxy-tcp": lambda port: haproxy(port, tmp_path / "tcp", mode="tcp"),
        "haproxy-http": lambda port: haproxy(port, tmp_path / "http", mode="http"),
    }.items():
        through = run(LARGE, tmp_path / name, before)
        assert through.model == quiet.model, name
        assert through.connections == 2, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_workers_and_a_million_parameters(tmp_path: Path):
    config = config_of(dim=1_000_000, workers=10, rounds=5)
    quiet = run(config, tmp_path / "quiet")
    for name, through in {
        "cut": run(config, tmp_path / "cut", rate=200_000, lifetime=5.0),
        "nginx": run(config, tmp_path / "behind", behind_nginx(tmp_path)),
    }.items():
        assert through.model == quiet.model, name
        assert through.moved <= 1.15 * quiet.moved, name


@pytest.mark.long
def test_a_link_on_which_nothing_gets_through_is_given_up_and_the_message_says_why(tmp_path: Path):
    config = config_of(dim=400_000, workers=1, rounds=2)
    with Proxy() as door, Federation(config, tmp_path / "run") as federation:
        # Enough to be welcomed; less than any piece of a model.
        door.rate, door.lifetime = 40_000, 0.7
        worker = federation.start("0", "--give-up-after", "8s", server=door.address)
        door.aim(federation.port)
        worker.expect(4)
        assert worker.logged("joined")
        (ended,) = worker.logged("ended", code=4)
    for part in ("no progress with the server", "were cut in the middle of a message", "MB received in 0."):
        assert part in ended["message"]
