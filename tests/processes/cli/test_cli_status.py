"""``afl status`` against a server that answers, one that is not ours, and none."""

import json
import math
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ConfigError
from afl_cli import status
from afl_cli.main import main
from afl_cli.status import status_url
from support.identities import Identities

STATE = {
    "run_id": "20260101-000000-abcdef",
    "afl_version": "0.1.0",
    "state": "running",
    "task": "digits",
    "algorithm": "afl-com",
    "round": 20,
    "rounds": 100,
    "step": "training",
    "open_round": 21,
    "workers": 12,
    "workers_missing": [],
    "workers_missing_seconds": [],
    "reports_missing": [3],
    "open_step_seconds": 9.0,
    "seconds": 4.0,
    "seconds_left": 75.0,
    "last": {
        "round": 20,
        "worst_worker": 7,
        "worst_accuracy": 0.25,
        "mean_accuracy": 0.5,
        "max_loss": 2.0,
        "mean_loss": 1.0,
    },
    "best": None,
    "uplink_bytes": 1500,
    "downlink_bytes": 2_500_000,
    "uplink_float_equivalents": 1.0,
    "downlink_float_equivalents": 1.0,
    "uncompressed_bytes": 25_015_000,
    "dual_weights": [1 / 12] * 12,
    "dual_history": {
        "rounds": [18, 19, 20],
        "restarts": [1],
        "workers": [3, 7],
        "weights": [[0.1, 0.083, 0.09], [0.4, 0.083, 0.2]],
    },
    "directory": "runs/x",
}


def test_who_is_connected_is_named_with_version_address_and_since_when(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sessions = [
        {"workers": [0, 1, 2], "peer": "ipv6:%5B::1%5D:5", "version": "0.1.0", "seconds": 75.0},
        *(
            {"workers": [3 + n], "peer": "ipv4:10.0.0.9:5", "version": "0.2.0", "seconds": None}
            for n in range(30)
        ),
    ]
    with serving(json.dumps({**STATE, "sessions": sessions}).encode()) as address:
        assert main(["status", address]) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if "::1" in line] == [
        ["│", "workers", "0-2", "│", "0.1.0", "│", "[::1]:5", "│", "1", "min", "15", "s", "│"]
    ]
    assert said.count("not yet") == 19
    assert "and 11 more: --json has all" in said


@pytest.mark.parametrize(("left", "code"), [(3.0, 0), (75.0, 4)])
def test_watching_ends_with_the_run(left: float, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that goes when its run was nearly over has ended it; another one is lost."""
    with serving_once([{**STATE, "last": None}, {**STATE, "round": 99, "seconds_left": left}]) as address:
        assert main(["status", address, "--watch"]) == code
    said = capsys.readouterr()
    assert "worst worker 7, accuracy 0.250" in said.out
    assert ("The run is over." in said.out) == (code == 0)
    assert ("after round 99 of 100" in said.err) == (code == 4)


def test_watching_ends_when_the_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps({**STATE, "state": "over"}).encode()) as address:
        assert main(["status", address, "--watch"]) == 0
    assert "The run is over." in capsys.readouterr().out


@contextmanager
def serving_once(states: list[dict[str, Any]]) -> Iterator[str]:
    """A server that answers so often, and is then gone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the base class's name
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(states.pop(0)).encode())

        def log_message(self, *args: object) -> None:
            pass

    def serve() -> None:
        with server:
            while states:
                server.handle_request()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        thread.join()


@contextmanager
def serving(
    body: bytes, code: int = 200, path: str = "/status", tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the base class's name
            self.send_response(code if self.path == path else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        # The end of each test waits for as long as it takes to look whether it should.
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def unreachable_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment must not come between this machine and itself."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(status, "WATCH_S", 0.01)


def test_the_run_at_a_glance(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(STATE).encode()) as address:
        assert main(["status", address]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "20260101-000000-abcdef",
        "20 of 100",
        "1 min 15 s left",
        "waiting for worker 3",
        "worker 7",
        "10.0 times",
    ):
        assert expected in shown
    assert "1.50 kB" in shown
    assert "2.50 MB" in shown


def test_missing_workers_and_for_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    missing = {"workers_missing": [2, 5, 7], "workers_missing_seconds": [None, 125.0, 3.21]}
    with serving(json.dumps({**STATE, **missing}).encode()) as address:
        assert main(["status", address]) == 0
    said = "9 of 12 ready; waiting for workers 2, 5 (lost 2 min 5 s ago), 7 (lost 3.2 s ago)"
    assert said in " ".join(capsys.readouterr().out.split())


def test_json_is_the_whole_state(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(STATE).encode()) as address:
        assert main(["status", f"http://{address}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATE


def test_behind_a_reverse_proxy_with_tls_and_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = Identities(tmp_path)
    pair = identities.server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with serving(json.dumps(STATE).encode(), path="/afl/status", tls=context) as address:
        assert main(["status", f"https://{address}/afl/"]) == 4
        said = capsys.readouterr().err
        assert "certificate verify failed" in said
        assert "SSL_CERT_FILE" in said
        assert "nothing answers" not in said
        monkeypatch.setenv("SSL_CERT_FILE", str(identities.ca))
        assert main(["status", f"https://{address}/afl/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATE


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"nothing here", 404, "answers 404"),
        (b"nothing behind", 502, "a proxy answers, the server behind it does not"),
        (b"\x00\x00\x12\x04 not json", 200, "gRPC port"),
        (b'{"hello": 1}', 200, "not an afl server"),
        (b"[]", 200, "not an afl server"),
        (b"[" * 100_000, 200, "gRPC port"),
        (json.dumps(dict.fromkeys(STATE)).encode(), 200, "a state that cannot be shown (TypeError"),
        (json.dumps(dict.fromkeys(STATE, 10**400)).encode(), 200, "a state that cannot be shown ("),
        (json.dumps({**STATE, "rounds": math.nan}).encode(), 200, "a state that cannot be shown (ValueError"),
    ],
)
def test_something_else_answers(
    body: bytes, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(body, code) as address:
        assert main(["status", address]) == 4
    assert said in capsys.readouterr().err


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(b"") as address:
        pass
    assert main(["status", address]) == 4
    error = capsys.readouterr().err
    assert f"nothing answers at http://{address}/status" in error
    assert "server.http" in error


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:9090", "http://localhost:9090/status"),
        ("localhost", "http://localhost:9090/status"),
        ("10.8.0.1", "http://10.8.0.1:9090/status"),
        ("[::1]", "http://[::1]:9090/status"),
        ("https://federation.example.org/", "https://federation.example.org:443/status"),
        ("http://127.0.0.1:9090", "http://127.0.0.1:9090/status"),
        ("https://federation.example.org:443/", "https://federation.example.org:443/status"),
        ("http://[::1]:9090/status", "http://[::1]:9090/status"),
        ("http://proxy:80/afl/status", "http://proxy:80/afl/status"),
        ("http://proxy/afl/", "http://proxy:80/afl/status"),
        ("https://proxy/afl", "https://proxy:443/afl/status"),
        ("https://proxy:8443/a/b/status/", "https://proxy:8443/a/b/status"),
        ("proxy:80/afl", "http://proxy:80/afl/status"),
        ("http://proxy/afl/?x=1#charts", "http://proxy:80/afl/status"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert status_url(given) == url


@pytest.mark.parametrize("given", ["ftp://x:1", "9090", "localhost:0", ":9090", "0.0.0.0:9090", "::1", ""])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        status_url(given)
