"""Certificates that expire, or are revoked, while connections and TLS sessions made with them live on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.experimental.session_cache as tickets
import pytest

from afl._version import __version__
from afl.errors import ExitCode
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import METHOD, PROTOCOL
from support import Federation
from support.identities import Identities, Pair, serial_line, tls
from support.longer import but_long

LIFE_S = 8.0
CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-br", "rounds": 30, "eta_w": 0.1, "eta_q": 0.1},
}


@contextlib.contextmanager
def channel(federation: Federation, ours: Identities, pair: Pair, cache: Any) -> Iterator[grpc.Channel]:
    """A connection of its own, which takes up a TLS session if the cache has one."""
    credentials = grpc.ssl_channel_credentials(
        ours.ca.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes()
    )
    options = [("grpc.ssl_session_cache", cache), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"localhost:{federation.port}", credentials, options) as made:
        yield made


def answer(made: grpc.Channel) -> pb.ServerFrame:
    """The first frame that a Join of worker 0 is answered with."""
    join = pb.Join(protocol=PROTOCOL, package_version=__version__, incarnation=bytes(16), workers=[0])
    done = threading.Event()

    def frames() -> Iterator[bytes]:
        yield pb.WorkerFrame(join=join).SerializeToString()
        done.wait(30)

    call: Any = made.stream_stream(METHOD)(frames(), timeout=30)
    try:
        return pb.ServerFrame.FromString(next(call))
    finally:
        done.set()
        call.cancel()


@pytest.mark.parametrize("how", but_long(["expired", "revoked"], "expired"))
def test_a_tls_session_outlives_no_certificate(how: str, tmp_path: Path) -> None:
    """It is taken up again without the certificate's being verified; the server looks at it all the same."""
    ours = Identities(tmp_path / "pki")
    revoked = tmp_path / "revoked"
    revoked.touch()
    server = {"tls": {**tls(ours.server(), ours.ca), "revoked": str(revoked)}}
    with Federation({**CONFIG, "server": server}, tmp_path / "run") as federation:
        port = federation.port
        assert port
        began = time.time()
        pair = ours.brief("0-2", LIFE_S) if how == "expired" else ours.worker("0-2")
        cache = tickets.ssl_session_cache_lru(1)
        with channel(federation, ours, pair, cache) as made:
            assert answer(made).HasField("welcome")
        if how == "expired":
            time.sleep(max(0.0, began + LIFE_S + 1 - time.time()))
            with (
                channel(federation, ours, pair, tickets.ssl_session_cache_lru(1)) as made,
                pytest.raises(grpc.RpcError),
            ):
                answer(made)
        else:
            revoked.write_text(serial_line(pair), encoding="utf-8")
        with channel(federation, ours, pair, cache) as made:
            goodbye = answer(made).goodbye
        assert how in goodbye.reason, goodbye
        other = ours.worker("0-2", "other")
        for ids in ("0", "1-2"):
            federation.start(ids, "--ca", str(ours.ca), *other.worker_options)
        federation.finish()


@pytest.mark.long
def test_a_session_ends_with_its_certificate_and_the_renewed_one_is_taken(tmp_path: Path) -> None:
    ours = Identities(tmp_path / "pki")
    revoked = tmp_path / "revoked"
    revoked.touch()
    server = {"tls": {**tls(ours.server(), ours.ca), "revoked": str(revoked)}, "heartbeat": "0.2s"}
    with Federation({**CONFIG, "server": server}, tmp_path / "run") as federation:
        assert federation.port
        brief, bad = ours.brief("0-1", LIFE_S), ours.worker("1")
        first = federation.start("0", "--ca", str(ours.ca), *brief.worker_options)
        second = federation.start("1", "--ca", str(ours.ca), *bad.worker_options)
        federation.server.wait_for("worker_ready", count=2)
        # The run waits for worker 2.
        brief.write(ours.issue_for_worker("0"))
        ended = federation.server.wait_for("refused", saying="certificate expired on 2")
        assert list(ended["workers"]) == [0]
        federation.server.wait_for("worker_ready", count=3)
        revoked.write_text("afl:worker:1\n", encoding="utf-8")
        second.expect(ExitCode.REFUSED)
        federation.workers.remove(second)
        assert "certificates for worker 1 are revoked" in second.text
        assert first.is_running
        revoked.write_text(serial_line(bad), encoding="utf-8")
        renewed = ours.worker("1-2", "renewed")
        for ids in ("1", "2"):
            federation.start(ids, "--ca", str(ours.ca), *renewed.worker_options)
        federation.finish()
        second.close()
