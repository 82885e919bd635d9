"""A worker written by hand: it speaks frames, honestly or not."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import grpc

from afl._version import __version__
from afl.core.algorithms.afl_com import Realizations
from afl.core.randomness import SharedRandomness
from afl.tasks.initialization import build_vector, realization_digest
from afl.tasks.registry import load_task
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import METHOD, PROTOCOL
from afl.wire.settings import RunSettings

ANSWER_S = 30.0


class RawClient:
    """One session. A context manager, or :meth:`close` it.

    Args:
        port: the server's, on loopback.
        answers: whether it answers the server's questions by itself.
        credentials: for TLS; plaintext without.
        token: what it shows of itself besides.
        options: of the gRPC channel, with two underscores for a dot.
    """

    def __init__(
        self,
        port: int,
        *,
        answers: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
        **options: Any,
    ) -> None:
        self._answers = answers
        self.incarnation = os.urandom(16)
        self.status: grpc.StatusCode | None = None
        """How gRPC says that the stream ended."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[pb.ServerFrame | None] = queue.SimpleQueue()
        defaults = {
            "grpc.enable_http_proxy": 0,
            "grpc.use_local_subchannel_pool": 1,
            "grpc.max_send_message_length": -1,
            "grpc.max_receive_message_length": -1,
        }
        named = {name.replace("__", "."): value for name, value in options.items()}
        address, wanted = f"127.0.0.1:{port}", list({**defaults, **named}.items())
        self._channel = (
            grpc.insecure_channel(address, wanted)
            if credentials is None
            else grpc.secure_channel(address, credentials, wanted)
        )
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(METHOD)
        self._call = call(
            self._requests(), metadata=[("authorization", f"Bearer {token}")] if token else None
        )
        self.takes = threading.Event()
        """Clear it to take nothing more from the server, so that its writes are held up."""
        self.takes.set()
        self._reader = threading.Thread(target=self._read, name="raw client", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream, without a word."""
        self._outbox.put(None)
        self._call.cancel()
        self.takes.set()
        self._reader.join(ANSWER_S)
        self._channel.close()

    def end(self) -> None:
        """Say that nothing more is sent."""
        self._outbox.put(None)

    # Frames.

    def send(self, frame: pb.WorkerFrame | bytes | None = None, **parts: Any) -> None:
        """Send a frame, bytes that are none, or the frame of these parts."""
        if frame is None:
            frame = pb.WorkerFrame(**parts)
        self._outbox.put(frame if isinstance(frame, bytes) else frame.SerializeToString())

    def receive(self, timeout: float = ANSWER_S) -> pb.ServerFrame | None:
        """The next frame, or ``None`` at the stream's end.

        Raises:
            AssertionError: if nothing comes in time.
        """
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"the server sent nothing within {timeout:g} s") from None

    def receive_part(self, part: str, timeout: float = ANSWER_S) -> Any:
        """The next part of this name; frames without it are passed over.

        Raises:
            AssertionError: if the stream ends first, or with a goodbye that was not asked for.
        """
        while (frame := self.receive(timeout)) is not None:
            held = {descriptor.name: value for descriptor, value in frame.ListFields()}
            if part in held:
                return held[part]
            assert "goodbye" not in held, f"instead of {part!r} the server said: {held['goodbye']}"
        raise AssertionError(f"the stream ended without {part!r} ({self.status})")

    def goodbye(self, timeout: float = ANSWER_S) -> pb.Goodbye:
        """The server's goodbye; the stream must end after it."""
        message: pb.Goodbye = self.receive_part("goodbye", timeout)
        assert self.receive(timeout) is None, "a frame after the goodbye"
        return message

    def wait_for_end(self, timeout: float = ANSWER_S) -> grpc.StatusCode | None:
        """Take frames until the stream's end; its status."""
        while self.receive(timeout) is not None:
            pass
        return self.status

    # The handshake.

    def join_message(self, ids: Sequence[int], /, **changes: Any) -> pb.Join:
        """A correct Join for a process that has just started, with these fields changed."""
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "package_version": __version__,
            "incarnation": self.incarnation,
            "workers": list(ids),
        }
        return pb.Join(**{**fields, **changes})

    def ready_message(self, welcome: pb.Welcome, **changes: Any) -> pb.Ready:
        """The Ready that a correct worker answers to a Welcome, with these fields changed."""
        settings = RunSettings.of_message(welcome.settings)
        randomness = SharedRandomness(welcome.seed)
        vector = build_vector(load_task(settings.task, settings.task_options, allow_path=True), randomness)
        fields: dict[str, Any] = {
            "layout_hash": vector.layout_hash(),
            "dim": vector.dim,
            "workers": [pb.Standing(worker=entry.worker) for entry in welcome.workers],
            "realization_digest": realization_digest(
                Realizations(settings.parameters, vector.dim, randomness), settings.parameters, vector.dim
            ),
        }
        return pb.Ready(**{**fields, **changes})

    def join(self, ids: Sequence[int], /, **changes: Any) -> pb.Welcome:
        """Send a Join; the Welcome."""
        self.send(join=self.join_message(ids, **changes))
        welcome: pb.Welcome = self.receive_part("welcome")
        return welcome

    def handshake(self, workers: Sequence[int]) -> pb.Commit:
        """Join and get ready as a correct worker does; the open step's commit: a report is due."""
        self.send(ready=self.ready_message(self.join(workers)))
        while True:
            commit: pb.Commit = self.receive_part("commit")
            if commit.dual_weights:
                return commit

    def _requests(self) -> Iterator[bytes]:
        while (data := self._outbox.get()) is not None:
            yield data

    def _read(self) -> None:
        try:
            for data in self._call:
                frame = pb.ServerFrame.FromString(data)
                if self._answers and frame.heartbeat.reply_wanted:
                    self.send(heartbeat=pb.Heartbeat(is_reply=True))
                self._inbox.put(frame)
                self.takes.wait()
            self.status = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.status = error.code() if isinstance(error, grpc.Call) else None
        self._inbox.put(None)
