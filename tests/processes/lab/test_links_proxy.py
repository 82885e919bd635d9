"""The proxy that makes links, with real sockets. How long things take is tested in test_links_pipe.py."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from afl_benchmarks.links.pipe import Carried, Link
from afl_benchmarks.links.proxy import ProxyLinks

FAST = Link(rate=50e6, delay=0.001)
TIMEOUT_S = 30.0


class Server:
    """Answers with what it was sent, reversed, once the peer has said that this is all."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.ends: list[str] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(TIMEOUT_S)

    def wait_for_end(self) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends, TIMEOUT_S)
            return self.ends[0]

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    end = self._answer(connection)
                with self._changed:
                    self.ends.append(end)
                    self._changed.notify_all()

    def _answer(self, connection: socket.socket) -> str:
        try:
            connection.sendall(read_all(connection)[::-1])
        except ConnectionResetError:
            return "reset"
        return "closed"


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def connect(links: ProxyLinks, number: int) -> socket.socket:
    host, _, port = links.address(number).rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def test_all_passes_both_ways_in_order_with_the_end_of_each_and_is_counted(server: Server) -> None:
    content = bytes(range(256)) * 2000
    with ProxyLinks(2, FAST) as links:
        links.aim(server.port)
        with connect(links, 1) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == content[::-1]
        assert links.carried(1) == Carried(len(content), len(content))
        assert links.carried(0) == Carried()
        assert links.carried() == links.carried(1)


def test_links_do_not_share(server: Server) -> None:
    """A message passes a link beside one that is so slow that it would take hours there."""
    with ProxyLinks(1, Link(rate=10.0, delay=0.0)) as slow, ProxyLinks(1, FAST) as fast:
        slow.aim(server.port)
        fast.aim(server.port)
        with connect(slow, 0) as waiting:
            waiting.sendall(bytes(1 << 20))
            waiting.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                waiting.recv(1)
        assert slow.carried().up < 1 << 10


def test_a_reset_is_passed_on(server: Server) -> None:
    with ProxyLinks(1, FAST) as links:
        links.aim(server.port)
        connection = connect(links, 0)
        connection.sendall(b"something")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
        assert server.wait_for_end() == "reset"


def test_a_server_that_is_not_there_is_a_connection_that_ends(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ProxyLinks(1, FAST) as links:
        links.aim(port)
        # The reset may come while it still connects.
        with contextlib.suppress(ConnectionResetError), connect(links, 0) as connection:
            assert connection.recv(1) == b""


def test_a_shape_keeps_to_its_rate(server: Server) -> None:
    """Only a bound from below: a busy machine may be slower, nothing may be faster."""
    link = Link(rate=2e6, delay=0.05)
    content = bytes(400_000)
    with ProxyLinks(1, link) as links:
        links.aim(server.port)
        with connect(links, 0) as connection:
            since = time.monotonic()
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == content
            took = time.monotonic() - since
    assert took >= 2 * (len(content) / 2e6 + 0.05)
