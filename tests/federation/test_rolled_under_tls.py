"""What operators do to a run under mutual TLS: the result is a plaintext run's left alone, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from support import Federation, Process, Proxy, result_of, run_together
from support.identities import Identities, Pair, tls

IDS = ("0", "1", "2")

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8},
    "evaluation": {"every": 15},
}

COMPRESSORS = {"top-k": {"name": "top-k", "ratio": 0.1}, "rand-k": {"name": "rand-k", "ratio": 0.1}}

SLOWLY_S = 0.05
"""What the links add each way while something is done to the run, so that it does not end meanwhile."""


def config_of(compressor: str, **server: Any) -> dict[str, Any]:
    algorithm = {"name": "afl-com", "rounds": 80, "eta_w": 0.5, "eta_q": 0.3, "block": 7}
    own = {"checkpoint_every": 10, "heartbeat": "0.2s", **server}
    return {**CONFIG, "algorithm": {**algorithm, "uplink": COMPRESSORS[compressor]}, "server": own}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run in plaintext leaves to which nothing is done."""
    results: dict[str, dict[str, Any]] = {}

    def result(compressor: str) -> dict[str, Any]:
        if compressor not in results:
            folder = tmp_path_factory.mktemp("plaintext")
            results[compressor] = result_of(run_together(config_of(compressor), folder, IDS))
        return results[compressor]

    return result


class Silos:
    """Three workers under mutual TLS behind one slow link, and what their operators have in their files."""

    def __init__(self, folder: Path, compressor: str, link: Proxy) -> None:
        self.old = Identities(folder / "pki")
        self.link = link
        self.link.delay = SLOWLY_S
        self.server_pair = self.old.server(days=20)
        self.pairs = {ids: self.old.worker(ids) for ids in IDS}
        # What the server asks of workers and what workers ask of the server are files of their own.
        self.client_ca, self.ca = folder / "client-ca.pem", folder / "ca.pem"
        self.trust(self.old)
        config = config_of(compressor, tls=tls(self.server_pair, self.client_ca))
        self.federation = Federation(config, folder / "run")
        self.workers: dict[str, Process] = {}

    def trust(self, *authorities: Identities) -> None:
        """Server and workers trust these, and no others."""
        bundle = b"".join(authority.ca.read_bytes() for authority in authorities)
        for path in (self.client_ca, self.ca):
            new = path.with_suffix(".new")
            new.write_bytes(bundle)
            new.replace(path)

    def start(self, ids: str, pair: Pair | None = None, **options: Any) -> Process:
        own = (pair or self.pairs[ids]).worker_options
        return self.federation.start(ids, "--ca", str(self.ca), *own, server=self.link.address, **options)

    def start_all(self) -> None:
        self.link.aim(self.federation.port)
        self.workers = {ids: self.start(ids) for ids in IDS}

    def reach(self, round_: int) -> None:
        """Wait for a round; the run must not have ended by then."""
        status = self.federation.wait_until(lambda status: status["round"] >= round_)
        assert status["state"] == "running"

    def cut(self) -> None:
        """Reset all connections, and wait until all workers have shown their certificates again."""
        before = {ids: len(worker.logged("joined_again")) for ids, worker in self.workers.items()}
        self.link.cut()
        for ids, worker in self.workers.items():
            worker.wait_for("joined_again", count=before[ids] + 1)

    def roll_worker(self, ids: str) -> None:
        self.workers[ids].terminate()
        self.workers[ids].expect(ExitCode.INTERRUPTED)
        self.federation.workers.remove(self.workers[ids])
        self.workers[ids].close()
        self.workers[ids] = self.start(ids)
        self.workers[ids].wait_for("journal_read")
        self.workers[ids].wait_for("joined")

    def roll_server(self) -> None:
        before = {ids: len(worker.logged("joined_again")) for ids, worker in self.workers.items()}
        self.federation.server.terminate()
        self.federation.server.expect(ExitCode.INTERRUPTED)
        self.federation.start_server()
        self.link.aim(self.federation.port)
        assert self.federation.server.wait_for("resumed")
        for ids, worker in self.workers.items():
            worker.wait_for("joined_again", count=before[ids] + 1)

    def finish(self) -> dict[str, Any]:
        """What the run leaves, when nothing of it was lost."""
        self.link.delay = 0.0
        self.federation.finish()
        for server in self.federation.servers:
            for event in ("lost_residual", "round_restarted", "rounds_lost", "worker_ahead"):
                assert not server.logged(event)
        return result_of(self.federation)


@pytest.fixture
def silos(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Silos]:
    with Proxy() as link:
        found = Silos(tmp_path, request.param, link)
        with found.federation:
            found.start_all()
            yield found


@pytest.mark.long
@pytest.mark.parametrize(
    ("silos", "compressor"),
    [("top-k", "top-k"), pytest.param("rand-k", "rand-k", marks=pytest.mark.slow)],
    indirect=["silos"],
)
def test_a_certificate_is_rotated_and_worker_and_server_are_rolled(
    silos: Silos, compressor: str, undisturbed: Callable[[str], dict[str, Any]]
) -> None:
    silos.reach(3)
    silos.pairs["1"].write(silos.old.issue_for_worker("1"))
    silos.cut()
    silos.reach(6)
    silos.roll_worker("2")
    silos.reach(12)
    silos.roll_server()
    silos.reach(18)

    expiry = silos.federation.metrics()["afl_certificate_expiry_seconds"]
    silos.server_pair.write(silos.old.issue_for_server(days=40))
    silos.cut()
    silos.federation.server.wait_for("reloaded")
    assert silos.federation.metrics()["afl_certificate_expiry_seconds"] > expiry + 19 * 24 * 3600
    assert silos.finish() == undisturbed(compressor)


@pytest.mark.parametrize("silos", ["top-k"], indirect=True)
@pytest.mark.long
def test_the_authority_is_replaced_in_three_steps_and_no_round_is_lost(
    silos: Silos, undisturbed: Callable[[str], dict[str, Any]]
) -> None:
    stale = silos.old.worker("2", "stale")
    new = Identities(silos.old.folder / "new", "new-ca")
    silos.reach(3)
    silos.trust(silos.old, new)
    silos.cut()
    silos.reach(8)

    silos.server_pair.write(new.issue_for_server())
    for ids, pair in silos.pairs.items():
        pair.write(new.issue_for_worker(ids))
        silos.cut()
    silos.reach(18)

    silos.trust(new)
    silos.cut()
    late = silos.start("2", stale)
    assert "refuses this worker's certificate" in late.wait_for("reconnecting")["message"]
    silos.federation.workers.remove(late)
    late.close()
    assert silos.finish() == undisturbed("top-k")
