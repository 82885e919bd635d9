"""HTTP for people and probes: /healthz, /readyz, /metrics, /status."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from afl.config.address import Address
from afl.errors import AddressError
from afl_server.coordinator import Coordinator
from afl_server.metrics import make_registry
from afl_server.status import snapshot

StartResponse = Callable[..., Any]

_PLAIN = "text/plain; charset=utf-8"


class HttpServer:
    """Serves from threads of its own; reads the run's state, never changes it.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(self, coordinator: Coordinator, address: Address) -> None:
        self._coordinator = coordinator
        self._metrics = make_wsgi_app(make_registry(coordinator))
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        server_class: type[WSGIServer] = type("_FamilyServer", (_Server,), {"address_family": family})
        try:
            self._server = make_server(
                address.host,
                address.port,
                self._answer,
                server_class=server_class,
                handler_class=_QuietHandler,
            )
        except OSError as error:
            raise AddressError(
                f"server.http: cannot listen on {address}: {error.strerror}; "
                "name another port, or null to go without"
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="afl-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            return _answer(start_response, "405 Method Not Allowed", "only GET\n", _PLAIN)
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start_response)
            return page
        status, body, kind = self._page(path)
        return _answer(start_response, status, body, kind)

    def _page(self, path: str) -> tuple[str, str, str]:
        """Status line, body and type of a page."""
        if path == "/healthz":
            return "200 OK", "ok\n", _PLAIN
        if path == "/readyz":
            if self._coordinator.is_over:
                return "503 Service Unavailable", "the run is over\n", _PLAIN
            return "200 OK", "ready\n", _PLAIN
        if path == "/status":
            return "200 OK", json.dumps(snapshot(self._coordinator)), "application/json"
        return "404 Not Found", "try /status, /metrics, /healthz or /readyz\n", _PLAIN


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged."""

    def address_string(self) -> str:
        """Without a reverse look-up, which can hang."""
        return str(self.client_address[0])


def _answer(start_response: StartResponse, status: str, body: str, kind: str) -> list[bytes]:
    data = body.encode()
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(data)))])
    return [data]
