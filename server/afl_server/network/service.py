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
from afl.core.messages import GoodbyeStatus
from afl.daemon import events
from afl.daemon.descriptors import most_connections, most_descriptors
from afl.errors import AddressError, NonFiniteError, ProtocolError
from afl.wire.frames import SERVICE
from afl.wire.transport import channel_options
from afl_server.coordinator import Coordinator
from afl_server.network.authentication import Identity, Served
from afl_server.network.bind_check import check_bind
from afl_server.network.disconnect import disconnect
from afl_server.network.reloading import ReloadedFiles
from afl_server.session import Session, SessionOverError, State
from afl_server.uninterrupted import uninterrupted

LOG = logging.getLogger("afl.server")

STOP_GRACE_S = 1.0
"""How long streams that are still open get to close when the server stops."""


LEAST_CONNECTIONS = 1024
"""Of strangers and workers together, that are allowed however few the sessions."""

CONNECTIONS_A_SESSION = 4
"""A worker that comes back, a probe, and some that are on their way out."""


class FederationService:
    """The gRPC server of one run."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        server = coordinator.config.server
        # TLS and HTTP/2 have to begin within it; what it bounds of a session itself comes after.
        patience_ms = round(1000 * server.handshake_timeout)
        bounds = [
            ("grpc.server_handshake_timeout_ms", patience_ms),
            ("grpc.max_connection_idle_ms", patience_ms),
            ("grpc.max_allowed_incoming_connections", _most_connections(server.max_sessions)),
        ]
        self._server = grpc.aio.server(options=[*channel_options(server.chunk_bytes), *bounds])
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
        check_bind("server.listen", address)
        try:
            self.port = self._open_port(str(address))
        except RuntimeError as error:
            raise AddressError(f"server.listen: cannot listen on {address}: {error}") from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._watch = asyncio.create_task(self._watch_sessions())

    def _open_port(self, address: str) -> int:
        certificates = self._coordinator.gate.certificates
        if certificates is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, _credentials(certificates))

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
        session = self._coordinator.reception.admit(context.peer(), self._identify(context))
        tasks = {
            asyncio.create_task(self._write(session, context)),
            asyncio.create_task(self._read(session, context)),
        }
        try:
            await self._until_over(session, tasks)
        finally:
            # A peer that hangs up as it is seen off cancels this once more; it must be seen off all the same.
            await uninterrupted(self._see_off(session, tasks))
        if session.is_given_up:
            # The status of an ordinary end would wait behind what the peer does not take.
            raise asyncio.CancelledError

    async def _until_over(self, session: Session, tasks: set[asyncio.Task[None]]) -> None:
        """Wait until one of the session's two sides has ended; a peer that is seen off has
        ``server.peer_timeout`` to take what is left."""
        ended = asyncio.create_task(session.ended.wait())
        try:
            await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
            if session.state is State.ENDED and not session.is_given_up:
                patience = self._coordinator.config.server.peer_timeout
                done, _ = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    session.give_up()
        finally:
            ended.cancel()
        if session.is_given_up:
            self._coordinator.reception.tell_not_reading(session)
            disconnect(session.peer, self.port)

    def _identify(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> Identity:
        shown = context.auth_context()
        names = shown.get("x509_subject_alternative_name", ())
        metadata = context.invocation_metadata() or ()
        return self._coordinator.gate.identify(
            [name.decode(errors="replace") for name in names],
            [str(value) for key, value in metadata if key == "authorization"],
            next(iter(shown.get("x509_pem_cert", ())), b""),
        )

    async def _see_off(self, session: Session, tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self._coordinator.reception.leave(session)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, grpc.RpcError | grpc.aio.BaseError):
                LOG.error(
                    "session of %s broke",
                    session.label,
                    exc_info=result,
                    extra=events.SessionBroke(peer=session.peer, workers=session.workers).extra,
                )

    async def _write(self, session: Session, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        downlink = self._coordinator.counters.downlink
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
                LOG.info(
                    "%s leaves: %s",
                    session.label,
                    goodbye,
                    extra=events.Goodbye(
                        peer=session.peer, workers=session.workers, reason=str(goodbye)
                    ).extra,
                )
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
                if await self._is_revoked(session):
                    continue
                session.beat()
                silence = now - session.last_seen
                if silence > server.peer_timeout and not session.is_paused:
                    LOG.warning(
                        "%s silent for %.0f s and given up",
                        session.label,
                        silence,
                        extra=events.PeerTimeout(
                            peer=session.peer, workers=session.workers, seconds=silence
                        ).extra,
                    )
                    session.end(GoodbyeStatus.TRY_LATER, f"nothing heard for {silence:.0f} s")
                    await self._coordinator.reception.leave(session)

    async def _is_revoked(self, session: Session) -> bool:
        """End a session whose token does not count any more; whether it was one."""
        identity = self._coordinator.gate.again(session.identity)
        if identity is session.identity or session.state is State.ENDED:
            return False
        session.identity = identity
        refusal = identity.forbids(session.workers)
        if not refusal:
            return False
        self._coordinator.reception.refuse(session, refusal)
        await self._coordinator.reception.leave(session)
        return True


def _most_connections(sessions: int) -> int:
    """How many connections there may be at once, for so many sessions: a connection costs memory also where
    it says nothing."""
    return min(most_connections(most_descriptors()), max(LEAST_CONNECTIONS, CONNECTIONS_A_SESSION * sessions))


def _credentials(certificates: ReloadedFiles[Served]) -> grpc.ServerCredentials:
    """Credentials whose certificate may be replaced: gRPC asks before every handshake."""
    served = first = certificates.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        now = certificates.current()
        if now is served:
            return None
        served = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        changed,  # type: ignore[arg-type]  # the stubs forget that None means no change
        require_client_authentication=first.authorities is not None,
    )


def _configuration(served: Served) -> grpc.ServerCertificateConfiguration:
    pair = served.pair
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], served.authorities)
