"""gRPC's server on a port, made anew where it has ended by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

LOOK_S: Final = 0.05  # between two looks; meanwhile nobody new comes in


class Listener:
    """Keeps a server listening.

    The loop of grpcio 1.85 that takes calls ends at one whose name is not UTF-8, which any stranger can make:
    ``rpc_state.method().decode()`` in ``aio/server.pyx.pxi``. The server then takes no call any more; those
    that are open go on.

    Args:
        make: a server that does not listen yet.
        open_port: lets a server listen at an address; the port.
    """

    def __init__(
        self, make: Callable[[], grpc.aio.Server], open_port: Callable[[grpc.aio.Server, str], int]
    ) -> None:
        self._make, self._open_port = make, open_port
        self._server = make()
        self._ending: set[asyncio.Task[None]] = set()
        self._fallen: set[grpc.aio.Server] = set()
        """Servers that take no call, with calls that go on: one that is forgotten cancels them."""

    async def start(self, address: str) -> int:
        """Listen; the port.

        Raises:
            RuntimeError: if the address cannot be listened on.
        """
        port = self._open_port(self._server, address)
        await self._server.start()
        asyncio.get_running_loop().set_exception_handler(_report)
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)
        return port

    async def watch(self, address: str) -> None:
        """Listen anew whenever the server has ended, until cancelled."""
        while True:
            try:
                await self._server.wait_for_termination(LOOK_S)
            except UnicodeDecodeError:
                self._fallen.add(self._server)
                ending = asyncio.create_task(self._outlive(self._server))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                self._server = self._make()
                self._open_port(self._server, address)
                await self._server.start()

    async def _outlive(self, fallen: grpc.aio.Server) -> None:
        """Until the calls of a server are over."""
        with contextlib.suppress(UnicodeDecodeError):
            await fallen.wait_for_termination()
        await _stop(fallen, None)
        self._fallen.discard(fallen)

    async def stop(self, grace: float) -> None:
        """Take no calls any more, and end those that are open after so many seconds."""
        await asyncio.gather(*(_stop(server, grace) for server in (self._server, *self._fallen)))
        await asyncio.gather(*self._ending)


async def _stop(server: grpc.aio.Server, grace: float | None) -> None:
    with contextlib.suppress(UnicodeDecodeError):
        await server.stop(grace)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC's own task that shuts a server down ends with what the server has ended with.
    if not isinstance(context.get("exception"), UnicodeDecodeError):
        loop.default_exception_handler(context)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    # Whoever sends what is not UTF-8, or hangs up as a call ends, could fill the log with gRPC's lines on it.
    error = record.exc_info[1] if record.exc_info else None
    return not any(isinstance(one, UnicodeDecodeError | grpc.aio.BaseError) for one in (error, record.msg))
