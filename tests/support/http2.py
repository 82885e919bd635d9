"""An observer of HTTP/2 that shares no code with gRPC: it reads frames off the wire and counts.

RFC 9113, section 4.1: a frame is a 24-bit length, an 8-bit type, 8 bits of flags, and a 31-bit stream
number after a reserved bit, then the payload. Section 6.1: the payload of a DATA frame with the PADDED flag
begins with the padding's length and ends with the padding.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Self

import hpack

from support.proxy import Link, Proxy, Way

SESSION = "/afl.v1.Federation/Session"

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES = 9
_PREFIX_BYTES = 5
"""Of a message of gRPC: whether it is compressed, and its length."""

_DATA, _HEADERS, _CONTINUATION = 0x0, 0x1, 0x9
_PADDED, _END_HEADERS, _PRIORITY = 0x8, 0x4, 0x20


@dataclass
class _Connection:
    paths: dict[int, str] = field(default_factory=dict)
    buffers: dict[Way, bytearray] = field(default_factory=lambda: {way: bytearray() for way in Way})
    preface_left: int = len(_PREFACE)
    unread: dict[tuple[int, Way], bytearray] = field(default_factory=dict)
    block: bytearray = field(default_factory=bytearray)
    block_stream: int = 0
    decoder: hpack.Decoder = field(default_factory=hpack.Decoder)


class Http2Observer(Proxy):
    """Counts the payload of the DATA frames of one gRPC method's streams, without their padding.

    Args:
        keeps: whether the messages are kept.

    Attributes:
        messages: by direction, those that have passed.
    """

    def __init__(self, target: int | None = None, method: str = SESSION, *, keeps: bool = False) -> None:
        self.method = method
        self.messages: dict[Way, list[bytes]] = {way: [] for way in Way}
        self._keeps = keeps
        self.streams = 0
        self._bytes = dict.fromkeys(Way, 0)
        self._connections: dict[Link, _Connection] = {}
        self._lock = threading.Lock()
        super().__init__(target)

    def __enter__(self) -> Self:
        return self

    @property
    def uplink(self) -> int:
        """Bytes to the server so far."""
        with self._lock:
            return self._bytes[Way.UP]

    @property
    def downlink(self) -> int:
        """Bytes from the server so far."""
        with self._lock:
            return self._bytes[Way.DOWN]

    def passing(self, link: Link, way: Way, data: bytes) -> None:
        """Read the frames in what passes."""
        connection = self._connections.setdefault(link, _Connection())
        buffer = connection.buffers[way]
        buffer += data
        if way is Way.UP and connection.preface_left:
            if len(buffer) < len(_PREFACE):
                return
            assert buffer.startswith(_PREFACE)
            del buffer[: len(_PREFACE)]
            connection.preface_left = 0
        while len(buffer) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(buffer[:3], "big")
            if len(buffer) < end:
                return
            kind, flags = buffer[3], buffer[4]
            stream = int.from_bytes(buffer[5:9], "big") & 0x7FFFFFFF
            payload = bytes(buffer[_HEADER_BYTES:end])
            del buffer[:end]
            self._frame(connection, way, kind, flags, stream, payload)

    def _frame(
        self, connection: _Connection, way: Way, kind: int, flags: int, stream: int, payload: bytes
    ) -> None:
        if kind == _DATA:
            content = payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
            if connection.paths.get(stream) == self.method:
                with self._lock:
                    self._bytes[way] += len(content)
                    if self._keeps:
                        self._keep(connection.unread.setdefault((stream, way), bytearray()), way, content)
        elif way is Way.UP and kind in {_HEADERS, _CONTINUATION}:
            if kind == _HEADERS:
                padding = payload[0] if flags & _PADDED else 0
                start = (1 if flags & _PADDED else 0) + (5 if flags & _PRIORITY else 0)
                payload = payload[start : len(payload) - padding]
                connection.block.clear()
                connection.block_stream = stream
            connection.block += payload
            if flags & _END_HEADERS:
                self._headers(connection)

    def _keep(self, unread: bytearray, way: Way, content: bytes) -> None:
        unread += content
        while len(unread) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(unread[1:_PREFIX_BYTES], "big")
            if len(unread) < end:
                return
            assert not unread[0], "a compressed message"
            self.messages[way].append(bytes(unread[_PREFIX_BYTES:end]))
            del unread[:end]

    def _headers(self, connection: _Connection) -> None:
        decoded = connection.decoder.decode(bytes(connection.block), raw=True)
        fields = {bytes(name): bytes(value) for name, value in decoded}
        path = fields.get(b":path", b"").decode()
        if path:
            connection.paths[connection.block_stream] = path
            self.streams += path == self.method
