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
from typing import Any, ClassVar, Self, TypeVar

from afl_lab.links.pipe import Carried, Link, Pipe

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self._ports = [each.getsockname()[1] for each in self._sockets]
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self._servers = self._call(self._listen())

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

    async def _listen(self) -> list[asyncio.Server]:
        servers = []
        for number, listening in enumerate(self._sockets):

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = number
            ) -> None:
                await self._accept(self._carried[number], reader, writer)

            servers.append(await asyncio.start_server(accept, sock=listening))
        return servers

    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, carried: Carried, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._way(carried, "up", reader, far_writer))
                ways.create_task(self._way(carried, "down", far_reader, writer))
        except* OSError:
            # One end is gone; the other hears of it at once.
            for each in writers:
                _reset(each)
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()
            self._tasks.discard(task)

    async def _way(
        self, carried: Carried, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        pipe = Pipe(self._link)
        changed = asyncio.Event()
        async with asyncio.TaskGroup() as ends:
            ends.create_task(self._fill(pipe, reader, changed))
            ends.create_task(self._empty(pipe, writer, changed, carried, way))

    async def _fill(self, pipe: Pipe, reader: asyncio.StreamReader, changed: asyncio.Event) -> None:
        while data := await reader.read(_PIECE):
            pipe.put(self._loop.time(), data)
            changed.set()
            too_much = pipe.backlog(self._loop.time()) - _QUEUE
            if too_much > 0:
                await asyncio.sleep(too_much / self._link.rate)
        pipe.end()
        changed.set()

    async def _empty(
        self, pipe: Pipe, writer: asyncio.StreamWriter, changed: asyncio.Event, carried: Carried, way: str
    ) -> None:
        while True:
            changed.clear()
            data = pipe.take(self._loop.time())
            if data:
                setattr(carried, way, getattr(carried, way) + len(data))
                writer.write(data)
                await writer.drain()
            if pipe.is_over:
                writer.write_eof()
                return
            now = self._loop.time()
            due = pipe.due(now, _GRAIN_S)
            if due is None:
                await changed.wait()
            else:
                await asyncio.sleep(due - now)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the peer is told of a reset, not of an end."""
    with contextlib.suppress(OSError):
        # Lingering for no time: whatever is under way is dropped.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
