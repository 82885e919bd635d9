"""Links made by the kernel, where this machine has what that takes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afl_benchmarks.links import namespaces
from afl_benchmarks.links.kinds import links_of
from afl_benchmarks.links.namespaces import NamespaceLinks, UnavailableError
from afl_benchmarks.links.pipe import Link

CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    connection.sendall(bytes(100_000))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
"""


def devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.fixture(scope="module")
def able() -> None:
    """This machine can make links of a rate."""
    probe = NamespaceLinks(1, Link(rate=2.5e6, delay=0.0))
    try:
        probe.make()
    except UnavailableError as error:
        pytest.skip(f"no network namespaces here: {error}")
    probe.close()


@pytest.fixture
def links(able: None) -> Iterator[NamespaceLinks]:
    found = NamespaceLinks(2, Link(rate=2.5e6, delay=0.0))
    found.make()
    yield found
    found.close()


def test_a_worker_behind_a_link_reaches_a_server_outside(links: NamespaceLinks) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        links.aim(server.getsockname()[1])
        host, _, port = links.address(1).rpartition(":")
        client = subprocess.Popen([*links.inside(1), sys.executable, "-c", CLIENT, host, port])
        try:
            server.settimeout(60)
            connection, peer = server.accept()
            with connection:
                received = 0
                while piece := connection.recv(1 << 16):
                    received += len(piece)
        finally:
            assert client.wait(60) == 0
    assert peer[0] == host.removesuffix("1") + "2"
    assert received == 100_000
    assert 100_000 < links.carried(1).up < 115_000, "headers of Ethernet, IP and TCP are counted"
    assert links.carried(0).up < 1000


def test_nothing_is_left(links: NamespaceLinks) -> None:
    ours = {name for name in devices() if name.startswith("afl")}
    assert len(ours) >= 2
    links.close()
    assert not ours & devices()


def test_what_cannot_be_made_is_said_and_nothing_is_left(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without the queueing discipline is found out only at the end of the first link."""
    before = devices()
    monkeypatch.setattr(NamespaceLinks, "_discipline", lambda _: ("no-such-discipline",))
    with pytest.raises(UnavailableError, match="no-such-discipline"):
        NamespaceLinks(1, Link(1e6, 0.01)).make()
    assert devices() == before


def test_without_the_means_auto_is_the_proxy_and_namespaces_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda _: None)
    with links_of("auto", 1, Link(1e6, 0.01)) as links:
        assert links.kind == "proxy"
    assert "no command ip" in capsys.readouterr().out
    with (
        pytest.raises(UnavailableError, match="no command ip"),
        links_of("namespaces", 1, Link(1e6, 0.01)),
    ):
        pass
