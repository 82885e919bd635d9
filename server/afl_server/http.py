"""HTTP for people and probes: the status page, /healthz, /readyz, /metrics, /status."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from socketserver import ThreadingMixIn
from typing import IO, Any, NamedTuple, cast
from urllib.parse import parse_qs
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from afl._version import __version__
from afl.config.address import Address
from afl.errors import AddressError
from afl_server.coordinator import Coordinator
from afl_server.documents import Body, Document, encoded
from afl_server.history import History
from afl_server.metrics import make_registry
from afl_server.page_data import PageData
from afl_server.page_html import PageHtml
from afl_server.recent_events import RecentEvents
from afl_server.static_files import static_files
from afl_server.status import snapshot
from afl_server.viewers import Viewers

LOG = logging.getLogger("afl.server")

MOST_CONNECTIONS = 128
"""At once: each has a thread. One more is closed unanswered."""

IDLE_TIMEOUT_S = 10.0
"""How long a peer may take to ask, or to take a piece of what it is sent; who is slower is hung up on."""

CLOSING_CHECK_S = 0.1
"""Between two looks at whether to stop serving."""

LONGEST_LINE = 65536
"""Bytes of a request's first line."""

PIECE_BYTES = 16384
"""The timeout is for each piece: a slow link has time for all of them."""

HISTORY_AGE_S = 2.0
"""Curves and the table change less than the state does, and cost more."""

SECURITY_HEADERS = (
    (
        "Content-Security-Policy",
        "; ".join(
            (
                "default-src 'none'",
                *(f"{what}-src 'self'" for what in ("script", "style", "img", "connect")),
                *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
                "require-trusted-types-for 'script'",
            )
        ),
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
)

_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json"

_Environ = dict[str, Any]
_StartResponse = Callable[..., Any]


class _Answer(NamedTuple):
    status: str
    kind: str
    body: Body
    headers: Sequence[tuple[str, str]] = (("Cache-Control", "no-store"),)


class HttpServer:
    """Serves from threads of its own; reads the run's state, never changes it.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(self, coordinator: Coordinator, address: Address, events: RecentEvents) -> None:
        self._coordinator = coordinator
        self._metrics = make_wsgi_app(make_registry(coordinator))
        self._files = static_files()
        history = coordinator.records.history or History(coordinator.config.workers)
        data = PageData(coordinator, history, events)
        html = PageHtml(data)
        self._documents = {
            "/": ("text/html; charset=utf-8", Document(html.made)),
            "/data/state.json": (_JSON, Document(lambda: encoded(data.state()))),
            "/data/events.json": (_JSON, Document(lambda: encoded(data.events()))),
            "/data/workers.json": (_JSON, Document(lambda: encoded(data.workers()), HISTORY_AGE_S)),
            "/data/history.json": (_JSON, Document(lambda: encoded(data.history()), HISTORY_AGE_S)),
        }
        self._pages: dict[str, Callable[[_Environ], _Answer]] = {
            "/healthz": lambda _: _text("200 OK", "ok\n"),
            "/readyz": self._ready,
            "/status": self._status,
            "/data/worker.json": self._worker,
        }
        self._data = data
        self._viewers = Viewers(self._documents["/data/state.json"][1])
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
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSING_CHECK_S,), name="afl-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Send open pages the last state, and stop serving."""
        self._viewers.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            return _send(environ, start_response, _text("405 Method Not Allowed", "only GET\n"))
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, _with_security(start_response))
            return page
        if path == "/data/stream":
            return self._stream(environ, start_response)
        return _send(environ, start_response, self._page(path, environ))

    def _page(self, path: str, environ: _Environ) -> _Answer:
        if path in self._documents:
            kind, document = self._documents[path]
            return _Answer("200 OK", kind, document.current())
        if path in self._pages:
            return self._pages[path](environ)
        file = self._files.get(path[1:])
        if file is None:
            return _text("404 Not Found", "try /, /status, /metrics, /healthz or /readyz\n")
        headers = (("Cache-Control", "no-cache"), ("ETag", file.tag))
        if environ.get("HTTP_IF_NONE_MATCH") == file.tag:
            return _Answer("304 Not Modified", file.kind, Body(b""), headers)
        return _Answer("200 OK", file.kind, file.body, headers)

    def _ready(self, _: _Environ) -> _Answer:
        if self._coordinator.is_over:
            return _text("503 Service Unavailable", "the run is over\n")
        return _text("200 OK", "ready\n")

    def _status(self, _: _Environ) -> _Answer:
        return _Answer("200 OK", _JSON, Body.of(json.dumps(snapshot(self._coordinator)).encode()))

    def _worker(self, environ: _Environ) -> _Answer:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("id", [""])[0]
        try:
            return _Answer("200 OK", _JSON, Body.of(encoded(self._data.worker(int(asked)))))
        except (KeyError, ValueError):
            last = self._coordinator.config.workers - 1
            return _text("404 Not Found", f"id is a worker's, from 0 to {last}\n")

    def _stream(self, environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        stream = self._viewers.enter()
        if stream is None:
            answer = _text("503 Service Unavailable", "enough pages are open; ask /data/state.json\n")
            return _send(environ, start_response, answer)
        headers = [
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Cache-Control", "no-store"),
            # A reverse proxy must pass on each event as it comes.
            ("X-Accel-Buffering", "no"),
        ]
        start_response("200 OK", [*headers, *SECURITY_HEADERS])
        if environ.get("REQUEST_METHOD") == "HEAD":
            stream.close()
            return []
        return stream


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # the base class's
        """A peer that hangs up, or says nothing, is no fault of the server."""
        LOG.debug("the connection of %s broke", client_address, exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    timeout = IDLE_TIMEOUT_S

    def handle(self) -> None:
        """Answer one request."""
        self.raw_requestline = self.rfile.readline(LONGEST_LINE + 1)
        if len(self.raw_requestline) > LONGEST_LINE:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
        elif self.parse_request():
            assert isinstance(self.server, WSGIServer)
            answering: Any = _Answering(
                cast("IO[bytes]", self.rfile),
                cast("IO[bytes]", self.wfile),
                self.get_stderr(),
                self.get_environ(),
                multithread=True,
            )
            answering.request_handler = self
            answering.run(self.server.get_app())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged."""

    def address_string(self) -> str:
        """Without a reverse look-up, which can hang."""
        return str(self.client_address[0])


class _Answering(ServerHandler):
    server_software = f"afl/{__version__}"

    def log_exception(self, exc_info: Any) -> None:
        """Of a fault; a reader that is too slow, or gone, is none."""
        if isinstance(exc_info[1], OSError):
            LOG.debug("an answer was not taken", exc_info=exc_info)
        else:
            LOG.error("an HTTP request cannot be answered", exc_info=exc_info)


def _text(status: str, text: str) -> _Answer:
    return _Answer(status, _PLAIN, Body(text.encode()))


def _with_security(start_response: _StartResponse) -> _StartResponse:
    def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        return start_response(status, [*headers, *SECURITY_HEADERS], *more)

    return start


def _send(environ: _Environ, start_response: _StartResponse, answer: _Answer) -> list[bytes]:
    data, headers = answer.body.plain, [("Content-Type", answer.kind), *answer.headers, *SECURITY_HEADERS]
    if answer.body.compressed is not None:
        headers.append(("Vary", "Accept-Encoding"))
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            data = answer.body.compressed
            headers.append(("Content-Encoding", "gzip"))
    headers.append(("Content-Length", str(len(data))))
    start_response(answer.status, headers)
    if environ.get("REQUEST_METHOD") == "HEAD":
        return []
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
