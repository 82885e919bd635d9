"""A crowd without credentials at a server's port, which holds on to all it can: workers still come in."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import time
from pathlib import Path
from typing import Any

import pytest
from faults_cases import Lowered

from afl_server.network.disconnect import Place
from afl_server.network.door import Waiting
from support import Federation
from support.http2 import SESSION
from support.identities import Identities, tls
from support.longer import but_long
from support.strangers import CHECK, WATCH, Crowd, call, connection

LIMIT = 256
CROWD = 200
"""More than the connections that such a server allows."""

CONFIG: dict[str, Any] = {
    "workers": 1,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-br", "rounds": 30, "eta_w": 0.1, "eta_q": 0.1},
}
SAID = {
    "watch": call(WATCH),
    "check without a body": call(CHECK, has_body=False),
    "nothing": b"",
}


def at(line: dict[str, Any]) -> dt.datetime:
    """When a line was logged."""
    return dt.datetime.fromisoformat(line["time"])


@pytest.mark.parametrize("said", but_long(SAID, "nothing", "check without a body"))
def test_a_crowd_does_not_lock_workers_out(said: str, tmp_path: Path) -> None:
    ours = Identities(tmp_path / "pki")
    server = {"tls": tls(ours.server()), "tokens": str(ours.tokens), "handshake_timeout": "5s"}
    token = ours.token("0")
    with (
        Lowered({**CONFIG, "server": server}, tmp_path / "run", LIMIT) as federation,
        Crowd(federation.port, CROWD, SAID[said], ours.ca) as crowd,
    ):
        worker = federation.start("0", "--ca", str(ours.ca), "--token-file", str(token))
        ready = at(federation.server.wait_for("worker_ready", timeout=60))
        tries = [at(line) for line in worker.logged("reconnecting")]
        assert ready - min(tries, default=ready) <= dt.timedelta(seconds=5), worker.text
        metrics = federation.metrics()
        assert metrics["afl_strangers"] <= CROWD
        assert metrics["afl_strangers_cut_total"] > 0
        assert federation.server.logged("strangers_cut")
        federation.finish()
        assert crowd.cut >= CROWD - LIMIT // 2
        assert len(federation.server.text) < 100_000


def test_no_call_without_a_session_lasts(tmp_path: Path) -> None:
    """On one connection: its streams are bounded in number, each in time, and then the connection itself."""
    server = {"handshake_timeout": "1s"}
    with Federation({**CONFIG, "server": server}, tmp_path / "run") as federation:
        paths = (WATCH, CHECK, SESSION)
        said = b"".join(call(paths[n % 3], 2 * n + 1, has_body=n % 3 == 0) for n in range(300))
        with connection(federation.port, None, said) as link:
            began = time.monotonic()
            answers = b""
            while piece := link.recv(65536):
                answers += piece
        assert time.monotonic() - began < 30
        assert b"this call has 1 s" in answers
        assert b"64 calls are open; later" in answers
        assert b"\x00\x03\x00\x00\x00\x64" in answers, "SETTINGS_MAX_CONCURRENT_STREAMS is 100"
        refused = federation.server.logged("refused")
        assert any("no Join within 1 s" in line["reason"] for line in refused)
        assert federation.metrics()["afl_sessions"] == 0
        federation.start("0")
        federation.finish()


@pytest.mark.long
def test_a_call_whose_name_is_no_text_closes_no_door(tmp_path: Path) -> None:
    """It ends gRPC's own loop, which is begun again; sessions that are open notice nothing."""

    def disturb(federation: Federation) -> None:
        for _ in range(3):
            with connection(federation.port, None, call(b"/\xaf")) as link:
                link.settimeout(5)
                with contextlib.suppress(OSError):
                    while link.recv(65536):
                        pass

    config = {**CONFIG, "workers": 2, "server": {"handshake_timeout": "2s"}}
    with Federation(config, tmp_path / "run") as federation:
        disturb(federation)
        first = federation.start("0")
        federation.server.wait_for("worker_ready")
        disturb(federation)
        federation.start("1")
        federation.finish()
        assert not first.logged("reconnecting")
        assert "codec" not in federation.server.text


def test_who_makes_room() -> None:
    def place(number: int) -> Place:
        return ipaddress.ip_address("127.0.0.1"), number

    waiting = Waiting(most=8, patience=10)
    there = [place(number) for number in range(4)]
    assert not waiting.due(there, {place(0)}, now=0)
    assert not waiting.due(there, {place(0)}, now=9)
    assert waiting.due(there, {place(0)}, now=10) == there[1:], "they had their time"
    assert not waiting.due(there[:2], {place(0), place(1)}, now=11)
    assert not waiting.due(there[:2], {place(0)}, now=19), "the time begins with the session's end"
    crowd = [place(number) for number in range(8)]
    assert waiting.due(crowd, {place(0)}, now=19) == [place(1), *crowd[2:5]], "the oldest, down to half"
    assert not waiting.due(crowd, crowd, now=40), "sessions stay"
