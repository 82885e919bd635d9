"""Bytes that are nearly right: of messages, of HTTP/2 and of HTTP, changed at random."""

from __future__ import annotations

import random
from pathlib import Path

from afl._version import __version__
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import PROTOCOL
from support.http2 import SESSION
from support.strangers import BEGINNING, CHECK, WATCH, call, frame


def mutated(chance: random.Random, seed: bytes) -> bytes:
    """A message with bits, bytes or stretches changed, cut out, repeated or put in."""
    data = bytearray(seed)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                data[place : place + chance.randrange(1, 9)] = chance.randbytes(chance.randrange(9))
            case 2:
                del data[place : place + chance.randrange(1, 40)]
            case 3:
                data[place:place] = data[place : place + 30]
            case _:
                data[place : place + 9] = b"\xff" * chance.randrange(1, 11)
    return bytes(data)


def http2_conversations() -> list[bytes]:
    """What peers say over a connection of gRPC, each to the end."""
    join = pb.Join(protocol=PROTOCOL, package_version=__version__, incarnation=bytes(16), workers=[0])
    joining = pb.WorkerFrame(join=join).SerializeToString()
    kinds = [
        frame(0x4, 0, 0, b"\0\x04\0\x01\0\0\0\x05\0\0\x40\0"),  # SETTINGS: window and largest frame
        frame(0x4, 1, 0, b""),
        frame(0x6, 0, 0, bytes(8)),  # PING
        frame(0x8, 0, 0, b"\0\x10\0\0"),  # WINDOW_UPDATE
        frame(0x3, 0, 1, b"\0\0\0\x08"),  # RST_STREAM
        frame(0x7, 0, 0, bytes(8)),  # GOAWAY
        frame(0x2, 0, 1, bytes(5)),  # PRIORITY
        frame(0x9, 4, 1, b"\x82"),  # CONTINUATION
        frame(0x5, 4, 1, bytes(4)),  # PUSH_PROMISE
    ]
    said = [
        call(WATCH),
        call(CHECK),
        call(CHECK, has_body=False),
        call(SESSION, message=joining),
        call("/afl.v1.Federation/Nothing", message=joining),
        b"".join(call(WATCH, 2 * n + 1) for n in range(10)),
        call(SESSION, message=joining) + frame(0x0, 0, 1, b"\0\xff\xff\xff\xff" + joining),
        *(call(SESSION, message=joining) + kind for kind in kinds),
        *kinds,
    ]
    return [BEGINNING + one for one in said]


def http_requests() -> list[bytes]:
    """What is asked of the pages, rightly and wrongly."""
    paths = [
        "/", "/metrics", "/status", "/healthz", "/readyz", "/data/state.json", "/data/events.json",
        "/data/workers.json", "/data/history.json", "/data/worker.json?id=1", "/data/worker.json?id=%00",
        "/page/page.js", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//evil.example/",
        "/" + "a" * 9000, "http://evil.example/status", "*", "",
    ]  # fmt: skip
    headers = [
        b"Host: localhost",
        b"Host: evil.example",
        b"Host: [::1]:80\r\nAccept-Encoding: gzip, br;q=1.0, \xff",
        b"Accept: application/openmetrics-text; version=1.0.0; q=nan, */*;q=1e400",
        b"If-None-Match: *\r\nRange: bytes=0-18446744073709551615",
        b"Content-Length: -1\r\nTransfer-Encoding: chunked, chunked",
        b"Content-Length: 99999999999999999999\r\nExpect: 100-continue",
        b"Authorization: Basic \xf0\x9f=\r\nAuthorization: Bearer",
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings",
        b"X: " + b"a" * 30_000,
        b"X: " + b"a" * 70_000,
        b"\r\n".join(b"X-%d: %d" % (n, n) for n in range(500)),
        b"X\0: \0\r\n continued: \x1b[2J",
    ]
    lines = [b"GET %s HTTP/1.1" % path.encode() for path in paths]
    lines += [
        b"%s / HTTP/1.1" % method for method in (b"HEAD", b"POST", b"PUT", b"TRACE", b"CONNECT", b"\xff")
    ]
    lines += [b"GET /", b"GET / HTTP/0.9", b"GET / HTTP/2.0", b"GET / HTTP/9999999999.1", b"", b"\0" * 40]
    whole = [b"%s\r\n%s\r\n\r\n" % (line, headers[n % len(headers)]) for n, line in enumerate(lines)]
    return [*whole, *(b"GET /status HTTP/1.1\r\n%s\r\n\r\n0\r\n\r\n" % one for one in headers)]


def rss_kb(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")
