"""The server's pages over TLS, with a certificate that may be replaced."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode, LostServerError
from afl_cli.federation.local import _only
from afl_cli.main import main
from afl_cli.status import fetch_status
from support import Federation
from support.identities import Identities, Pair

TOKEN = "t" * 40


def config_of(pair: Pair, **server: Any) -> dict[str, Any]:
    return {
        "workers": 2,
        "task": {"name": "synthetic", "batch_size": 8},
        "algorithm": {"name": "afl-br", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1},
        "server": {"http_certificate": str(pair.certificate), "http_key": str(pair.key), **server},
    }


def shown(port: int) -> str:
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=10)


@pytest.mark.long
def test_pages_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identities, others = Identities(tmp_path / "ours"), Identities(tmp_path / "others")
    pair = identities.server()
    token = tmp_path / "token"
    token.write_text(TOKEN, encoding="utf-8")
    token.chmod(0o600)
    with Federation(config_of(pair, http_token=str(token)), tmp_path / "run") as federation:
        line = federation.server.wait_for("listening")
        port = line["http_port"]
        assert f"https on port {port}" in line["message"]
        url = f"https://127.0.0.1:{port}"
        asked = ["--token-file", str(token), "--json"]
        assert main(["status", url, "--ca", str(identities.ca), *asked]) == 0
        assert json.loads(capsys.readouterr().out)["workers"] == 2
        assert main(["status", url, "--ca", str(identities.ca)]) == ExitCode.LOST_SERVER
        assert "--token-file" in capsys.readouterr().err
        for untrusting in ([], ["--ca", str(others.ca)]):
            assert main(["status", url, *untrusting, *asked]) == ExitCode.LOST_SERVER
            assert "certificate verify failed" in capsys.readouterr().err
        assert main(["status", f"http://127.0.0.1:{port}", *asked]) == ExitCode.LOST_SERVER
        assert "https:// if server.http_certificate is set" in capsys.readouterr().err
        # As `afl run` asks: by an address, and of this certificate alone.
        assert fetch_status(url, TOKEN, _only(pair.certificate))["state"] == "waiting for workers"
        with pytest.raises(LostServerError, match="certificate verify failed"):
            fetch_status(url, TOKEN, _only(others.server().certificate))

        context = ssl.create_default_context(cafile=identities.ca)
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        metrics = urllib.request.urlopen(request, context=context, timeout=10).read().decode()
        (expiry,) = (
            float(line.split()[1]) for line in metrics.splitlines() if line.startswith("afl_page_cert")
        )
        assert time.time() < expiry
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            raw.sendall(f"GET /status HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert b"HTTP" not in raw.recv(1000), "nothing is said in plaintext"

        stalled = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(20)]
        half = ssl.create_default_context(cafile=identities.ca).wrap_socket(
            socket.create_connection(("127.0.0.1", port), timeout=10), server_hostname="127.0.0.1"
        )
        before = time.monotonic()
        assert urllib.request.urlopen(f"{url}/healthz", context=context, timeout=10).read() == b"ok\n"
        assert time.monotonic() - before < 3, "nobody waits for another's handshake"
        half.settimeout(30)
        assert half.recv(1) == b"", "who has a session and asks nothing is hung up on"
        for link in (half, *stalled):
            link.close()

        old = shown(port)
        pair.write(identities.issue_for_server())
        assert shown(port) != old
        federation.server.wait_for("reloaded", what="server.http_certificate")
        new = shown(port)
        pair.certificate.write_text("no certificate", encoding="utf-8")
        assert shown(port) == new
        federation.server.wait_for("reload_failed", what="server.http_certificate")
        pair.write(identities.issue_for_server(days=-1))
        shown(port)
        federation.server.wait_for("certificate_expires", file=str(pair.certificate))


@pytest.mark.parametrize("fault", ["no key", "another's key", "no file", "a folder", "no right to read"])
def test_a_certificate_that_cannot_be_used_is_told_before_anything_begins(tmp_path: Path, fault: str) -> None:
    identities = Identities(tmp_path / "ours")
    pair = identities.server()
    config = config_of(pair)
    match fault:
        case "no key":
            del config["server"]["http_key"]
        case "another's key":
            config["server"]["http_key"] = str(identities.server("other").key)
        case "no file":
            config["server"]["http_key"] = str(tmp_path / "nowhere")
        case "a folder":
            config["server"]["http_certificate"] = str(tmp_path)
        case _:
            pair.key.write_bytes(b"")
    with Federation(config, tmp_path / "run") as federation:
        federation.server.expect(ExitCode.CONFIG)
        said = federation.server.text
        assert "server.http_key" in said or "server.http_certificate" in said
        assert not (federation.directory / "state").exists()
