"""Connections that are cut by their peer's address, and by no other's."""

from __future__ import annotations

import socket

import pytest

from afl_server.network.disconnect import disconnect


@pytest.mark.parametrize(
    ("listening", "host", "kind", "shown"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4", "127.0.0.1"),
        ("::1", "::1", "ipv6", "%5B::1%5D"),
        ("::", "127.0.0.1", "ipv4", "127.0.0.1"),
    ],
)
def test_one_connection_is_cut(listening: str, host: str, kind: str, shown: str) -> None:
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    try:
        server = socket.create_server(
            (listening, 0), family=family, dualstack_ipv6=listening == "::" and socket.has_dualstack_ipv6()
        )
        port = server.getsockname()[1]
        client = socket.create_connection((host, port), timeout=30)
    except OSError as error:
        pytest.skip(f"no {kind} on {listening} here: {error}")
    with server, client, socket.create_connection((host, port), timeout=30) as other:
        accepted = [server.accept()[0] for _ in range(2)]
        try:
            number = client.getsockname()[1]
            assert not disconnect(f"{kind}:{shown}:{number}", port + 1), "it is no connection to that port"
            assert disconnect(f"{kind}:{shown}:{number}", port)
            assert client.recv(1) == b"", "it is cut"
            accepted[1].sendall(b"x")
            assert other.recv(1) == b"x", "the other is not"
        finally:
            for connection in accepted:
                connection.close()


@pytest.mark.parametrize("peer", ["unix:/run/socket", "unix:", "ipv4:127.0.0.1:1", ""])
def test_a_peer_that_has_no_connection(peer: str) -> None:
    assert not disconnect(peer, 50051)
