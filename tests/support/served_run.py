"""A run of any size, served over HTTP as the server serves its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afl.config.address import Address
from afl.config.schema import Server
from afl_server.pages.access import Access
from afl_server.pages.http import HttpServer
from afl_server.pages.page_data import PageData, Sources
from afl_server.pages.recent_events import RecentEvents
from support.fake_run import FakeRun

LOG = logging.getLogger("afl.server")


class Served:
    """A run and the HTTP server that shows it; ``data`` is what it says, made anew whenever asked."""

    def __init__(self, run: FakeRun, server: HttpServer, sources: Sources) -> None:
        self.run, self.server, self.data = run, server, PageData(sources)

    def ask(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        connection.close()
        return answer

    def body(self, path: str) -> bytes:
        answer: Any = self.ask(path)
        assert answer.status == 200, path
        return bytes(answer.body)

    def json(self, path: str) -> Any:
        return json.loads(self.body(path))

    def stream(self) -> socket.socket:
        """An open stream; nothing of it is read."""
        link = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        link.sendall(b"GET /data/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return link


@contextlib.contextmanager
def serving(folder: Path, access: Server | None = None, **options: Any) -> Iterator[Served]:
    """A run of these options; ``access`` is the section of the configuration that says who may read it."""
    run = FakeRun(folder / "run", **options)
    LOG.setLevel(logging.INFO)
    loop = asyncio.new_event_loop()
    turning = threading.Thread(target=loop.run_forever)
    turning.start()
    with RecentEvents() as events:
        sources = run.sources(events)
        server = HttpServer(Address("127.0.0.1", 0), sources, loop, Access(access or Server()))
        try:
            yield Served(run, server, sources)
        finally:
            server.close()
            run.close()
            loop.call_soon_threadsafe(loop.stop)
            turning.join()
            loop.close()
            LOG.setLevel(logging.NOTSET)
