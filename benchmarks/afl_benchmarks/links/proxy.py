"""A TCP proxy with a port for each link: what passes through a port is carried by a link of its own.

TCP ends at the proxy and begins again behind it, over loopback, where it is fast. So the bytes of a
connection come no faster and no earlier than over a real link, and HTTP/2's flow control sees the delay,
but TCP's slow start does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

from afl_benchmarks.links.pipe import Carried, Link, Pipe

_T = TypeVar("_T")

_GRAIN_S = 0.002
"""How often what comes out of a busy link is passed on."""

_PIECE = 16 * 1024

_QUEUE = 128 * 1024
"""Bytes taken in before they can enter the link. More than a loaded machine's late turns can drain."""

_START_S = 30.0

PAYLOAD_SHARE = 1448 / 1500
"""What TCP carries of a full packet of 1500 bytes: headers of IPv4, and TCP with timestamps, take 52."""


class ProxyLinks:
    """Listens on free ports of loopback, one for each link, and passes connections on. A context manager.

    What counts and is carried is TCP's payload; the packets' headers take their share of the rate.
    Each connection has the whole rate of its link: a worker makes one.

    Args:
        count: the number of links.
    """

    kind: ClassVar[str] = "proxy"
    server_section: ClassVar[Mapping[str, Any]] = {"listen": "127.0.0.1:0"}
    worker_options: ClassVar[Sequence[str]] = ()

    def __init__(self, count: int, link: Link) -> None:
        self._carried = [Carried() for _ in range(count)]
        self._link = Link(link.rate * PAYLOAD_SHARE, link.delay)
        self._target = 0
        self._connections: dict[asyncio.Task[bool], tuple[socket.socket, socket.socket]] = {}
        self._loop = asyncio.new_event_loop()
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self._ports = [each.getsockname()[1] for each in self._sockets]
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self._call(self._listen())

    def aim(self, port: int) -> None:
        """Pass connections on to this port of loopback; before that there must be none."""
        self._target = port

    def address(self, number: int) -> str:
        """Where a link begins."""
        return f"127.0.0.1:{self._ports[number]}"

    def inside(self, number: int) -> Sequence[str]:  # noqa: ARG002
        """Its worker needs no other place than this."""
        return ()

    def carried(self, number: int | None = None) -> Carried:
        """What one link, or all of them, have carried so far."""
        of = self._carried if number is None else [self._carried[number]]
        return Carried(sum(each.up for each in of), sum(each.down for each in of))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _listen(self) -> None:
        # Not asyncio's server, which leaves open what it accepts while it is closed.
        for listening, carried in zip(self._sockets, self._carried, strict=True):
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening, carried)

    def _accept(self, listening: socket.socket, carried: Carried) -> None:
        try:
            near, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            # It has gone again.
            return
        far = socket.socket(near.family, near.type)
        for each in (near, far):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connection(carried, near, far))
        self._connections[task] = (near, far)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[bool]) -> None:
        is_whole = not task.cancelled() and task.exception() is None and task.result()
        for each in self._connections.pop(task):
            if not is_whole:
                # One end is gone, or the links are: the other end hears of a reset.
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()

    async def _shut(self) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        # The tasks' callbacks close the sockets in the loop's next turn.
        await asyncio.sleep(0)

    async def _connection(self, carried: Carried, near: socket.socket, far: socket.socket) -> bool:
        """Carry a connection; whether both ways came to their end."""
        is_whole = True
        try:
            await self._loop.sock_connect(far, ("127.0.0.1", self._target))
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._way(carried, "up", near, far))
                ways.create_task(self._way(carried, "down", far, near))
        except* OSError:
            is_whole = False
        return is_whole

    async def _way(
        self, carried: Carried, way: Literal["up", "down"], source: socket.socket, sink: socket.socket
    ) -> None:
        pipe = Pipe(self._link)
        changed = asyncio.Event()
        async with asyncio.TaskGroup() as ends:
            ends.create_task(self._fill(pipe, source, changed))
            ends.create_task(self._empty(pipe, sink, changed, carried, way))

    async def _fill(self, pipe: Pipe, source: socket.socket, changed: asyncio.Event) -> None:
        while data := await self._loop.sock_recv(source, _PIECE):
            pipe.put(self._loop.time(), data)
            changed.set()
            too_much = pipe.backlog(self._loop.time()) - _QUEUE
            if too_much > 0:
                await asyncio.sleep(too_much / self._link.rate)
        pipe.end()
        changed.set()

    async def _empty(
        self, pipe: Pipe, sink: socket.socket, changed: asyncio.Event, carried: Carried, way: str
    ) -> None:
        while True:
            changed.clear()
            data = pipe.take(self._loop.time())
            if data:
                setattr(carried, way, getattr(carried, way) + len(data))
                await self._loop.sock_sendall(sink, data)
            if pipe.is_over:
                sink.shutdown(socket.SHUT_WR)
                return
            now = self._loop.time()
            due = pipe.due(now, _GRAIN_S)
            if due is None:
                await changed.wait()
            else:
                await asyncio.sleep(due - now)
