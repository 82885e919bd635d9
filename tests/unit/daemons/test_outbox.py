"""What is sent to a peer: in order, answers and heartbeats first, and no more than the pace allows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from afl.core.messages import NOWHERE, Encoding, Kind, Payload, PayloadHeader, Position, Role, Step
from afl.core.rounds.results import Opening
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame
from afl.wire.pace import CAREFUL_BYTES
from afl_server.federation.broadcast import Broadcast
from afl_server.federation.counters import Counters
from afl_server.federation.effects import Follow
from afl_server.network.outbox import HEARTBEAT, QUESTION, REPLY, Outbox

CHUNK = 256 * 1024
SIZE = 4 * CHUNK
DATA = np.arange(SIZE // 4, dtype="<f4").tobytes()


def broadcast() -> Broadcast:
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, SIZE // 4, SIZE // 4, SIZE)
    step = Step(Position(1, 0), Kind.TRAIN, (header,))
    opening = Opening(step, (Payload(header, (memoryview(DATA),)),), np.zeros(0), range(1))
    return Broadcast.whole(opening, NOWHERE, dual_weights=(), chunk_bytes=CHUNK)


def careful() -> Outbox:
    outbox = Outbox(Counters(), CHUNK)
    outbox.be_careful()
    return outbox


async def _everything(outbox: Outbox, *, first: tuple[int, int] | None = None) -> list[Frame]:
    """All frames of one step to a peer that answers."""
    outbox.follow(Follow(1, (0,), broadcast(), first))
    found: list[Frame] = []
    async for frame in outbox.frames():
        found.append(frame)
        if frame is QUESTION:
            outbox.answered()
        if pb.ServerFrame.FromString(frame.data).HasField("commit"):
            return found
    raise AssertionError("no commit")


def chunks_of(frames: list[Frame]) -> list[pb.Chunk]:
    return [chunk for frame in frames for chunk in pb.ServerFrame.FromString(frame.data).chunks]


@pytest.mark.parametrize("first", [None, (0, 0), (0, 100_000), (0, SIZE - 64), (0, SIZE)])
def test_a_step_or_the_rest_of_it(first: tuple[int, int] | None) -> None:
    frames = asyncio.run(_everything(careful(), first=first))
    opening = pb.ServerFrame.FromString(frames[0].data).step
    assert opening.goes_on == (first is not None)
    chunks, begin = chunks_of(frames), 0 if first is None else first[1]
    assert b"".join(chunk.data for chunk in chunks) == DATA[begin:]
    assert all(len(chunk.data) <= CHUNK for chunk in chunks)
    if chunks:
        assert chunks[0].offset == begin
        assert len(chunks[0].data) <= CAREFUL_BYTES


def test_a_first_connection_is_sent_whole_chunks() -> None:
    frames = asyncio.run(_everything(Outbox(Counters(), CHUNK)))
    assert [len(chunk.data) for chunk in chunks_of(frames)] == [CHUNK] * 4


def test_while_an_answer_is_waited_for_replies_and_heartbeats_go() -> None:
    async def talk() -> list[Frame]:
        outbox = careful()
        outbox.follow(Follow(1, (0,), broadcast()))
        frames, said = outbox.frames(), []
        while (frame := await anext(frames)) is not QUESTION:
            pass
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.beat()
        said.append(await waiting)
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        outbox.reply()
        said.append(await waiting)
        outbox.answered()
        said.append(await anext(frames))
        await frames.aclose()
        return [*said, frame]

    beat, reply, piece, _ = asyncio.run(talk())
    assert (beat, reply) == (HEARTBEAT, REPLY)
    assert chunks_of([piece])


def test_who_asks_again_and_again_and_takes_nothing_has_too_much_waiting() -> None:
    outbox = Outbox(Counters(), CHUNK)
    for _ in range(1024):
        outbox.reply()
    assert not outbox.is_full
    outbox.reply()
    assert outbox.is_full


@pytest.mark.parametrize("is_following", [False, True])
def test_what_is_asked_while_a_frame_is_written_is_answered_at_once(is_following: bool) -> None:
    """Neither queue nor step has anything more: only the question is there to go on with."""

    async def talk() -> Frame:
        outbox = Outbox(Counters(), CHUNK)
        if is_following:
            growing = Broadcast(broadcast().step, NOWHERE, range(1))
            outbox.follow(Follow(1, (0,), growing))
        else:
            outbox.beat()
        frames = outbox.frames()
        await anext(frames)
        outbox.reply()
        reply = await asyncio.wait_for(anext(frames), 10)
        outbox.reply()
        again = await asyncio.wait_for(anext(frames), 10)
        assert again is REPLY
        await frames.aclose()
        return reply

    assert asyncio.run(talk()) is REPLY
