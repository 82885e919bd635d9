"""gRPC on the server: streams to events, effects to streams. Beside its health service, no other module here
knows gRPC's types."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from afl.config.address import Address, shown_peer
from afl.config.schema import Server
from afl.daemon import events as log_events
from afl.daemon.descriptors import most_connections, most_descriptors
from afl.errors import AddressError
from afl.user_code import shortage
from afl.wire.frames import SERVICE
from afl.wire.transport import channel_options
from afl_server.federation import effects, events
from afl_server.federation.counters import Counters
from afl_server.network.authentication import Authentication, PeerIdentity, Served
from afl_server.network.bind_check import check_bind
from afl_server.network.conversation import Conversation
from afl_server.network.disconnect import disconnect
from afl_server.network.door import Door, Strangers
from afl_server.network.health import Health
from afl_server.network.listening import Listener
from afl_server.network.outbox import Outbox
from afl_server.network.reloading import ReloadedFiles

LOG = logging.getLogger("afl.server")

STOP_GRACE_S = 1.0
"""How long streams that are still open get to close when the server stops."""

LEAST_CONNECTIONS = 1024
"""Of strangers and workers together, that are allowed however few the sessions."""

CONNECTIONS_A_SESSION = 4
"""A worker that comes back, a probe, and some that are on their way out."""

STREAMS_A_CONNECTION = 100
"""Open at once, as few as HTTP/2 advises to allow (RFC 9113, 6.5.2); a worker needs two."""

PARTS_A_TURN = 64
"""Reports and chunks of one frame after which other streams have their turn."""

Deliver = Callable[[events.Event], None]
"""Takes an event to the federation, and carries out what follows."""


@dataclass(eq=False)
class _Stream:
    """One worker process's stream.

    Attributes:
        peer: as gRPC names it.
        has_joined: whether the peer has said which workers it speaks for.
        is_read: set while the federation takes what the peer sends.
        is_writing: while gRPC has a message that it has not taken yet, also after the writer's end.
    """

    member: int
    peer: str
    identity: PeerIdentity
    outbox: Outbox
    has_joined: bool = False
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    is_writing: bool = False

    @property
    def is_session(self) -> bool:
        """Whether the peer is known, or has joined where nobody has to be, and has not been seen off."""
        return (self.has_joined or bool(self.identity.permission.grants)) and not self.outbox.ended.is_set()


class FederationService:
    """The gRPC server of one run.

    Args:
        run_id: told to workers as the run ends.
        counters: count what is sent.
    """

    def __init__(
        self,
        server: Server,
        authentication: Authentication,
        run_id: str,
        counters: Counters,
        deliver: Deliver,
    ) -> None:
        self._config = server
        self._authentication = authentication
        self._run_id = run_id
        self._counters = counters
        self._deliver = deliver
        # TLS and HTTP/2 have to begin within it; what it bounds of a session itself comes after.
        patience_ms = round(1000 * server.handshake_timeout)
        most = _most_connections(server.max_sessions)
        bounds = [
            ("grpc.server_handshake_timeout_ms", patience_ms),
            ("grpc.max_connection_idle_ms", patience_ms),
            ("grpc.max_allowed_incoming_connections", most),
            ("grpc.max_concurrent_streams", STREAMS_A_CONNECTION),
        ]
        self._options = [*channel_options(server.chunk_bytes), *bounds]
        self._health = Health(("", SERVICE), server.handshake_timeout)
        self._listener = Listener(self._make_server, self._open_port)
        self._door = Door(most, server.handshake_timeout, self._session_peers)
        self._watches: list[asyncio.Task[None]] = []
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count(1)
        self.port = 0

    async def start(self, address: Address) -> None:
        """Listen.

        Raises:
            AddressError: if the address cannot be listened on.
        """
        check_bind("server.listen", address)
        try:
            self.port = await self._listener.start(str(address))
        except RuntimeError as error:
            raise AddressError(f"server.listen: cannot listen on {address}: {error}") from error
        self._health.set(health_pb2.HealthCheckResponse.SERVING)
        self._watches = [
            asyncio.create_task(self._watch_permissions()),
            asyncio.create_task(self._door.watch(self.port)),
            asyncio.create_task(self._listener.watch(str(replace(address, port=self.port)))),
        ]

    def _make_server(self) -> grpc.aio.Server:
        made = grpc.aio.server(options=self._options)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)
        made.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}), self._health.handler())
        )
        return made

    def _open_port(self, server: grpc.aio.Server, address: str) -> int:
        certificates = self._authentication.certificates
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(certificates))

    async def stop(self) -> None:
        """Stop listening and end what is open."""
        self._health.set(health_pb2.HealthCheckResponse.NOT_SERVING)
        for watch in self._watches:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._listener.stop(STOP_GRACE_S)

    def strangers(self) -> Strangers:
        """Connections without a session; from any thread."""
        return self._door.strangers

    def _session_peers(self) -> list[str]:
        return [stream.peer for stream in self._streams.values() if stream.is_session]

    # What the federation wants of streams.

    def carry_out(self, effect: effects.Effect) -> None:
        """An effect that concerns streams; nothing happens if the one that it is for is gone."""
        if isinstance(effect, effects.Announce):
            for stream in self._streams.values():
                stream.outbox.wake()
            return
        stream_ = self._streams.get(effect.member)  # type: ignore[attr-defined]  # all others have one
        if stream_ is None:
            return
        outbox = stream_.outbox
        match effect:
            case effects.Send():
                outbox.put(effect.frame)
            case effects.Follow():
                outbox.follow(effect)
            case effects.Heartbeat():
                outbox.beat()
            case effects.End():
                outbox.end(effect.status, effect.reason, self._run_id)
            case effects.Read(is_wanted=True):
                stream_.is_read.set()
            case effects.Read():
                stream_.is_read.clear()
            case effects.HangUp():
                disconnect(effect.peer, self.port)
        if outbox.is_full and not outbox.is_given_up:
            self._give_up(stream_)

    def _give_up(self, stream: _Stream) -> None:
        """A peer has long taken nothing."""
        stream.outbox.give_up()
        self._deliver(events.NotReading(stream.member))

    # Streams.

    async def _serve(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        identity = self._identify(context)
        outbox = Outbox(self._counters, self._config.chunk_bytes)
        stream = _Stream(next(self._numbers), context.peer(), identity, outbox)
        stream.is_read.set()
        self._streams[stream.member] = stream
        self._deliver(events.Opened(stream.member, context.peer(), identity.permission))
        tasks = {
            asyncio.create_task(self._write(stream, context)),
            asyncio.create_task(self._read(stream, context)),
        }
        try:
            await self._until_over(stream, tasks)
            broken = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        finally:
            # Before anything is waited for: a peer that hangs up meanwhile cancels this once more.
            for task in tasks:
                task.cancel()
            del self._streams[stream.member]
            self._deliver(events.Left(stream.member))
        await asyncio.gather(*tasks, return_exceptions=True)
        for error in broken:
            if isinstance(error, Exception) and shortage(error):
                self._deliver(events.Faulted(error))
            elif not isinstance(error, grpc.RpcError | grpc.aio.BaseError):
                broke = log_events.SessionBroke(peer=context.peer(), workers=())
                LOG.error(
                    "the stream of %s broke", shown_peer(context.peer()), exc_info=error, extra=broke.extra
                )
        if stream.outbox.is_given_up or stream.is_writing:
            # The status of an ordinary end would wait behind what the peer does not take; and where that is
            # the first message, gRPC fails at the status.
            raise asyncio.CancelledError

    async def _until_over(self, stream: _Stream, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Wait until one of the stream's two sides has ended; a peer that is seen off has
        ``server.peer_timeout`` to take what is left."""
        outbox = stream.outbox
        ended = asyncio.create_task(outbox.ended.wait())
        try:
            await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
            if outbox.ended.is_set() and not outbox.is_given_up:
                timeout = self._config.peer_timeout
                done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self._give_up(stream)
        finally:
            ended.cancel()

    def _identify(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> PeerIdentity:
        shown = context.auth_context()
        names = shown.get("peer_uri", ())
        metadata = context.invocation_metadata() or ()
        return self._authentication.identify(
            [name.decode(errors="replace") for name in names],
            [str(value) for key, value in metadata if key == "authorization"],
            next(iter(shown.get("x509_pem_cert", ())), b""),
        )

    async def _write(self, stream: _Stream, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        downlink = self._counters.downlink
        try:
            async for frame in stream.outbox.frames():
                downlink.add(len(frame.data), frame.content)
                stream.is_writing = True
                await context.write(frame.data)
                stream.is_writing = False
        except (grpc.RpcError, grpc.aio.BaseError):
            raise
        except Exception as error:  # noqa: BLE001  # it would come with each stream that is sent the same
            self._deliver(events.Faulted(error))

    async def _read(self, stream: _Stream, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        conversation, ended = Conversation(stream.member, stream.outbox), stream.outbox.ended
        while not ended.is_set():
            await stream.is_read.wait()
            data = await context.read()
            if not isinstance(data, bytes):
                # gRPC's end-of-stream mark.
                return
            for count, event in enumerate(conversation.events_of(data), 1):
                self._deliver(event)
                if isinstance(event, events.Joined):
                    stream.has_joined = True
                if isinstance(event, events.GoodbyeSaid):
                    return
                if count % PARTS_A_TURN == 0:
                    await asyncio.sleep(0)
                    await stream.is_read.wait()
                if ended.is_set():
                    break
            if stream.outbox.is_full and not stream.outbox.is_given_up:
                self._give_up(stream)
        # The writer still has a goodbye to send; it ends the stream.
        await asyncio.Event().wait()

    async def _watch_permissions(self) -> None:
        """Notice tokens that count for something else than before."""
        while True:
            await asyncio.sleep(self._config.heartbeat)
            for stream in list(self._streams.values()):
                identity = self._authentication.again(stream.identity)
                if identity is not stream.identity:
                    stream.identity = identity
                    self._deliver(events.PermissionChanged(stream.member, identity.permission))


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
