"""Pages over HTTP for people and probes, from threads of their own; what they show is a daemon's to say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from afl.config.address import Address
from afl.errors import AddressError

PLAIN: Final = "text/plain; charset=utf-8"

StartResponse = Callable[..., Any]
Application = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
Page = tuple[str, str, str]
"""Status line, body and type."""

OVER: Final[Page] = ("503 Service Unavailable", "the run is over\n", PLAIN)
"""What ``/readyz`` says once nothing is left to do."""


class HttpPages:
    """Serves until :meth:`close`.

    Args:
        address: where to listen.
        option: what messages call the address.
        page: the page at a path; ``None`` for a path that there is not. Called from threads, so it must not
            change anything.
        applications: WSGI applications by path.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        option: str,
        page: Callable[[str], Page | None],
        applications: Mapping[str, Application] | None = None,
    ) -> None:
        self._page = page
        self._applications = dict(applications or {})
        host = address.host
        if host == "::" and not socket.has_dualstack_ipv6():
            # A machine without IPv6 listens on every address that it has.
            host = "0.0.0.0"  # noqa: S104
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class: type[WSGIServer] = type("_FamilyServer", (_Server,), {"address_family": family})
        try:
            self._server = make_server(
                host,
                address.port,
                self._answer,
                server_class=server_class,
                handler_class=_QuietHandler,
            )
        except OSError as error:
            raise AddressError(
                f"{option}: cannot listen on {address}: {error.strerror}; name another port, or go without"
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
            return _answer(start_response, "405 Method Not Allowed", "only GET\n", PLAIN)
        if path in self._applications:
            return self._applications[path](environ, start_response)
        status, body, kind = self._page(path) or ("404 Not Found", "no such page\n", PLAIN)
        return _answer(start_response, status, body, kind)


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
