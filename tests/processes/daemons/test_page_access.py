"""By which names pages may be asked for, and with which token."""

from __future__ import annotations

import base64
import http.client
from pathlib import Path
from typing import Any

import pytest

from afl.config import config_from_mapping
from afl.config.schema import Server
from afl.errors import ConfigError, ExitCode
from afl_cli.main import main
from afl_server.pages.access import Access
from support.served_run import Served, serving

TOKEN = "t" * 40


def section(**server: Any) -> Server:
    algorithm = {"name": "afl-br", "rounds": 1, "eta_w": 1.0, "eta_q": 0.0}
    values = {"workers": 2, "task": {"name": "digits"}, "algorithm": algorithm, "server": server}
    return config_from_mapping(values).server


def status(served: Served, path: str = "/status", **headers: str) -> int:
    return served.ask(path, **{name.replace("_", "-"): value for name, value in headers.items()}).status


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


def test_a_page_is_asked_for_by_a_name_of_the_server(tmp_path: Path) -> None:
    """A foreign name in the field is a web page's whose name was made to stand for this address."""
    with serving(tmp_path, section(http="silo:9090", http_hosts=["Status.example.org"])) as served:
        for host in (
            "127.0.0.1:9090",
            "[::1]:9090",
            "10.8.0.1",
            "localhost",
            "LOCALHOST:1",
            "a.localhost",
            "silo:9090",
            "status.example.org",
            "status.example.org.:443",
        ):
            assert status(served, Host=host) == 200, host
        for host in (
            "rebound.example.com",
            "rebound.example.com:9090",
            "127.0.0.1.example.com",
            "",
            "[::1].x",
        ):
            for path in ("/", "/status", "/metrics", "/data/state.json", "/data/stream", "/nowhere"):
                assert status(served, path, Host=host) == 403, (host, path)
            assert status(served, "/healthz", Host=host) == status(served, "/readyz", Host=host) == 200
        link = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=30)
        link.putrequest("GET", "/status", skip_host=True)
        link.endheaders()
        assert link.getresponse().status == 200, "no browser leaves the field out"
        link.close()


def test_a_page_may_need_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    path.chmod(0o600)
    with serving(tmp_path, section(http_token=str(path))) as served:
        wrong = [
            "",
            TOKEN,
            f"Bearer {TOKEN[:-1]}",
            "Bearer",
            basic("x"),
            "Basic !",
            f"Digest {TOKEN}",
            "Bearer \xff",
        ]
        for authorization in wrong:
            assert status(served, Authorization=authorization) == 401, authorization
            assert status(served, "/metrics", Authorization=authorization) == 401
        refused = served.ask("/")
        assert (refused.status, refused.headers["WWW-Authenticate"].partition(" ")[0]) == (401, "Basic")
        for authorization in (f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(TOKEN)):
            assert status(served, Authorization=authorization) == 200
        assert status(served, "/healthz") == status(served, "/readyz") == 200
        address = f"127.0.0.1:{served.server.port}"
        assert main(["status", address]) == ExitCode.LOST_SERVER
        assert "with --token-file" in capsys.readouterr().err
        assert main(["status", address, "--json", "--token-file", str(path)]) == 0
        path.write_text("n" * 40, encoding="utf-8")
        assert status(served, Authorization=basic(TOKEN)) == 401
        assert status(served, Authorization=basic("n" * 40)) == 200


def test_a_token_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("short\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"server.http_token .*token holds no token"):
        Access(section(http_token=str(path)))
