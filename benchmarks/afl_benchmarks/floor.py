"""The floor: the same bytes through plain gRPC streams between as many processes, with a barrier a round.

Nothing is parsed, summed or applied: each client sends its bytes in messages of at most one chunk, the
server waits for all clients, then sends as many bytes back to each.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio

METHOD = "/floor/Exchange"
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
]


def sizes(total: int, chunk: int) -> list[int]:
    """Message sizes that add up to ``total``."""
    whole, rest = divmod(total, chunk)
    return [chunk] * whole + ([rest] if rest else [])


def measure(*, clients: int, up: int, down: int, chunk: int, rounds: int) -> list[float]:
    """Seconds of each round but the first few."""
    return asyncio.run(_serve(clients=clients, up=up, down=down, chunk=chunk, rounds=rounds))


async def _serve(*, clients: int, up: int, down: int, chunk: int, rounds: int) -> list[float]:
    ends: list[float] = []
    arrived = 0
    barrier = asyncio.Event()
    replies = [bytes(size) for size in sizes(down, chunk)]
    expected = len(sizes(up, chunk))

    async def exchange(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        nonlocal arrived, barrier
        for index in range(rounds + 1):
            for _ in range(expected if index else 1):
                await context.read()
            arrived += 1
            mine = barrier
            if arrived == clients:
                arrived, barrier = 0, asyncio.Event()
                ends.append(time.perf_counter())
                mine.set()
            else:
                await mine.wait()
            for reply in replies if index else [b"go"]:
                await context.write(reply)

    server = grpc.aio.server(options=_OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(exchange)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", {"Exchange": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arguments = [port, up, down, chunk, rounds]
    command = [sys.executable, "-m", "afl_benchmarks.floor", *map(str, arguments)]
    processes = [await asyncio.create_subprocess_exec(*command) for _ in range(clients)]
    codes = await asyncio.gather(*(process.wait() for process in processes))
    await server.stop(0)
    if any(codes):
        raise RuntimeError(f"a client of the floor measurement failed: {codes}")
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends[1:])]
    return gaps[len(gaps) // 10 :]


def _client(port: int, up: int, down: int, chunk: int, rounds: int) -> None:
    outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def requests() -> Iterator[bytes]:
        while (item := outbox.get()) is not None:
            yield item

    messages = [bytes(size) for size in sizes(up, chunk)]
    expected = len(sizes(down, chunk))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = method(requests())
        outbox.put(b"hello")
        next(call)
        for _ in range(rounds):
            for message in messages:
                outbox.put(message)
            for _ in range(expected):
                next(call)
        outbox.put(None)
        for _ in call:
            raise RuntimeError("more than was expected")


if __name__ == "__main__":
    _client(*map(int, sys.argv[1:]))
