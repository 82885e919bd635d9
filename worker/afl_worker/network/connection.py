"""gRPC on the worker: one stream, as events. No other module here knows gRPC's types."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import grpc

from afl.config.address import Address
from afl.core.messages import Ack, CommittedStep, GoodbyeStatus, Kind
from afl.errors import ProtocolError, StorageError
from afl.outside import MOST_OF_REASON, words
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import StepAssembler
from afl.wire.capture import Capture
from afl.wire.fast_chunk import lone_chunk_of_server
from afl.wire.frames import METHOD, Frame, ack_of, control, member, parse_server_frame
from afl.wire.pace import Pace
from afl.wire.settings import LARGEST_CHUNK_BYTES, RunSettings
from afl.wire.transport import channel_options
from afl_worker.network.credentials import CredentialFiles, Credentials
from afl_worker.network.errors import CUT, UNTRUSTED, plain_reason, why_closed, why_untrusted
from afl_worker.network.sending import Sending
from afl_worker.reconnection import Carried

LOG = logging.getLogger("afl.worker")

HANDSHAKE_HEARTBEAT_S = 5.0
"""Heartbeats until the Welcome names the run's own interval."""

HANDSHAKE_TIMEOUT_S = 30.0
"""Silence that ends a connection until the Welcome names the run's own limit."""

MOST_WAITING = 8
"""Steps, each of which may hold a whole model, that have come and are not taken yet; an honest server's next
but one waits for this worker's report, or costs no longer to take than to send."""


@dataclass(frozen=True)
class Ended:
    """The stream is over: with the server's goodbye, whose status it has, or without one. ``run_id`` names
    the run that is complete, if that is why."""

    reason: str
    status: GoodbyeStatus | None = None
    run_id: str = ""


@dataclass(frozen=True)
class Broken:
    """One of the stream's threads has failed; another connection would not help."""

    error: Exception


Event = pb.Welcome | pb.Roster | CommittedStep | Ack | Ended | Broken

_LARGE = (pb.Welcome, pb.Roster, CommittedStep)


class Connection:
    """One stream to the server. Events come from :meth:`next_event`; after ``Ended``, none.

    Proxy environment variables never apply for loopback. Raises ConfigError if one of the files cannot be
    used.

    Args:
        is_careful: whether an earlier connection was cut, so that little is under way at first.
        capture: keeps all that is sent.
    """

    def __init__(
        self,
        address: Address,
        files: CredentialFiles,
        *,
        use_proxy: bool = True,
        is_careful: bool = False,
        capture: Capture | None = None,
    ) -> None:
        credentials = files.read()
        self._address = address
        self._files = files
        self._use_proxy = use_proxy and not address.is_loopback
        self._is_careful = is_careful
        self._sending = Sending(lambda error: self._inbox.put(Broken(error)))
        self.assembler = StepAssembler((), 0)
        """To be replaced by one of the run, before any step is asked for."""
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._room = threading.Semaphore(MOST_WAITING)
        self._opened = self._heard = time.monotonic()
        self._ended = 0.0
        self._received_bytes = 0
        self._silence = ""
        self._heartbeat = HANDSHAKE_HEARTBEAT_S
        self._peer_timeout = HANDSHAKE_TIMEOUT_S
        self._closed = threading.Event()
        self._hurry = threading.Event()
        """Ends the wait for the next heartbeat."""
        self._channel = _channel(address, credentials, use_proxy=self._use_proxy)
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(METHOD)
        token = credentials.token
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        messages = self._sending.messages()
        self._call = call(self._kept(messages, capture) if capture else messages, metadata=metadata)
        self._threads = [
            threading.Thread(target=self._receive, name="afl-receive", daemon=True),
            threading.Thread(target=self._beat, name="afl-heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether more can come from the server."""
        return self._threads[0].is_alive()

    def send(self, frames: Iterable[Frame]) -> None:
        """Queue frames; they are built as the stream takes them."""
        self._sending.put(frames)

    def wait_taken(self, timeout_s: float) -> None:
        """Wait, bounded, until gRPC has taken what is queued: until then it needs the interpreter."""
        self._sending.wait_taken(timeout_s)

    def send_control(self, **parts: object) -> None:
        """Queue one frame of control parts."""
        self.send((control(pb.WorkerFrame(**parts)),))  # type: ignore[arg-type]

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Wait for the next event; ``None`` if there is none within ``timeout_s``."""
        try:
            event = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, _LARGE):
            self._room.release()
        return event

    @property
    def carried(self) -> Carried:
        """What has gone through until now, or until the connection's end."""
        until = self._ended or time.monotonic()
        return Carried(self._sending.sent_bytes, self._received_bytes, until - self._opened)

    def agree(self, settings: RunSettings) -> None:
        """Go by the run's own intervals, limits and sizes."""
        self._heartbeat = settings.heartbeat
        self._peer_timeout = settings.peer_timeout
        self._sending.keep_pace(Pace(settings.chunk_bytes, is_careful=self._is_careful))
        self._hurry.set()

    def close(self, *, drain_s: float = 0.0) -> None:
        """End the stream, after up to ``drain_s`` seconds for what is queued to be sent."""
        self._sending.put(None)
        if drain_s:
            self._threads[0].join(drain_s)
        self._closed.set()
        self._room.release()
        self._sending.stop()
        self._hurry.set()
        self._call.cancel()
        self._channel.close()
        for thread in self._threads:
            thread.join()

    def _kept(self, messages: Iterable[bytes], capture: Capture) -> Iterator[bytes]:
        for message in messages:
            try:
                capture.write(message)
            except StorageError as error:
                # It does not leave then.
                self._inbox.put(Broken(error))
                return
            yield message

    def _receive(self) -> None:
        try:
            for data in self._call:
                self._heard = time.monotonic()
                self._received_bytes += len(data)
                chunk = lone_chunk_of_server(data)
                if chunk is not None:
                    self.assembler.add(chunk)
                elif self._handle(parse_server_frame(data)):
                    return
            self._inbox.put(Ended("the server closed the stream"))
        except grpc.RpcError as error:
            self._inbox.put(Ended(self._silence or self._described(error)))
        except ProtocolError as error:
            self._inbox.put(Ended(words(f"the server broke the protocol: {error}", MOST_OF_REASON)))
        except Exception as error:  # noqa: BLE001  # who waits for the next event must hear that none will come
            self._inbox.put(Broken(error))
        finally:
            self._ended = time.monotonic()
            # Or gRPC's thread would wait for answers for ever.
            self._sending.stop()

    def _handle(self, frame: pb.ServerFrame) -> bool:
        """Turn a frame into events; whether it was the last."""
        if frame.HasField("welcome"):
            self._put(frame.welcome)
        if frame.HasField("roster"):
            self._put(frame.roster)
        committed = self.assembler.feed(frame)
        if committed is not None:
            if committed.step.kind is not Kind.MODEL:
                self._sending.all_arrived()
            self._put(committed)
        for message in frame.acks:
            self._inbox.put(ack_of(message))
        if frame.heartbeat.reply_wanted:
            self._sending.reply()
        if frame.heartbeat.is_reply:
            self._sending.answered()
        if frame.HasField("goodbye"):
            status = member(GoodbyeStatus, frame.goodbye.status, "status of a goodbye")
            self._inbox.put(Ended(words(frame.goodbye.reason, MOST_OF_REASON), status, frame.goodbye.run_id))
            return True
        return False

    def _put(self, event: pb.Welcome | pb.Roster | CommittedStep) -> None:
        """What may be large, once there is room: a server that sends on and on fills no memory."""
        self._room.acquire()
        if self._closed.is_set():
            # Nobody takes it; what still comes must not wait for room.
            self._room.release()
        self._inbox.put(event)

    def _described(self, error: grpc.RpcError) -> str:
        code = error.code() if isinstance(error, grpc.Call) else None
        name = code.name.lower().replace("_", " ") if code else "error"
        details = words(str(error.details() if isinstance(error, grpc.Call) else error), MOST_OF_REASON)
        LOG.debug("gRPC says: %s: %s", name, details)
        reason = plain_reason(name, details, self._address, self._files)
        if reason == CUT and not self._received_bytes and not self._closed.is_set():
            return why_closed(self._address, self._files, use_proxy=self._use_proxy) or reason
        if UNTRUSTED in reason:
            return why_untrusted(self._address, self._files, use_proxy=self._use_proxy) or reason
        return reason

    def _beat(self) -> None:
        while True:
            self._hurry.wait(self._heartbeat)
            self._hurry.clear()
            if self._closed.is_set():
                return
            self.send_control(heartbeat=pb.Heartbeat())
            silence = time.monotonic() - self._heard
            if silence > self._peer_timeout:
                self._silence = f"nothing heard from the server for {silence:.0f} s"
                self._call.cancel()


def _channel(address: Address, credentials: Credentials, *, use_proxy: bool) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [
        *channel_options(LARGEST_CHUNK_BYTES)
    ]  # the run's own is not known yet
    # Channels would otherwise share a subchannel and its growing back-off; the back-off is ours.
    options.append(("grpc.use_local_subchannel_pool", 1))
    if not use_proxy:
        options.append(("grpc.enable_http_proxy", 0))
    if credentials.authorities is None:
        return grpc.insecure_channel(str(address), options=options)
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    own = (credentials.pair.key, credentials.pair.certificate) if credentials.pair else (None, None)
    secure = grpc.ssl_channel_credentials(credentials.authorities, *own)
    return grpc.secure_channel(str(address), secure, options=options)
