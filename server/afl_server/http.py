"""HTTP for people and probes: the status page, /healthz, /readyz, /metrics, /status."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import parse_qs

from prometheus_client import make_wsgi_app

from afl.config.address import Address
from afl.daemon.http import (
    JSON,
    OVER,
    Answer,
    Application,
    Body,
    Environ,
    HttpPages,
    StartResponse,
    send,
    text,
)
from afl_server.coordinator import Coordinator
from afl_server.documents import Document, encoded
from afl_server.history import History
from afl_server.metrics import make_registry
from afl_server.page_data import PageData
from afl_server.page_html import PageHtml
from afl_server.recent_events import RecentEvents
from afl_server.static_files import static_files
from afl_server.status import snapshot
from afl_server.viewers import Viewers

OPTION: Final = "server.http"

LOOP_ANSWERS_S = 5.0
"""A turn of the event loop takes milliseconds; a probe that is let wait longer has usually given up."""

HISTORY_AGE_S = 2.0
"""Curves and the table change less than the state does, and cost more."""

_OK: Final = text("200 OK", "ok\n")


class HttpServer(HttpPages):
    """Reads the run's state, never changes it.

    Args:
        loop: the event loop that serves the workers.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        address: Address,
        events: RecentEvents,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._coordinator = coordinator
        self._files = static_files()
        history = coordinator.records.history or History(coordinator.config.workers)
        self._data = data = PageData(coordinator, history, events)
        self._documents = {
            "/": ("text/html; charset=utf-8", Document(PageHtml(data).made)),
            "/data/state.json": (JSON, Document(lambda: encoded(data.state()))),
            "/data/events.json": (JSON, Document(lambda: encoded(data.events()))),
            "/data/workers.json": (JSON, Document(lambda: encoded(data.workers()), HISTORY_AGE_S)),
            "/data/history.json": (JSON, Document(lambda: encoded(data.history()), HISTORY_AGE_S)),
        }
        self._viewers = Viewers(
            self._documents["/data/state.json"][1], Document(lambda: encoded(data.ending()), math.inf)
        )
        self._pages: dict[str, Callable[[Environ], Answer]] = {
            "/healthz": lambda _: liveness(loop),
            "/readyz": self._readyz,
            "/status": self._status,
            "/data/worker.json": self._worker,
        }
        self._streams: dict[str, Application] = {
            "/metrics": make_wsgi_app(make_registry(coordinator)),
            "/data/stream": self._follow,
        }
        super().__init__(address, OPTION)

    def close(self) -> None:
        """Send open pages the last state, curves and table, and stop serving."""
        self._viewers.close()
        super().close()

    def stream(self, path: str) -> Application | None:
        """Metrics, and the state as it changes."""
        return self._streams.get(path)

    def answer(self, path: str, environ: Environ) -> Answer:
        """Any other page."""
        if path in self._documents:
            kind, document = self._documents[path]
            return Answer("200 OK", kind, document.current())
        if path in self._pages:
            return self._pages[path](environ)
        file = self._files.get(path[1:])
        if file is None:
            return text("404 Not Found", "try /, /status, /metrics, /healthz or /readyz\n")
        headers = (("Cache-Control", "no-cache"), ("ETag", file.tag))
        if environ.get("HTTP_IF_NONE_MATCH") == file.tag:
            return Answer("304 Not Modified", file.kind, Body(b""), headers)
        return Answer("200 OK", file.kind, file.body, headers)

    def _readyz(self, _: Environ) -> Answer:
        """Whether a worker could join."""
        if self._coordinator.is_over:
            return OVER
        expiry = self._coordinator.gate.expiry
        if expiry is not None and expiry <= time.time():
            return text("503 Service Unavailable", "the server's certificate has expired\n")
        return text("200 OK", "ready\n")

    def _status(self, _: Environ) -> Answer:
        return Answer("200 OK", JSON, Body.of(encoded(snapshot(self._coordinator))))

    def _worker(self, environ: Environ) -> Answer:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("id", [""])[0]
        try:
            return Answer("200 OK", JSON, Body.of(encoded(self._data.worker(int(asked)))))
        except (KeyError, ValueError):
            last = self._coordinator.config.workers - 1
            return text("404 Not Found", f"id is a worker's, from 0 to {last}\n")

    def _follow(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        stream = self._viewers.enter()
        if stream is None:
            answer = text("503 Service Unavailable", "enough pages are open; ask /data/state.json\n")
            return send(environ, start_response, answer)
        headers = [
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Cache-Control", "no-store"),
            # A reverse proxy must pass on each event as it comes.
            ("X-Accel-Buffering", "no"),
        ]
        start_response("200 OK", headers)
        if environ.get("REQUEST_METHOD") == "HEAD":
            stream.close()
            return []
        return stream


class FinishedPages(HttpPages):
    """What there is to say where a run had ended before this process began.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address, OPTION)

    def answer(self, path: str, environ: Environ) -> Answer:  # noqa: ARG002  # the path says all
        """For probes."""
        pages = {"/healthz": _OK, "/readyz": OVER}
        return pages.get(path) or text("404 Not Found", "try /healthz or /readyz: the run is complete\n")


def liveness(loop: asyncio.AbstractEventLoop) -> Answer:
    """Whether the loop that serves the workers still turns: a page's thread would answer without it."""
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if turned.wait(LOOP_ANSWERS_S):
        return _OK
    return text("503 Service Unavailable", f"the event loop has not turned for {LOOP_ANSWERS_S:g} s\n")
