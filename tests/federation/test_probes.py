"""What probes are told: whether a daemon lives, and whether it takes part."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import afl_server.pages.http
from afl._version import __version__
from afl.config.address import Address
from afl.daemon.http import Answer, Environ, HttpPages
from afl_server.pages.http import liveness
from afl_worker.pages import FAMILIES
from support import Federation, Process
from support.federation import fetch, free_port
from support.identities import Identities, tls
from support.process import END_S

CONFIG: dict[str, Any] = {
    "workers": 1,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-com", "rounds": 12, "eta_w": 0.9, "eta_q": 0.3},
}


def asked(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    try:
        return 200, fetch(f"http://127.0.0.1:{port}{path}").strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()


def wait_until_ready(port: int) -> None:
    """Asked for twenty times a second."""
    tick = threading.Event()
    for _ in range(int(20 * END_S)):
        if asked(port, "/readyz") == (200, "ready"):
            return
        tick.wait(0.05)
    raise AssertionError(f"not ready within {END_S:g} s: {asked(port, '/readyz')}")


def test_a_worker_is_alive_from_its_start_and_ready_while_it_has_a_session(tmp_path: Path) -> None:
    http = free_port()
    two = {**CONFIG, "workers": 2}
    with Federation(two, tmp_path / "run") as federation:
        worker = federation.start("0", "--http", f"127.0.0.1:{http}", "--stay")
        worker.wait_for("joined")
        wait_until_ready(http)
        assert asked(http, "/healthz") == (200, "ok")
        assert "afl_site_state" in asked(http, "/metrics")[1]

        federation.server.kill()
        worker.wait_for("reconnecting")
        assert asked(http, "/readyz") == (503, "no session with the server")
        assert asked(http, "/healthz") == (200, "ok"), (
            "a server that is away is no reason to kill its workers"
        )
        lost = worker.wait_for("reconnecting")
        assert lost["ids"] == "0"
        run_id = lost["run_id"]
        assert run_id == worker.wait_for("joined")["run_id"]
        port = lost["message"].partition("127.0.0.1:")[2].partition(" ")[0]

        server = federation.start_server("--set", f"server.listen=127.0.0.1:{port}", "--stay")
        other = federation.start("1", server=f"127.0.0.1:{port}")
        for each in (worker, server):
            each.wait_for("staying")
        other.expect(0)
        assert {server.wait_for(event)["run_id"] for event in ("resumed", "listening", "run_over")} == {
            run_id
        }
        assert asked(http, "/readyz") == (503, "the run is over")
        assert asked(http, "/healthz") == (200, "ok")
        assert asked(server.wait_for("listening")["http_port"], "/readyz") == (503, "the run is over")
        for each in (worker, server):
            each.terminate()
            each.expect(0)


def test_a_worker_serves_metrics_of_its_own_process(tmp_path: Path) -> None:
    config = {**CONFIG, "workers": 2}
    config["algorithm"] = {**CONFIG["algorithm"], "uplink": {"name": "top-k", "ratio": 0.1}}
    http = free_port()
    with Federation(config, tmp_path / "run") as federation:
        policy = tmp_path / "policy.yaml"
        policy.write_text("max_rounds: 20\n", encoding="utf-8")
        worker = federation.start("0-1", "--http", f"127.0.0.1:{http}", "--policy", str(policy), "--stay")
        worker.wait_for("staying")
        lines = asked(http, "/metrics")[1].splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        served = {name: float(value) for name, _, value in pairs}
        run_id = federation.server.wait_for("listening")["run_id"]
        info = f'afl_site_process_info{{ids="0-1",run_id="{run_id}",version="{__version__}"}}'
        assert served[info] == 1
        assert served['afl_site_state{state="over"}'] == 1
        assert served['afl_site_state{state="in session"}'] == 0
        assert served["afl_site_round"] == 12
        assert served["afl_site_rounds"] == 12
        assert served["afl_site_policy_rounds_left"] == 8
        assert 0 < served["afl_site_disk_free_bytes"] < served["afl_site_disk_size_bytes"]
        assert served["afl_site_steps_total"] > 12, "evaluations are steps too"
        assert served["afl_site_sessions_total"] == 1
        assert served["afl_site_failed_tries"] == 0
        assert min(served[f'afl_site_residual_norm{{worker="{each}"}}'] for each in (0, 1)) > 0
        timed = worker.wait_for("timings")
        for phase in ("compute", "codec", "prepare", "wait"):
            assert 0 < served[f'afl_site_seconds_total{{phase="{phase}"}}'] <= timed[f"{phase}_wall"] + 1e-6
        federation.server.expect(0)
        summary = federation.summary()
        for direction in ("uplink", "downlink"):
            sent = served[f'afl_site_bytes_total{{direction="{direction}"}}']
            counted = summary["communication"][direction]["wire_bytes"]
            assert 0.5 * counted < sent <= counted, "the server counts gRPC's prefixes too"
        names = {name.partition("{")[0] for name in served}
        assert FAMILIES.keys() - names == {"afl_site_certificate_expiry_seconds", "afl_site_epsilon"}
        for host, status in (("127.0.0.1:1", 200), ("localhost", 200), ("rebound.example", 403)):
            connection = HTTPConnection("127.0.0.1", http)
            connection.request("GET", "/metrics", headers={"Host": host})
            assert connection.getresponse().status == status, host
            connection.close()
        worker.terminate()
        worker.expect(0)


def test_a_run_that_is_complete_is_stayed_with_and_what_fails_ends(tmp_path: Path) -> None:
    with Federation(CONFIG, tmp_path / "run") as federation:
        federation.start("0", "--stay").wait_for("staying")
        federation.server.expect(0)
        http = free_port()
        again = federation.start_server("--set", f"server.http=127.0.0.1:{http}", "--stay")
        again.wait_for("staying")
        assert again.logged("run_complete")
        assert asked(http, "/healthz") == (200, "ok")
        assert asked(http, "/readyz") == (503, "the run is over")
        again.terminate()
        again.expect(0)
        refused = Process(
            "worker 1",
            ["-m", "afl_worker", "--id", "1", "--server", "127.0.0.1:1", "--give-up-after", "0s", "--stay"],
            folder=tmp_path,
        )
        refused.expect(4)
        refused.close()


def test_an_address_that_is_taken_ends_a_worker_with_its_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["-m", "afl_worker", "--id", "0", "--server", "127.0.0.1:1", "--http", where]
        worker = Process("worker 0", arguments, folder=tmp_path)
        worker.expect(6)
        assert f"--http: cannot listen on {where}: another process listens there" in worker.text
        worker.close()


def test_a_server_whose_certificate_has_expired_is_not_ready(tmp_path: Path) -> None:
    ours = Identities(tmp_path / "issued")
    pair = ours.server(days=-3)
    config = {**CONFIG, "server": {"tls": tls(pair)}}
    with Federation(config, tmp_path / "run") as federation:
        port = federation.server.wait_for("listening")["http_port"]
        assert asked(port, "/readyz") == (503, "the server's certificate has expired")
        assert asked(port, "/healthz") == (200, "ok"), "starting it again would mend nothing"
        pair.write(ours.issue_for_server())
        federation.start("0", "--ca", str(ours.ca)).wait_for("joined")
        federation.finish()


def test_a_server_whose_event_loop_stands_still_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afl_server.pages.http, "LOOP_ANSWERS_S", 0.2)

    class Pages(HttpPages):
        def answer(self, path: str, environ: Environ) -> Answer:
            assert path == "/healthz"
            return liveness(loop)

    async def ask() -> tuple[tuple[int, str], tuple[int, str]]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        pages = Pages(Address("127.0.0.1", 0), "server.http")
        try:
            turning = await asyncio.to_thread(asked, pages.port, "/healthz")
            return turning, asked(pages.port, "/healthz")
        finally:
            pages.close()

    loop = asyncio.new_event_loop()
    loop.close()
    turning, standing = asyncio.run(ask())
    assert turning == (200, "ok")
    assert standing == (503, "the event loop has not turned for 0.2 s")
