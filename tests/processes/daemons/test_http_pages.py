"""The HTTP that both daemons serve: a page that fails takes nothing with it."""

from __future__ import annotations

import errno
import http.client
import logging
import queue
import socket
import urllib.error
from collections.abc import Iterator

import pytest

from afl.config.address import Address
from afl.daemon import http as http_pages
from afl.daemon.http import Answer, Environ, HttpPages, text
from support.federation import fetch


class Pages(HttpPages):
    """One page is there, one fails."""

    def answer(self, path: str, environ: Environ) -> Answer:
        if path == "/fails":
            raise RuntimeError("a fault of the page")
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
