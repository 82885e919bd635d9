"""gRPC on the server: streams to sessions. No other module here knows gRPC's types."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from afl.config.address import Address
from afl.errors import AddressError, NonFiniteError, ProtocolError
from afl.messages import GoodbyeStatus
from afl.transport import channel_options
from afl.wire.frames import SERVICE
from afl_server.coordinator import Coordinator
from afl_server.listening import check_listen
from afl_server.session import Session, SessionOverError, State
from afl_server.uninterrupted import uninterrupted

LOG = logging.getLogger("afl.server")

STOP_GRACE_S = 1.0
"""How long streams that are still open get to close when the server stops."""


class FederationService:
    """The gRPC server of one run."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._server = grpc.aio.server(options=channel_options(coordinator.config.server.chunk_bytes))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),)
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, address: Address) -> None:
        """Listen.

        Raises:
            AddressError: if the address cannot be listened on.
        """
        check_listen("server.listen", address)
        try:
            self.port = self._server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise AddressError(f"server.listen: cannot listen on {address}: {error}") from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._watch = asyncio.create_task(self._watch_sessions())

    async def stop(self) -> None:
        """Stop listening and end what is open."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._server.stop(STOP_GRACE_S)

    async def _set_health(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def _serve(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        session = self._coordinator.reception.admit(context.peer())
        tasks = {
            asyncio.create_task(self._write(session, context)),
            asyncio.create_task(self._read(session, context)),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A peer that hangs up as it is seen off cancels this once more; it must be seen off all the same.
            await uninterrupted(self._see_off(session, tasks))

    async def _see_off(self, session: Session, tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self._coordinator.reception.leave(session)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, grpc.RpcError | grpc.aio.BaseError):
                LOG.error("session of %s broke", session.label, exc_info=result)

    async def _write(self, session: Session, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        downlink = self._coordinator.tallies.downlink
        async for frame in session.outgoing():
            downlink.add(len(frame.data), frame.content)
            await context.write(frame.data)

    async def _read(self, session: Session, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        timeout: float | None = self._coordinator.config.server.handshake_timeout
        while session.state is not State.ENDED:
            await self._wait_turn(session)
            try:
                data = await (
                    context.read() if timeout is None else asyncio.wait_for(context.read(), timeout)
                )
            except TimeoutError:
                self._coordinator.reception.refuse(session, f"no Join within {timeout:g} s")
                break
            if not isinstance(data, bytes):
                # gRPC's end-of-stream mark.
                return
            timeout = None
            try:
                await session.receive(data)
            except SessionOverError as goodbye:
                LOG.info("%s leaves: %s", session.label, goodbye, extra={"event": "goodbye"})
                return
            except (ProtocolError, NonFiniteError) as error:
                self._coordinator.reception.refuse(session, str(error))
        # The writer still has a goodbye to send; it ends the stream.
        await asyncio.Event().wait()

    async def _wait_turn(self, session: Session) -> None:
        while self._coordinator.is_congested(session):
            session.is_paused = True
            await self._coordinator.relief()
        if session.is_paused:
            session.is_paused = False
            session.last_seen = time.monotonic()

    async def _watch_sessions(self) -> None:
        """Send heartbeats, and end sessions that have been silent for too long."""
        server = self._coordinator.config.server
        while True:
            await asyncio.sleep(server.heartbeat)
            now = time.monotonic()
            for session in self._coordinator.roster:
                if session.state is State.NEW:
                    continue
                session.beat()
                silence = now - session.last_seen
                if silence > server.peer_timeout and not session.is_paused:
                    LOG.warning(
                        "%s silent for %.0f s and given up",
                        session.label,
                        silence,
                        extra={"event": "peer_timeout"},
                    )
                    session.end(GoodbyeStatus.TRY_LATER, f"nothing heard for {silence:.0f} s")
                    await self._coordinator.reception.leave(session)
