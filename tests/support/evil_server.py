"""A server written by hand that drives real workers, honestly or not, and knows the other workers' secrets if
it is told them."""

from __future__ import annotations

import hashlib
import queue
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from afl.config import config_from_mapping
from afl.core.algorithms.registry import server_half
from afl.core.messages import Kind, Payload, Position
from afl.core.randomness import SharedRandomness
from afl.core.secrecy.keys import KeyOffer, statement
from afl.security.peers import PeerSigner
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import METHOD, number, position_message
from afl.wire.keys import key_offer_message
from afl.wire.settings import RunSettings
from afl_server.federation.broadcast import model_payloads
from support.identities import Pair

ANSWER_S = 90.0
RUN_ID = "evil"
FIRST = Position(1, 0)


class Peer:
    """Another worker, whose secrets are known here: its key of an epoch, and what it signs with."""

    def __init__(self, worker: int, signer: PeerSigner | None = None) -> None:
        self.worker = worker
        self.private = X25519PrivateKey.generate()
        self.signer = signer or PeerSigner.fresh()

    def offer(self, epoch: int = 1, run_id: str = RUN_ID, workers: Sequence[int] = ()) -> KeyOffer:
        """A right offer of this worker's key; or, of the same key, another's."""
        named = tuple(workers) or (self.worker,)
        public = (self.private.public_key().public_bytes_raw(),) * len(named)
        signed = self.signer.sign(statement(run_id, epoch, dict(zip(named, public, strict=True))))
        return KeyOffer(epoch, named, public, signed.signature, signed.certificates, signed.public_key)


class Session:
    """One worker process's stream."""

    def __init__(self) -> None:
        self.frames: list[pb.WorkerFrame] = []
        """All that has left the worker in it."""
        self._inbox: queue.SimpleQueue[pb.WorkerFrame | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read(self, requests: Iterator[bytes]) -> None:
        """Take what comes, until the stream's end."""
        try:
            for data in requests:
                frame = pb.WorkerFrame.FromString(data)
                self.frames.append(frame)
                self._inbox.put(frame)
        except grpc.RpcError:
            pass  # a worker that has ended
        self._inbox.put(None)
        self._outbox.put(None)

    def written(self) -> Iterator[bytes]:
        """What goes to the worker, until the stream's end."""
        while (data := self._outbox.get()) is not None:
            yield data

    def send(self, frame: pb.ServerFrame | None = None, **parts: Any) -> None:
        """Send a frame, or the frame of these parts."""
        self._outbox.put((frame or pb.ServerFrame(**parts)).SerializeToString())

    def close(self) -> None:
        """End the stream."""
        self._outbox.put(None)

    def receive_part(self, part: str) -> Any:
        """The next part of this name.

        Raises:
            AssertionError: if the stream ends first, or nothing comes in time.
        """
        return getattr(self._next(part), part)

    def report(self) -> tuple[pb.Report, list[bytes]]:
        """The next report, with the bytes of its payloads."""
        frame = self._next("reports")
        (report,) = frame.reports
        payloads = [bytearray() for _ in report.payloads]
        lengths = [header.index_bytes + header.value_bytes for header in report.payloads]
        while True:
            for chunk in frame.chunks:
                payloads[chunk.payload] += chunk.data
            if [len(payload) for payload in payloads] == lengths:
                return report, [bytes(payload) for payload in payloads]
            frame = self._next("chunks")

    def end(self) -> None:
        """Wait until the worker has ended the stream."""
        while self._inbox.get(timeout=ANSWER_S) is not None:
            pass

    def _next(self, part: str) -> pb.WorkerFrame:
        while True:
            frame = self._inbox.get(timeout=ANSWER_S)
            assert frame is not None, f"the stream ended without {part!r}: {self.frames[-1:]}"
            if any(descriptor.name == part for descriptor, _ in frame.ListFields()):
                return frame

    def left(self) -> set[str]:
        """The names of all parts that have left the worker, but for heartbeats."""
        return {field.name for frame in self.frames for field, _ in frame.ListFields()} - {"heartbeat"}


class EvilServer:
    """Listens on a free port of loopback; a context manager.

    Args:
        config: of the run that it says it is.
        pair: its certificate and key.
    """

    def __init__(self, config: Mapping[str, Any], pair: Pair) -> None:
        config = {"run": {"seed": 7}, **config}
        self.settings = RunSettings.of_config(config_from_mapping(config))
        self._randomness = SharedRandomness.from_int(7)
        self._sessions: queue.SimpleQueue[Session] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(
            self._pool, options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        name, method = METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {method: handler}),)
        )
        secure = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', secure)}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(10)
        self._pool.shutdown()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session = Session()
        readers = ThreadPoolExecutor(1)
        readers.submit(session.read, requests)
        self._sessions.put(session)
        yield from session.written()
        readers.shutdown(wait=False)
        context.cancel()

    def session(self, **welcome: Any) -> tuple[Session, pb.Ready]:
        """The next stream, once its worker is ready; ``welcome`` has what the server says in another way."""
        session = self.accepted(**welcome)
        return session, session.receive_part("ready")

    def accepted(
        self,
        *,
        open_: Position = FIRST,
        held: bool = False,
        epoch: int = 1,
        **changes: Any,
    ) -> Session:
        """The next stream, of which the worker has been welcomed."""
        session = self._sessions.get(timeout=ANSWER_S)
        join = session.receive_part("join")
        settings = self.settings.to_message()
        for name, value in changes.items():
            setattr(settings, name, value)
        session.send(
            welcome=pb.Welcome(
                run_id=RUN_ID,
                settings=settings,
                seed=b"" if join.layout_hash else self._randomness.seed,
                workers=[
                    pb.Expectation(worker=worker, position=position_message(open_), held=held)
                    for worker in join.workers
                ],
                key_epoch=epoch,
            )
        )
        return session

    # What it sends.

    def send_roster(self, session: Session, ready: pb.Ready, *offers: KeyOffer, epoch: int = 0) -> None:
        """The worker's own offer and these."""
        messages = [ready.keys, *map(key_offer_message, offers)]
        session.send(roster=pb.Roster(epoch=epoch or ready.keys.epoch, offers=messages))

    def history_of_first(self, model_digest: bytes, epoch: int = 1) -> bytes:
        """What the masks of round 1 are drawn from, with losses shown."""
        run = hashlib.sha256(self._randomness.seed + self.settings.digest()).digest()
        step = struct.pack("<QBBd", *FIRST, Kind.TRAIN, 0.0)
        begun = epoch.to_bytes(8, "big")
        return begun + hashlib.sha256(begun + run + step + model_digest).digest()

    def send_model(self, session: Session, position: Position, factor: float = 1.0) -> bytes:
        """Send a model, all of whose parameters are ``factor``; its digest."""
        task = load_task(self.settings.task, self.settings.task_options, allow_path=True)
        vector = build_vector(task, self._randomness)
        run = replace(self.settings.parameters, tensors=vector.tensors)
        half = server_half(run, vector.values, self._randomness)
        vector.values.fill_(factor)
        payloads = model_payloads(vector, vector.values, half.companions)
        self.send_step(session, position, Kind.MODEL, payloads)
        return vector.digest(*(companion.content() for companion in half.companions.values()))

    def send_step(
        self,
        session: Session,
        position: Position,
        kind: Kind = Kind.TRAIN,
        payloads: Sequence[Payload] = (),
        weights: Sequence[float] = (0.3,),
    ) -> None:
        """A step, by default one that asks for a training report without moving the model."""
        frame = pb.ServerFrame(
            step=pb.Step(
                position=position_message(position),
                kind=number(kind),
                payloads=[pb.Payload(**vars(payload.header)) for payload in payloads],
            ),
            commit=pb.Commit(position=position_message(position), dual_weights=weights),
        )
        for place, payload in enumerate(payloads):
            data = np.frombuffer(payload.data, np.uint8).tobytes()
            if data:
                frame.chunks.append(pb.Chunk(payload=place, data=data))
        session.send(frame)

    def acknowledge(self, session: Session, worker: int, position: Position) -> None:
        """The worker's report has counted."""
        session.send(acks=[pb.Ack(worker=worker, position=position_message(position), status=1)])
