"""A worker's connection, to a server in this process that sends what a test wants it to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from afl.config.address import Address
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import SERVICE
from afl.wire.settings import LARGEST_CHUNK_BYTES
from afl_worker.network import connection
from afl_worker.network.connection import MOST_WAITING, Broken, Connection, Ended
from afl_worker.network.credentials import CredentialFiles

ANSWER_S = 30.0


@contextmanager
def serving(*frames: bytes) -> Iterator[Address]:
    """A server that sends these frames to whoever comes, and then ends the stream."""
    handler = grpc.stream_stream_rpc_method_handler(lambda _requests, _context: iter(frames))
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        server.stop(0).wait(ANSWER_S)


@contextmanager
def connected(address: Address) -> Iterator[Connection]:
    stream = Connection(address, CredentialFiles())
    try:
        yield stream
    finally:
        stream.close()


def test_events_come_in_order_and_then_that_the_stream_has_ended() -> None:
    with (
        serving(pb.ServerFrame(welcome=pb.Welcome(run_id="run-1")).SerializeToString()) as address,
        connected(address) as stream,
    ):
        assert stream.next_event(ANSWER_S) == pb.Welcome(run_id="run-1")
        assert stream.next_event(ANSWER_S) == Ended("the server closed the stream")


def test_the_largest_chunk_that_any_server_may_send_is_taken() -> None:
    chunk = pb.Chunk(data=bytes(LARGEST_CHUNK_BYTES))
    welcome = pb.ServerFrame(welcome=pb.Welcome(run_id="run-2"), chunks=[chunk]).SerializeToString()
    with serving(welcome) as address, connected(address) as stream:
        assert stream.next_event(ANSWER_S) == pb.Welcome(run_id="run-2")


def test_bytes_that_are_no_frame_end_the_connection() -> None:
    with serving(b"\xff") as address, connected(address) as stream:
        ended = stream.next_event(ANSWER_S)
        assert isinstance(ended, Ended)
        assert ended.reason == "the server broke the protocol: a frame of 1 bytes that cannot be parsed"


def test_a_receiving_thread_that_fails_says_that_nothing_more_will_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = RuntimeError("out of luck")

    def fails(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(connection, "lone_chunk_of_server", fails)
    with serving(b"frame") as address, connected(address) as stream:
        assert stream.next_event(ANSWER_S) == Broken(fault)


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_server_that_sends_on_and_on_fills_no_memory(*, takes_all: bool) -> None:
    frames = [
        pb.ServerFrame(welcome=pb.Welcome(run_id=f"run-{number}", seed=bytes(1 << 20))).SerializeToString()
        for number in range(4 * MOST_WAITING)
    ]
    with serving(*frames) as address, connected(address) as stream:
        most = sum(map(len, frames[: MOST_WAITING + 1]))
        deadline = time.monotonic() + ANSWER_S
        while stream.carried.received < most and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        assert stream.carried.received == most
        for number in range(len(frames) if takes_all else 0):
            event = stream.next_event(ANSWER_S)
            assert isinstance(event, pb.Welcome)
            assert event.run_id == f"run-{number}"
        if takes_all:
            assert stream.next_event(ANSWER_S) == Ended("the server closed the stream")
