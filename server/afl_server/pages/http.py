"""HTTP for people and probes: the status page, /healthz, /readyz, /metrics, /status."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from afl.config.address import Address
from afl.daemon import http
from afl.daemon.metrics import scraped
from afl_server.pages.access import Access, PageCertificate
from afl_server.pages.live_updates import Document, Viewers, encoded
from afl_server.pages.metrics import make_registry
from afl_server.pages.page_data import PageData, Sources
from afl_server.pages.status import run_status

# A turn of the event loop takes milliseconds; a probe that is let wait longer has usually given up.
LOOP_ANSWERS_S = 5.0
HISTORY_AGE_S = 2.0  # curves and the table change less than the state does, and cost more
_OK: Final = http.text("200 OK", "ok\n")
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class HttpServer(http.HttpPages):
    """Reads the run's state, never changes it; ``loop`` is the event loop that serves the workers."""

    def __init__(
        self,
        address: Address,
        sources: Sources,
        loop: asyncio.AbstractEventLoop,
        access: Access,
        certificate: PageCertificate | None = None,
    ) -> None:
        self._sources = sources
        self._access = access
        self._files = _static_files()
        self._data = data = PageData(sources)
        state = Document(data.state)
        self.viewers = Viewers(state, Document(data.ending, math.inf))
        registry = make_registry(
            sources.snapshot,
            sources.certificate_expiry,
            lambda: None if certificate is None else certificate.expiry,
            sources.strangers,
        )
        self._pages: dict[str, Callable[[http.Environ], http.Answer | http.Application]] = {
            "/healthz": lambda _: liveness(loop),
            "/readyz": self._readyz,
            "/metrics": lambda environ: scraped(registry, environ),
            "/status": Document(self._status, 0.0).answer,
            "/data/state.json": state.answer,
            "/data/events.json": Document(sources.events.newest_first).answer,
            "/data/workers.json": Document(data.workers, HISTORY_AGE_S).answer,
            "/data/history.json": Document(data.history, HISTORY_AGE_S).answer,
            "/data/worker.json": self._worker,
            "/data/stream": lambda _: self._follow,
        }
        super().__init__(address, "server.http", None if certificate is None else certificate.context)

    def _status(self) -> dict[str, Any]:
        sources = self._sources
        return run_status(sources.snapshot(), sources.dual_window, sources.history, sources.rate)

    def close(self) -> None:
        """Send open pages the last state, curves and table, and stop serving."""
        self.viewers.close()
        super().close()

    def answer(self, path: str, environ: http.Environ) -> http.Answer | http.Application:
        """Any page, or why there is none for who asks."""
        if (refusal := self._access.refusal(path, environ)) is not None:
            return refusal
        if path in self._pages:
            return self._pages[path](environ)
        file = self._files.get(path)
        if file is None:
            return http.text("404 Not Found", "try /, /status, /metrics, /healthz or /readyz\n")
        if ("ETag", environ.get("HTTP_IF_NONE_MATCH")) in file.headers:
            return file._replace(status="304 Not Modified", body=b"")
        return file

    def _readyz(self, _: http.Environ) -> http.Answer:
        """Whether a worker could join."""
        if self._sources.snapshot().is_over:
            return http.OVER
        expiry = self._sources.certificate_expiry()
        if expiry is not None and expiry <= time.time():
            return http.text("503 Service Unavailable", "the server's certificate has expired\n")
        return http.text("200 OK", "ready\n")

    def _worker(self, environ: http.Environ) -> http.Answer:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("id", [""])[0]
        try:
            return http.Answer("200 OK", http.JSON, encoded(self._data.worker(int(asked))))
        except (KeyError, ValueError):
            last = self._sources.history.workers - 1
            return http.text("404 Not Found", f"id is a worker's, from 0 to {last}\n")

    def _follow(self, environ: http.Environ, start_response: http.StartResponse) -> Iterable[bytes]:
        is_head = environ.get("REQUEST_METHOD") == "HEAD"
        stream = () if is_head else self.viewers.stream()
        if stream is None:
            answer = http.text("503 Service Unavailable", "enough pages are open; ask /data/state.json\n")
            return http.send(environ, start_response, answer)
        headers = [
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Cache-Control", "no-store"),
            # A reverse proxy must pass on each event as it comes.
            ("X-Accel-Buffering", "no"),
        ]
        start_response("200 OK", headers)
        return stream


class FinishedPages(http.HttpPages):
    """What there is to say where a run had ended before this process began."""

    def answer(self, path: str, environ: http.Environ) -> http.Answer:  # noqa: ARG002  # the path says all
        """For probes."""
        pages = {"/healthz": _OK, "/readyz": http.OVER}
        return pages.get(path) or http.text("404 Not Found", "try /healthz or /readyz: the run is complete\n")


def liveness(loop: asyncio.AbstractEventLoop) -> http.Answer:
    """Whether the loop that serves the workers still turns: a page's thread would answer without it."""
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if turned.wait(LOOP_ANSWERS_S):
        return _OK
    return http.text("503 Service Unavailable", f"the event loop has not turned for {LOOP_ANSWERS_S:g} s\n")


def _static_files() -> dict[str, http.Answer]:
    """The status page's own files by their path, read once; a tag changes with the file's content."""
    assets = files("afl_server.pages") / "assets"
    found = {}
    for folder, prefix in ((assets, "/page/"), (assets / "uplot", "/page/uplot/")):
        for entry in folder.iterdir():
            kind = _KINDS.get(Path(entry.name).suffix)
            if kind is not None:
                content = entry.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                headers = (("Cache-Control", "no-cache"), ("ETag", tag))
                found[prefix + entry.name] = http.Answer("200 OK", kind, content, headers)
    found["/"] = found.pop("/page/index.html")
    return found
