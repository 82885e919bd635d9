"""Whoever reaches a server's port without a credential, and holds on to what can be had there."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import hpack

from support.identities import Pair

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_HEADERS, _DATA, _END_STREAM, _END_HEADERS = 0x1, 0x0, 0x1, 0x4
BEGINNING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def call(path: str | bytes, stream: int = 1, *, message: bytes = b"", has_body: bool = True) -> bytes:
    """The frames of one call of gRPC with one message; without its body it is never complete."""
    fields = [
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    # Nothing of it goes into the table that both sides keep, so that each call can be sent on its own.
    block = b"".join(
        hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(name, value)]) for name, value in fields
    )
    head = frame(_HEADERS, _END_HEADERS, stream, block)
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return head + frame(_DATA, _END_STREAM, stream, body) if has_body else head


class _Link(ssl.SSLSocket):
    def __del__(self) -> None:
        # Python leaves one open that the server resets before the handshake.
        self.close()


def connection(port: int, ca: Path | None, said: bytes, pair: Pair | None = None) -> socket.socket:
    """A connection over which HTTP/2 was begun and this said; over TLS if there is an authority, and then
    with a certificate if there is one."""
    link = socket.create_connection(("127.0.0.1", port), timeout=30)
    try:
        if ca is not None:
            context = ssl.create_default_context(cafile=str(ca))
            context.sslsocket_class = _Link
            context.set_alpn_protocols(["h2"])
            if pair is not None:
                context.load_cert_chain(pair.certificate, pair.key)
            link = context.wrap_socket(link, server_hostname="localhost")
        link.sendall(BEGINNING + said)
    except BaseException:
        link.close()
        raise
    return link


class Crowd:
    """So many connections at once, each of which is made again as soon as it is cut.

    Args:
        said: over each of them; see :func:`call`.
    """

    def __init__(
        self, port: int, size: int, said: bytes, ca: Path | None = None, pair: Pair | None = None
    ) -> None:
        self._port, self._size, self._said, self._ca, self._pair = port, size, said, ca, pair
        self.cut = 0
        self._ends = threading.Event()
        self._is_large = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="crowd", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_large.wait(120)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(60)

    def _hold(self) -> None:
        """Keep as many as can be had; at the first round's end everyone has tried once."""
        with selectors.DefaultSelector() as held, contextlib.ExitStack() as stack:
            stack.callback(lambda: [key.fileobj.close() for key in held.get_map().values()])  # type: ignore[union-attr]
            while not self._ends.is_set():
                for _ in range(self._size - len(held.get_map())):
                    if self._ends.is_set():
                        return
                    with contextlib.suppress(OSError):
                        link = connection(self._port, self._ca, self._said, self._pair)
                        link.setblocking(False)
                        held.register(link, selectors.EVENT_READ)
                self._is_large.set()
                for key, _ in held.select(0.05):
                    self._take(held, key.fileobj)

    def _take(self, held: selectors.BaseSelector, link: object) -> None:
        assert isinstance(link, socket.socket)
        try:
            while link.recv(65536):
                pass
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            pass
        held.unregister(link)
        link.close()
        self.cut += 1
