"""A TCP proxy between workers and their server, whose links can be cut, held up and slowed down."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

_T = TypeVar("_T")
_PIECE = 64 * 1024
_BUFFER = 64 * 1024
_TICKS_A_SECOND = 20
_START_S = 30.0


class Way(enum.Enum):
    """Which way bytes go."""

    UP = "to the server"
    DOWN = "to the worker"


class Link:
    """One connection through the proxy."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Reset it at both ends, with whatever is under way."""
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Listens on a free port of loopback and passes each connection on to ``target``.

    It may be made before its target is known: connections then wait for :meth:`aim`. A context manager,
    or :meth:`close` it.
    """

    def __init__(self, target: int | None = None) -> None:
        self.delay = 0.0
        """Seconds that every piece is held for, in each direction."""
        self.rate = 0
        """Bytes a second that a connection carries, in each direction; 0 for as many as come."""
        self.lifetime = 0.0
        """Seconds after which a connection is reset; 0 for never."""
        self.links_made = 0
        self._links: set[Link] = set()
        self._moved = {Way.UP: 0, Way.DOWN: 0}
        self._cuts: list[tuple[Way, int, threading.Event]] = []
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._aimed = asyncio.Event()
        self._target = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        # What a connection has sent and nobody has read is on its way all the same: let it be little.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())
        if target is not None:
            self.aim(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where workers connect."""
        return f"127.0.0.1:{self.port}"

    @property
    def moved(self) -> int:
        """Bytes that have gone through, in both directions."""
        return sum(self._moved.values())

    def aim(self, target: int) -> None:
        """Pass connections on to this port from now on; those that waited for it go through."""
        self._do(lambda: self._aim(target))

    # Faults.

    def cut(self) -> int:
        """Reset every connection now; how many there were."""
        return self._do(self._cut_all)

    def cut_after(self, length: int, way: Way = Way.UP) -> threading.Event:
        """Reset every connection once ``length`` more bytes have gone one way; the event tells when."""
        happened = threading.Event()
        self._do(lambda: self._cuts.append((way, self._moved[way] + length, happened)))
        return happened

    def stall(self) -> None:
        """Pass nothing on, in either direction, and close nothing: a peer that is gone without a word."""
        self._do(self._flowing.clear)

    def resume(self) -> None:
        """Pass on again, from where it stopped."""
        self._do(self._flowing.set)

    def close(self) -> None:
        """End all connections and stop listening."""
        if self._loop.is_closed():
            return
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    # For subclasses.

    def passing(self, link: Link, way: Way, data: bytes) -> None:
        """Called with all that passes, in order, before it is passed on."""

    def altered(self, way: Way, data: bytes) -> bytes:
        """What to pass on in place of what came, just as long."""
        del way
        return data

    async def opening(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called with each new connection, before anything passes.

        Raises:
            OSError: if nothing is to pass; the connection is then cut.
        """

    # Inner workings, on the loop's thread.

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def _do(self, action: Callable[[], _T]) -> _T:
        async def _in_loop() -> _T:
            return action()

        return self._call(_in_loop())

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, sock=self._socket)

    async def _shut(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cut_all()
        await asyncio.sleep(0)

    def _aim(self, target: int) -> None:
        self._target = target
        self._aimed.set()

    def _cut_all(self) -> int:
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = Link()
        link.writers.append(writer)
        self._links.add(link)
        self.links_made += 1
        try:
            await self._aimed.wait()
            await self.opening(reader, writer)
            out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._target)
            out_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            link.writers.append(out_writer)
            pumps = [
                asyncio.ensure_future(self._pump(link, Way.UP, reader, out_writer)),
                asyncio.ensure_future(self._pump(link, Way.DOWN, out_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, timeout=self.lifetime or None, return_when=asyncio.ALL_COMPLETED)
                if not all(pump.done() for pump in pumps):
                    link.cut()
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            link.cut()
        finally:
            for each in link.writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()
            self._links.discard(link)
            self._tasks.discard(task)

    async def _pump(
        self, link: Link, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(self.rate // _TICKS_A_SECOND or _PIECE):
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._flowing.wait()
                data = self._cut_if_due(way, data)
                self.passing(link, way, data)
                writer.write(self.altered(way, data))
                await writer.drain()
                self._moved[way] += len(data)
                self._announce_cuts()
            writer.write_eof()
            return
        link.cut()

    def _cut_if_due(self, way: Way, data: bytes) -> bytes:
        """What may pass before the next cut."""
        ends = [place for which, place, _ in self._cuts if which is way]
        return data[: min(ends) - self._moved[way]] if ends else data

    def _announce_cuts(self) -> None:
        due = [cut for cut in self._cuts if self._moved[cut[0]] >= cut[1]]
        for cut in due:
            self._cuts.remove(cut)
            self._cut_all()
            cut[2].set()


class HttpProxy(Proxy):
    """What a site may have between its machines and the internet: CONNECT, and everything then passes.

    Whatever host is asked for, the connection goes to ``target``.
    """

    def __init__(self, target: int | None = None, *, refuses: bool = False) -> None:
        self.asked_for: list[str] = []
        """HOST:PORT of each request."""
        self._refuses = refuses
        super().__init__(target)

    @property
    def environment(self) -> dict[str, str]:
        """With which a process takes it."""
        return {"https_proxy": f"http://{self.address}", "no_proxy": ""}

    async def opening(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ConnectionAbortedError("no request") from error
        method, host, *_ = head.decode("ascii", "replace").split()
        self.asked_for.append(host)
        allowed = method == "CONNECT" and not self._refuses
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if allowed else b"HTTP/1.1 403 Forbidden\r\n\r\n")
        await writer.drain()
        if not allowed:
            raise PermissionError(f"{method} {host}")
