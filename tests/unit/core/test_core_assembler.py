"""Steps from their parts: whole or not at all, and never more memory than the model allows."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Sequence

import pytest

from afl.core.messages import CommittedStep, Encoding, Kind, Payload, PayloadHeader, Position, Role, Step
from afl.errors import ProtocolError
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import StepAssembler
from afl.wire.fast_chunk import lone_chunk_of_server
from afl.wire.frames import (
    chunk_frame,
    chunk_frames,
    commit_frame,
    joined,
    parse_server_frame,
    step_frame,
)

DATA = bytes(range(40))
HEADER = PayloadHeader(Role.UPDATE, Encoding.DENSE, 10, 10, 40)
WORKERS = (2, 7)
FIRST, SECOND = Position(1, 0), Position(2, 0)


def assembler(largest: int = 1000) -> StepAssembler:
    return StepAssembler(WORKERS, largest)


def feed(to: StepAssembler, *frames: object) -> CommittedStep | None:
    result = None
    for frame in frames:
        result = to.feed(parse_server_frame(frame.data))  # type: ignore[attr-defined]
    return result


def opening(
    position: Position = FIRST, headers: Sequence[PayloadHeader] = (HEADER,), *, goes_on: bool = False
) -> object:
    return step_frame(Step(position, Kind.TRAIN, tuple(headers)), goes_on=goes_on)


def chunk(offset: int, data: bytes, index: int = 0) -> object:
    return chunk_frame(pb.ServerFrame, HEADER, offset, memoryview(data), index=index)


def commit(position: Position = FIRST, weights: Sequence[float] = (0.25, 0.5)) -> object:
    return commit_frame(position, Kind.TRAIN, weights)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 39, 40, 100])
def test_a_step_is_there_once_its_commit_has_come(chunk_bytes: int) -> None:
    collected = assembler()
    chunks = list(chunk_frames(pb.ServerFrame, Payload(HEADER, (memoryview(DATA),)), chunk_bytes))
    assert feed(collected, opening(), *chunks) is None
    step = feed(collected, commit())
    assert step is not None
    assert step.step == Step(FIRST, Kind.TRAIN, (HEADER,))
    assert [bytes(data) for data in step.payloads] == [DATA]
    assert step.dual_weights == {2: 0.25, 7: 0.5}


def test_a_step_may_come_in_one_frame() -> None:
    chunks = list(chunk_frames(pb.ServerFrame, Payload(HEADER, (memoryview(DATA),)), 16))
    step = feed(assembler(), joined([opening(), *chunks, commit()]))  # type: ignore[list-item]
    assert step is not None
    assert bytes(step.payloads[0]) == DATA


def test_chunks_read_without_protobuf_serve_as_well() -> None:
    collected = assembler()
    feed(collected, opening())
    for frame in chunk_frames(pb.ServerFrame, Payload(HEADER, (memoryview(DATA),)), 16):
        view = lone_chunk_of_server(frame.data)
        assert view is not None
        collected.add(view)
    step = feed(collected, commit())
    assert step is not None
    assert bytes(step.payloads[0]) == DATA


def test_payloads_may_come_in_turns() -> None:
    other = PayloadHeader(Role.FROZEN, Encoding.DENSE, 3, 3, 3)
    step = feed(
        assembler(),
        opening(headers=(HEADER, other)),
        chunk(0, DATA[:10]),
        chunk(0, b"ab", index=1),
        chunk(10, DATA[10:]),
        chunk(2, b"c", index=1),
        commit(),
    )
    assert step is not None
    assert [bytes(data) for data in step.payloads] == [DATA, b"abc"]


def test_a_step_cut_in_the_middle_was_never_there() -> None:
    collected = assembler()
    feed(collected, opening(), chunk(0, b"x" * 24))
    assert feed(collected, opening(SECOND), chunk(0, DATA[:8]), chunk(8, DATA[8:])) is None
    with pytest.raises(ProtocolError, match="a commit that belongs to no step"):
        feed(collected, commit(FIRST))
    step = feed(collected, commit(SECOND))
    assert step is not None
    assert step.step.position == SECOND
    assert bytes(step.payloads[0]) == DATA


def test_a_recycled_buffer_never_shows_through() -> None:
    collected = assembler()
    for position, fill in ((Position(t, 0), bytes([t]) * 40) for t in range(1, 8)):
        step = feed(collected, opening(position), chunk(0, fill[:20]), chunk(20, fill[20:]), commit(position))
        assert step is not None
        assert bytes(step.payloads[0]) == fill
        # A step that is not recycled keeps its own memory.
        if position.round % 2:
            collected.recycle(step)
    kept = feed(collected, opening(), chunk(0, b"k" * 4), chunk(4, b"k" * 36), commit())
    feed(collected, opening(SECOND), chunk(0, b"n" * 4), chunk(4, b"n" * 36), commit(SECOND))
    assert kept is not None
    assert bytes(kept.payloads[0]) == b"k" * 40


def test_a_recycled_buffer_serves_the_next_step_of_its_size() -> None:
    collected = assembler()
    first = feed(collected, opening(), chunk(0, DATA[:20]), chunk(20, DATA[20:]), commit())
    assert first is not None
    buffer = first.payloads[0].obj
    collected.recycle(first)
    second = feed(collected, opening(SECOND), chunk(0, DATA[:8]), chunk(8, DATA[8:]), commit(SECOND))
    assert second is not None
    assert second.payloads[0].obj is buffer


def test_a_step_without_payload_needs_no_chunk() -> None:
    step = feed(assembler(), opening(headers=()), commit())
    assert step is not None
    assert step.payloads == ()


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([commit()], "a commit that belongs to no step"),
        ([chunk(0, DATA)], "a chunk that belongs to no step"),
        ([opening(), chunk(0, DATA, index=1)], "a chunk that belongs to no step"),
        ([opening(), commit()], "a commit after 0 of 40 payload bytes"),
        ([opening(), chunk(0, DATA[:39]), commit()], "a commit after 39 of 40 payload bytes"),
        ([opening(), chunk(0, DATA), commit(SECOND)], "a commit that belongs to no step"),
        ([opening(), chunk(4, DATA[4:])], "a chunk of 36 bytes at byte 4; byte 0 of 40 comes next"),
        (
            [opening(), chunk(0, DATA[:8]), chunk(0, DATA[:8])],
            "a chunk of 8 bytes at byte 0; byte 8 of 40 comes next",
        ),
        ([opening(), chunk(0, DATA + b"x")], "a chunk of 41 bytes at byte 0; byte 0 of 40 comes next"),
        (
            [opening(), chunk(0, DATA), chunk(40, b"x")],
            "a chunk of 1 bytes at byte 40; byte 40 of 40 comes next",
        ),
        (
            [opening(), chunk(0, DATA), chunk(40, b"")],
            "a chunk of 0 bytes at byte 40; byte 40 of 40 comes next",
        ),
        ([opening(), chunk(0, b"")], "a chunk of 0 bytes at byte 0; byte 0 of 40 comes next"),
        ([opening(), chunk(2**64 - 1, b"x")], f"at byte {2**64 - 1}; byte 0 of 40 comes next"),
        ([opening(), chunk(0, DATA), commit(weights=[1.0])], "1 dual weights for 2 workers"),
        ([opening(), chunk(0, DATA), commit(weights=[0.5] * 3)], "3 dual weights for 2 workers"),
        *[
            ([opening(), chunk(0, DATA), commit(weights=[0.5, weight])], "a dual weight outside [0, 1]")
            for weight in (-1e-9, 1.0000001, float("nan"), float("inf"))
        ],
    ],
)
def test_parts_that_do_not_fit_are_refused(frames: list[object], message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        feed(assembler(), *frames)
    assert message in str(caught.value)


def test_a_commit_counts_once() -> None:
    collected = assembler()
    assert feed(collected, opening(), chunk(0, DATA), commit()) is not None
    with pytest.raises(ProtocolError, match="a commit that belongs to no step"):
        feed(collected, commit())


@pytest.mark.parametrize("weights", [[0.0, 1.0], [1.0, 0.0], [5e-324, 1.0]])
def test_weights_on_the_edge_are_weights(weights: list[float]) -> None:
    step = feed(assembler(), opening(), chunk(0, DATA), commit(weights=weights))
    assert step is not None
    assert [*step.dual_weights.values()] == weights


@pytest.mark.parametrize(
    "headers",
    [
        [PayloadHeader(Role.UPDATE, Encoding.DENSE, 1 << 40, 1 << 40, 1 << 42)],
        [PayloadHeader(Role.UPDATE, Encoding.INDEXED, 10, 10, 40, index_bytes=2**64 - 1)],
        [PayloadHeader(Role.MODEL, Encoding.DENSE, 100, 100, 60 << 20)] * 2,
    ],
)
def test_a_step_larger_than_the_model_allows_is_refused_before_memory_is_taken(
    headers: list[PayloadHeader],
) -> None:
    collected = assembler(largest=100 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"{100 << 20} are the most for this model"):
            feed(collected, opening(headers=headers))
        with pytest.raises(ProtocolError, match="a chunk that belongs to no step"):
            feed(collected, chunk(0, b"x"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Steps that are cut.


@pytest.mark.parametrize("cut_at", [1, 16, 39, 40])
def test_a_step_that_was_cut_goes_on_in_another_session(cut_at: int) -> None:
    collected = assembler()
    assert collected.partial() is None
    feed(collected, opening(), chunk(0, DATA[:cut_at]))
    partial = collected.partial()
    assert partial is not None
    assert (partial.payload, partial.offset) == (0, cut_at)
    assert partial.digest == hashlib.blake2b(DATA[:cut_at], digest_size=16).digest()
    assert (partial.position.round, partial.kind) == (1, pb.KIND_TRAIN)
    feed(collected, opening(goes_on=True))
    if cut_at < len(DATA):
        feed(collected, chunk(cut_at, DATA[cut_at:]))
    step = feed(collected, commit())
    assert step is not None
    assert bytes(step.payloads[0]) == DATA
    assert collected.partial() is None


def test_a_step_that_begins_again_has_nothing_of_what_came_before() -> None:
    collected = assembler()
    feed(collected, opening(), chunk(0, b"x" * 16), opening())
    step = feed(collected, chunk(0, DATA), commit())
    assert step is not None
    assert bytes(step.payloads[0]) == DATA


def test_only_the_step_that_was_cut_can_go_on() -> None:
    collected = assembler()
    with pytest.raises(ProtocolError, match="a step that goes on, of which no beginning has come"):
        feed(collected, opening(goes_on=True))
    feed(collected, opening(), chunk(0, DATA[:16]))
    with pytest.raises(ProtocolError, match="a step that goes on, of which no beginning has come"):
        feed(collected, opening(SECOND, goes_on=True))


def test_of_several_payloads_the_one_that_is_incomplete_goes_on() -> None:
    collected = assembler()
    feed(collected, opening(headers=(HEADER, HEADER)), chunk(0, DATA), chunk(0, DATA[:8], index=1))
    partial = collected.partial()
    assert partial is not None
    assert (partial.payload, partial.offset) == (1, 8)
    assert partial.digest == hashlib.blake2b(DATA + DATA[:8], digest_size=16).digest()
