"""The HTTP that both daemons serve: a page that fails takes nothing with it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import queue
import socket
import time
import tracemalloc
import urllib.error
from collections.abc import Iterator

import pytest

from afl.config.address import Address
from afl.daemon import http as http_pages
from afl.daemon.http import Answer, Environ, HttpPages, text
from support.federation import fetch

LONG = 32 * 1024**2


class Pages(HttpPages):
    """One page is there, one fails."""

    def answer(self, path: str, environ: Environ) -> Answer:
        if path == "/fails":
            raise RuntimeError("a fault of the page")
        if path == "/long":
            return Answer("200 OK", "application/octet-stream", bytes(LONG))
        return text("200 OK", "here\n")


def test_a_page_that_fails_is_logged_and_the_next_is_served(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages(Address("127.0.0.1", 0), "--http")
    try:
        with pytest.raises(urllib.error.HTTPError) as failed:
            fetch(f"http://127.0.0.1:{pages.port}/fails")
        with failed.value as answer:
            assert answer.code == 500
            assert b"a fault of the page" not in answer.read()
        head = http.client.HTTPConnection("127.0.0.1", pages.port, timeout=60)
        head.request("HEAD", "/fails")
        response = head.getresponse()
        assert (response.status, response.read()) == (500, b"")
        assert int(response.headers["Content-Length"]) > 0
        head.close()
        assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"
    finally:
        pages.close()
    record, _ = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert getattr(record, "event", "") == "page_failed"
    assert record.exc_info is not None
    assert "a fault of the page" in str(record.exc_info[1])


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages(Address("127.0.0.1", 0), "--http")
    yield pages
    pages.close()


def half_a_request(pages: Pages) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", pages.port), timeout=60)
    link.sendall(b"GET / HTTP/1.1\r\nHost: x")
    return link


def test_whoever_asks_slowly_makes_room_for_one_who_asks(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pages, "MOST_CONNECTIONS", 4)
    slow = [half_a_request(pages) for _ in range(6)]
    try:
        for _ in range(8):
            assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"
        assert slow[0].recv(1) == b"", "the one that has asked the longest is hung up on"
    finally:
        for link in slow:
            link.close()


def test_a_request_that_never_comes_whole_is_given_up(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "ASKING_TIMEOUT_S", 0.2)
    with half_a_request(pages) as link:
        assert link.recv(1) == b""
    assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"


def test_a_connection_without_a_descriptor_is_waited_for(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays ready; to try again at once would take all of a processor."""
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    accept = http_pages.WSGIServer.get_request

    def short(server: http_pages.WSGIServer) -> tuple[socket.socket, object]:
        if done.qsize() < 4:
            done.put("accept")
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(http_pages.WSGIServer, "get_request", short)
    monkeypatch.setattr(http_pages.time, "sleep", done.put)
    assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"
    assert [done.get() for _ in range(4)] == ["accept", http_pages.ACCEPT_PAUSE_S] * 2


def test_connections_are_a_share_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "most_descriptors", lambda: 32)
    pages = Pages(Address("127.0.0.1", 0), "--http")
    slow = [half_a_request(pages) for _ in range(6)]
    try:
        assert slow[0].recv(1) == b"", "the fifth has taken the first's place"
        assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"
    finally:
        for link in slow:
            link.close()
        pages.close()


def head(*lines: bytes) -> bytes:
    return b"GET / HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (head(*(b"X-%d: " % n + b"a" * 300 for n in range(98))), b"200"),
        (head(*(b"X-%d: " % n + b"a" * 340 for n in range(98))), b"431"),
        (head(b"X: " + b"a" * 33_000), b"431"),
        (b"GET /" + b"a" * 33_000 + b" HTTP/1.1\r\n\r\n", b"414"),
    ],
)
def test_a_request_has_a_size_in_all(pages: Pages, said: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pages.port), timeout=60) as link:
        link.sendall(said)
        assert link.recv(12)[9:] == status


def test_a_flood_of_headers_takes_little_memory(pages: Pages) -> None:
    """Of what each connection sends, no more than the bound is held."""
    tracemalloc.start()
    try:
        with contextlib.ExitStack() as stack:
            for number in range(32):
                link = stack.enter_context(socket.create_connection(("127.0.0.1", pages.port), timeout=60))
                link.sendall(b"GET / HTTP/1.1\r\n")
                # Whoever has said too much is answered, and hung up on.
                with contextlib.suppress(OSError):
                    for line in range(98):
                        link.sendall(b"X-%d-%d: " % (number, line) + b"a" * 65_000 + b"\r\n")
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * 4 * http_pages.MOST_REQUEST_BYTES


def unread(pages: Pages) -> socket.socket:
    """A connection whose answer is longer than what the system holds, and is not taken."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(60)
    link.connect(("127.0.0.1", pages.port))
    link.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
    return link


@pytest.mark.long
def test_an_answer_is_taken_in_time(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly: a peer that takes a little now and then does not hold a thread for ever."""
    monkeypatch.setattr(http_pages, "ANSWERING_TIMEOUT_S", 0.5)
    with unread(pages) as link:
        taken, began = 0, time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while piece := link.recv(2048):
                taken += len(piece)
                if time.monotonic() - began < 10:
                    time.sleep(0.01)
        assert taken < LONG


def test_whoever_takes_no_answer_makes_room(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "MOST_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(unread(pages)) for _ in range(4)]
        for link in slow:
            assert link.recv(4) == b"HTTP"
        for _ in range(3):
            assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"
