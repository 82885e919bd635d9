"""Pages over HTTP for people and probes, from threads of their own; what they show is a daemon's to say."""

from __future__ import annotations

import abc
import contextlib
import gzip
import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from socketserver import ThreadingMixIn
from typing import IO, Any, Final, NamedTuple, cast
from wsgiref.headers import Headers
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from afl._version import __version__
from afl.config.address import Address, why_not_listened
from afl.daemon import events
from afl.daemon.descriptors import is_short, most_descriptors, most_pages
from afl.errors import AddressError

LOG = logging.getLogger("afl.http")
PLAIN: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
# At once: each has a thread. For one more, whoever has been asking the longest is hung up on; if all have
# asked, it is closed unanswered. Fewer where the process may have few descriptors.
MOST_CONNECTIONS = 128
# Before the next try to accept a connection for which there was no descriptor; it stays ready meanwhile.
ACCEPT_PAUSE_S = 0.5
ASKING_TIMEOUT_S = 10.0  # how long a peer may take to ask, in all; who is slower is hung up on
IDLE_TIMEOUT_S = 10.0  # how long a peer may be silent, or take over a piece of what it is sent
CLOSING_CHECK_S = 0.1  # between two looks at whether to stop serving
ANSWERING_TIMEOUT_S = 60.0  # how long one may take over an answer in all, unless it is a stream
MOST_REQUEST_BYTES = 32768  # of a request's first line and all its headers together
PIECE_BYTES = 16384  # the timeout is for each piece: a slow link has time for all of them
COMPRESS_FROM = 1024  # bytes; shorter bodies gain nothing
_STREAMS: Final = "afl.streams"  # to call for an answer without an end of its own
_LEVEL = 5  # of gzip: a tenth of the time of the highest level, for a few per cent of the size
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class Answer(NamedTuple):
    """An HTTP answer: status line, content type, body and further headers."""

    status: str
    kind: str
    body: bytes
    headers: Sequence[tuple[str, str]] = (("Cache-Control", "no-store"),)


def text(status: str, content: str) -> Answer:
    """An answer in plain text."""
    return Answer(status, PLAIN, content.encode())


# What `/readyz` says once nothing is left to do.
OVER: Final = text("503 Service Unavailable", "the run is over\n")


class HttpPages(abc.ABC):
    """Serves until :meth:`close`; :class:`AddressError` if it cannot listen on ``option``'s address.

    Args:
        context: what the next connection speaks TLS with; ``None`` for plaintext.
    """

    def __init__(
        self, address: Address, option: str, context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        host = address.host
        if host == "::" and not socket.has_dualstack_ipv6():
            # A machine without IPv6 listens on every address that it has.
            host = "0.0.0.0"  # noqa: S104
        try:
            self._server = _Server((host, address.port), _Handler, context)
        except OSError as error:
            raise AddressError(f"{option}: cannot listen on {address}: {why_not_listened(error)}") from error
        self._server.set_app(self._respond)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSING_CHECK_S,), name="afl-http", daemon=True
        )
        self._thread.start()

    @abc.abstractmethod
    def answer(self, path: str, environ: Environ) -> Answer | Application:
        """The page at a path, or what answers by itself. Called from threads: it must not change anything."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _respond(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            refusal = text("405 Method Not Allowed", "only GET and HEAD\n")
            return send(environ, start_response, refusal._replace(headers=[("Allow", "GET, HEAD")]))
        answer = self.answer(environ.get("PATH_INFO", "/"), environ)
        if isinstance(answer, Answer):
            return send(environ, start_response, answer)
        environ[_STREAMS]()
        return answer(environ, start_response)


def send(environ: Environ, start_response: StartResponse, answer: Answer) -> list[bytes]:
    """Begin a response; returns its body in pieces, compressed where it is worth it."""
    data, headers = answer.body, [("Content-Type", answer.kind), *answer.headers]
    if len(data) >= COMPRESS_FROM:
        headers.append(("Vary", "Accept-Encoding"))
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            data = gzip.compress(data, _LEVEL)
            headers.append(("Content-Encoding", "gzip"))
    headers.append(("Content-Length", str(len(data))))
    start_response(answer.status, headers)
    if environ.get("REQUEST_METHOD") == "HEAD":
        return []
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[WSGIRequestHandler],
        context: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)
        self._context = context
        self._guard = threading.Lock()
        self._open = 0
        self._asking: dict[socket.socket, float] = {}
        """Since when, the longest first: connections whose request has not come whole."""
        self._answering: dict[socket.socket, float] = {}
        """Likewise: those that an answer is being sent to, unless it is a stream."""
        self._affordable = most_pages(most_descriptors())

    def get_request(self) -> Any:
        try:
            request, address = super().get_request()
        except OSError as error:
            if is_short(error):
                time.sleep(ACCEPT_PAUSE_S)
            raise
        if self._context is not None:
            # The handshake comes with the first byte that its thread reads: nobody else waits for it.
            request = self._context().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; over TLS the peer is told that this was all. Its answer is not waited for."""
        if isinstance(request, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                request.settimeout(0)
                request.unwrap()
        super().shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            if self._open >= min(MOST_CONNECTIONS, self._affordable):
                waiting = self._asking or self._answering
                if not waiting:
                    self.shutdown_request(request)
                    return
                self._hang_up(waiting)
            self._open += 1
            self._asking[request] = time.monotonic()
        request.settimeout(IDLE_TIMEOUT_S)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._guard:
                self._asking.pop(request, None)
                self._answering.pop(request, None)
                self._open -= 1

    def has_asked(self, request: Any) -> None:
        """Note that a request has arrived completely."""
        with self._guard:
            if self._asking.pop(request, None) is not None:
                self._answering[request] = time.monotonic()

    def streams(self, request: Any) -> None:
        """Note that what a request is answered with has no end of its own."""
        with self._guard:
            self._answering.pop(request, None)

    def service_actions(self) -> None:
        """Hang up on those who have taken too long to ask, or over their answer; called between two looks."""
        now = time.monotonic()
        with self._guard:
            for waiting, patience in (
                (self._asking, ASKING_TIMEOUT_S),
                (self._answering, ANSWERING_TIMEOUT_S),
            ):
                while waiting and next(iter(waiting.values())) < now - patience:
                    self._hang_up(waiting)

    def _hang_up(self, waiting: dict[socket.socket, float]) -> None:
        """On the one that has taken the longest."""
        request = next(iter(waiting))
        del waiting[request]
        # Its thread finds the end of what it reads.
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # the base class's
        """A peer that hangs up, or says nothing, is no fault of the server."""
        LOG.debug("the connection of %s broke", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    def handle(self) -> None:
        """Answer one request."""
        self.requestline = self.request_version = self.command = ""
        self.raw_requestline = self.rfile.readline(MOST_REQUEST_BYTES + 1)
        if len(self.raw_requestline) > MOST_REQUEST_BYTES:
            self.send_error(414)
            return
        headers = self._headers(MOST_REQUEST_BYTES - len(self.raw_requestline))
        if headers is None:
            self.send_error(431)
            return
        # What would come after them is not read: no request here has a body.
        self.rfile.close()
        self.rfile = io.BytesIO(headers)
        if self.parse_request():
            assert isinstance(self.server, _Server)
            self.server.has_asked(self.connection)
            environ = {**self.get_environ(), _STREAMS: partial(self.server.streams, self.connection)}
            answering: Any = _Answering(
                cast("IO[bytes]", self.rfile),
                cast("IO[bytes]", self.wfile),
                self.get_stderr(),
                environ,
                multithread=True,
            )
            answering.request_handler = self
            answering.run(self.server.get_app())

    def _headers(self, most: int) -> bytes | None:
        """All header lines; ``None`` if they have more bytes than this."""
        lines = bytearray()
        while len(lines) <= most:
            line = self.rfile.readline(most + 1)
            lines += line
            if line in {b"", b"\n", b"\r\n"}:
                return bytes(lines)
        return None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged."""


class _Answering(ServerHandler):
    server_software = f"afl/{__version__}"
    headers: Headers

    def error_output(self, environ: Environ, start_response: StartResponse) -> list[bytes]:
        """That there was a fault; HEAD has no body here either."""
        pieces = super().error_output(environ, start_response)
        if environ.get("REQUEST_METHOD") != "HEAD":
            return pieces
        self.headers["Content-Length"] = str(sum(map(len, pieces)))
        return []

    def cleanup_headers(self) -> None:
        """Every answer is locked down, also one that says that there was a fault."""
        super().cleanup_headers()
        for name, value in SECURITY_HEADERS.items():
            self.headers[name] = value

    def log_exception(self, exc_info: Any) -> None:
        """Of a fault; a reader that is too slow, or gone, is none."""
        if isinstance(exc_info[1], OSError):
            LOG.debug("an answer was not read", exc_info=exc_info)
        else:
            LOG.error(
                "an HTTP request cannot be answered", exc_info=exc_info, extra=events.PageFailed().extra
            )
