"""HTTP for people and probes: /healthz, /readyz, /metrics, /status."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Final

from prometheus_client import make_wsgi_app

from afl.config.address import Address
from afl.http_pages import OVER, PLAIN, HttpPages, Page
from afl_server.coordinator import Coordinator
from afl_server.metrics import make_registry
from afl_server.status import snapshot

OPTION: Final = "server.http"

LOOP_ANSWERS_S = 5.0
"""A turn of the event loop takes milliseconds; a probe that is let wait longer has usually given up."""


class HttpServer(HttpPages):
    """Reads the run's state, never changes it. Made where the event loop runs that serves the workers.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(self, coordinator: Coordinator, address: Address) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        metrics = make_wsgi_app(make_registry(coordinator))
        super().__init__(address, OPTION, self._show, {"/metrics": metrics})

    def _show(self, path: str) -> Page | None:
        if path == "/healthz":
            return self._healthz()
        if path == "/readyz":
            return self._readyz()
        if path == "/status":
            return "200 OK", json.dumps(snapshot(self._coordinator)), "application/json"
        return "404 Not Found", "try /status, /metrics, /healthz or /readyz\n", PLAIN

    def _healthz(self) -> Page:
        """Whether the loop that serves the workers still turns: this thread would answer without it."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if turned.wait(LOOP_ANSWERS_S):
            return "200 OK", "ok\n", PLAIN
        return "503 Service Unavailable", f"the event loop has not turned for {LOOP_ANSWERS_S:g} s\n", PLAIN

    def _readyz(self) -> Page:
        """Whether a worker could join."""
        if self._coordinator.is_over:
            return OVER
        expiry = self._coordinator.gate.expiry
        if expiry is not None and expiry <= time.time():
            return "503 Service Unavailable", "the server's certificate has expired\n", PLAIN
        return "200 OK", "ready\n", PLAIN


def finished_pages(address: Address) -> HttpPages:
    """What there is to say where a run had ended before this process began.

    Raises:
        AddressError: if the address cannot be listened on.
    """
    pages: dict[str, Page] = {"/healthz": ("200 OK", "ok\n", PLAIN), "/readyz": OVER}
    return HttpPages(address, OPTION, pages.get)
