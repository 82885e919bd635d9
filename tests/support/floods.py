"""Hostile peers that do all they can for so long, each kind in a process of its own."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.experimental.session_cache as tickets

from afl._version import __version__
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import PROTOCOL
from support.commands import PREPARED
from support.identities import Pair
from support.raw_client import RawClient
from support.strangers import CHECK, WATCH, Crowd, call, connection

CROWD = 800
STREAMS = 2000
"""Of one connection."""

LOUD, SLOW, DEAF = 120, 60, 60
"""Connections to the pages: with headers of megabytes, that ask for ever, and that read nothing."""

ANSWER_S = 5.0
END_S = 60.0


@dataclass(frozen=True)
class Target:
    """A server and who its enemies are.

    Attributes:
        pair: a certificate that the server takes, if it wants any.
        token: likewise.
        expired: one of which the time is nearly over.
        expires: when it is, in Unix time.
        claimed: a worker that ``pair`` and ``token`` speak for, which another process is.
        beyond: a worker that they speak for and that the run does not have.
        seconds: how long the enemies go on once they are ready.
    """

    port: int
    http_port: int
    ca: Path
    pair: Pair | None
    token: str
    expired: Pair | None
    expires: float
    claimed: int
    beyond: int
    seconds: float

    def credentials(self, pair: Pair | None) -> grpc.ChannelCredentials:
        """For TLS with this certificate."""
        own = (pair.key.read_bytes(), pair.certificate.read_bytes()) if pair else (None, None)
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), *own)


@dataclass
class Enemy:
    """One flood under way, in its own process."""

    target: Target
    counts: Counter[str] = field(default_factory=Counter)
    until: float = 0.0

    def begin(self) -> None:
        """The time runs from now."""
        self.until = time.monotonic() + self.target.seconds

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """One of many, which the server may end as it likes."""
        self.counts["attempts"] += 1
        try:
            yield
        except (OSError, AssertionError, grpc.RpcError):
            self.counts["cut"] += 1

    def heard(self, client: RawClient) -> None:
        """Count the server's first word, or that it has none."""
        client.end()
        while (frame := client.receive(ANSWER_S)) is not None:
            if frame.HasField("welcome"):
                self.counts["welcome"] += 1
            if frame.HasField("goodbye"):
                self.counts["goodbye"] += 1
                self.counts[" ".join(frame.goodbye.reason.split()[:4])] += 1
        self.counts["ended"] += 1


def worded(number: int, size: int = 100_000) -> str:
    """Escape sequences and a forged line, another one each time."""
    return f'{number}\x1b]52;c;ZXZpbA==\x07\x1b[2J\u202e\n{{"event": "forged"}} ' + "x" * size


def watchers(enemy: Enemy) -> None:
    """A crowd that asks for the server's health for ever; half of it as someone, where one has to be."""
    target = enemy.target
    shown = [None] if target.pair is None else [None, target.pair]
    enemy.begin()
    with contextlib.ExitStack() as stack:
        crowds = [
            stack.enter_context(Crowd(target.port, CROWD // len(shown), call(WATCH), target.ca, pair))
            for pair in shown
        ]
        time.sleep(max(0.0, enemy.until - time.monotonic()))
        enemy.counts["cut"] = sum(crowd.cut for crowd in crowds)


def streams(enemy: Enemy) -> None:
    """As many calls of one connection as there may be, half of them without a body."""
    target = enemy.target
    said = b"".join(call((WATCH, CHECK)[n % 2], 2 * n + 1, has_body=n % 2 == 0) for n in range(STREAMS))
    enemy.begin()
    while enemy.goes_on:
        with enemy.attempt(), connection(target.port, target.ca, said, target.pair) as link:
            link.settimeout(1)
            while enemy.goes_on and link.recv(65536):
                pass


def joins(enemy: Enemy) -> None:
    """Joins of two megabytes, as nobody and as someone."""
    target = enemy.target
    fields: dict[str, Any] = {"protocol": PROTOCOL, "package_version": __version__, "incarnation": bytes(16)}
    large = [
        pb.Join(**fields, workers=[target.beyond], task="a" * 1_900_000),
        pb.Join(**fields, workers=range(600_000)),
        pb.Join(**fields, workers=range(1_900_000)),
        pb.Join(**{**fields, "package_version": "\x1b[2J" * 400_000}, workers=[target.beyond]),
    ]
    sent = [pb.WorkerFrame(join=join).SerializeToString() for join in large]
    someone = {"credentials": target.credentials(target.pair), "token": target.token}
    nobody = {"credentials": target.credentials(None)}
    enemy.begin()
    for frame, shown in zip(cycle(sent), cycle([someone, someone, nobody]), strict=False):
        if not enemy.goes_on:
            break
        with enemy.attempt(), RawClient(target.port, **shown) as client:  # type: ignore[arg-type]
            client.send(frame)
            enemy.heard(client)


def insiders(enemy: Enemy) -> None:
    """Someone who claims another's worker, or one that there is not, and words all that it can."""
    target = enemy.target
    credentials = target.credentials(target.pair)
    enemy.begin()
    for number, worker in zip(count(), cycle([target.claimed, target.beyond])):
        if not enemy.goes_on:
            break
        text = worded(number)
        failure = pb.Failure(worker=worker, message=text, traceback=text)
        with (
            enemy.attempt(),
            RawClient(target.port, credentials=credentials, token=target.token) as client,
        ):
            client.send(join=client.join_message([worker], package_version=text, task=text))
            for _ in range(3):
                client.send(failure=failure)
            client.send(goodbye=pb.Goodbye(reason=text))
            enemy.heard(client)
        with (
            enemy.attempt(),
            RawClient(target.port, credentials=credentials, token=target.token) as client,
        ):
            client.send(join=client.join_message([worker]))
            enemy.heard(client)


def returners(enemy: Enemy) -> None:
    """Someone whose certificate has expired, who takes up the TLS session that it had."""
    target = enemy.target
    assert target.expired is not None
    credentials = target.credentials(target.expired)
    # Sessions are kept by name, and an address is none.
    options = {"grpc__ssl_session_cache": tickets.ssl_session_cache_lru(1)}
    options["grpc__ssl_target_name_override"] = "localhost"

    def join() -> None:
        with (
            enemy.attempt(),
            RawClient(target.port, credentials=credentials, **options) as client,
        ):
            client.send(join=client.join_message([target.beyond]))
            enemy.heard(client)

    join()
    assert enemy.counts.pop("goodbye", 0), "it never had a session"
    enemy.counts.clear()
    time.sleep(max(0.0, target.expires - time.time()))
    enemy.begin()
    while enemy.goes_on:
        join()


LOUD_REQUEST: Final = (
    b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 65_000) for n in range(98)) + b"\r\n"
)
SLOW_REQUEST: Final = b"GET / HTTP/1.1\r\nX: " + b"a" * 30_000
DEAF_REQUEST: Final = b"GET /data/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class _Asker:
    """One connection to the pages, and what of its request is sent.

    Attributes:
        piece: bytes that it sends at a time.
    """

    said: bytes
    piece: int
    sent: int = 0

    def go_on(self, link: socket.socket) -> bool:
        """Send some more; whether the server still listens to it."""
        try:
            self.sent += link.send(self.said[self.sent : self.sent + self.piece])
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def askers(enemy: Enemy) -> None:
    """Those at the pages: with headers of megabytes, slow, and deaf; each that is hung up on asks again."""
    enemy.begin()
    with selectors.DefaultSelector() as held, contextlib.ExitStack() as stack:
        stack.callback(lambda: [key.fileobj.close() for key in held.get_map().values()])  # type: ignore[union-attr]
        due = [
            *[(LOUD_REQUEST, len(LOUD_REQUEST))] * LOUD,
            *[(SLOW_REQUEST, 1)] * SLOW,
            *[(DEAF_REQUEST, len(DEAF_REQUEST))] * DEAF,
        ]
        while enemy.goes_on:
            while due and enemy.goes_on:
                asker = _Asker(*due.pop())
                with enemy.attempt():
                    held.register(_deaf_link(enemy.target.http_port), selectors.EVENT_WRITE, asker)
            for key, _ in held.select(0.05):
                link, asker = key.fileobj, key.data
                assert isinstance(link, socket.socket)
                if not asker.go_on(link):
                    enemy.counts["hung up"] += 1
                    held.unregister(link)
                    link.close()
                    due.append((asker.said, asker.piece))
            time.sleep(0.02)


def _deaf_link(port: int) -> socket.socket:
    """A connection whose end here takes little."""
    link = socket.socket()
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(ANSWER_S)
        link.connect(("127.0.0.1", port))
        link.setblocking(False)
    except BaseException:
        link.close()
        raise
    return link


def rebinders(enemy: Enemy) -> None:
    """Requests by a name that is not the server's, one after the other."""
    enemy.begin()
    while enemy.goes_on:
        address = ("127.0.0.1", enemy.target.http_port)
        with enemy.attempt(), socket.create_connection(address, ANSWER_S) as link:
            link.sendall(b"GET /status HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            status = link.recv(12)[9:].decode()
            enemy.counts[f"answered {status}" if status else "cut"] += 1
        time.sleep(0.01)


class Flood:
    """One of this module's functions, in a process of its own; a context manager that leaves none.

    Attributes:
        counts: what came of it, once it is over.
    """

    def __init__(self, attack: Callable[[Enemy], None], target: Target, niceness: int = 0) -> None:
        self.name = attack.__name__
        self.counts: Counter[str] = Counter()
        self._ours, theirs = PREPARED.Pipe(duplex=False)
        self._process = PREPARED.Process(
            target=_run, args=(attack.__name__, target, niceness, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.join(0 if kind else END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)
        self._process.close()
        self._ours.close()

    def wait(self, timeout: float) -> Counter[str]:
        """Until it is over; what came of it.

        Raises:
            AssertionError: if that takes longer, or it broke.
        """
        assert self._ours.poll(timeout), f"the flood of {self.name} does not end"
        result = self._ours.recv()
        assert isinstance(result, Counter), result
        return result


def _run(name: str, target: Target, niceness: int, results: Connection) -> None:
    os.nice(niceness)
    enemy = Enemy(target)
    try:
        getattr(sys.modules[__name__], name)(enemy)
    except BaseException as error:
        results.send(f"the flood of {name} broke: {error!r}")
        raise
    results.send(enemy.counts)
