"""Bytes that are counted without frames are those of the frames that workers and servers make."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.core.messages import (
    EVALUATION_PHASE,
    NOWHERE,
    Encoding,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
    Role,
    Step,
    ValueType,
)
from afl.core.rounds.results import Opening
from afl.wire.accounting import FrameContent, Traffic, WireCount
from afl.wire.frames import (
    JOIN_BELOW_BYTES,
    Frame,
    commit_frame,
    report_frames,
    traffic_of_kind,
)
from afl_lab.simulation.meter import Cost, report_costs, step_costs
from afl_server.federation.broadcast import Broadcast
from afl_server.federation.counters import Counters
from afl_server.federation.effects import Follow
from afl_server.federation.events import FrameCame
from afl_server.network.conversation import Conversation
from afl_server.network.outbox import QUESTION, Outbox

CHUNKS = st.sampled_from([4, 8, 52, 400, 4096, 1 << 20])
SIZES = st.one_of(
    st.integers(1, 700), st.sampled_from([JOIN_BELOW_BYTES // 4 + more for more in (-30, -1, 0, 1, 900)])
)
ROUNDS = st.one_of(st.integers(1, 1 << 31), st.sampled_from([127, 128, 16383, 16384]))
WORKERS = st.one_of(st.integers(0, 300), st.integers(0, 65535))
LOSSES = st.one_of(st.just(0.0), st.just(-0.0), st.floats(allow_nan=False, allow_infinity=False))


def payload_of(header: PayloadHeader) -> Payload:
    sizes = (header.index_bytes, header.value_bytes)
    return Payload(header, tuple(memoryview(bytes(size)) for size in sizes if size))


@st.composite
def dense(draw: st.DrawFn, roles: tuple[Role, ...] = (Role.UPDATE, Role.ITERATE, Role.SNAPSHOT)) -> Payload:
    count = draw(SIZES)
    role = draw(st.sampled_from(roles))
    encoding = draw(st.sampled_from([Encoding.DENSE, Encoding.SEEDED]))
    return payload_of(PayloadHeader(role, encoding, 3 * count, count, 4 * count))


@st.composite
def indexed(draw: st.DrawFn) -> Payload:
    count = draw(SIZES)
    return payload_of(
        PayloadHeader(
            Role.UPDATE,
            Encoding.INDEXED,
            9 * count,
            count,
            4 * count,
            index_coding=draw(st.integers(1, 3)),
            index_parameter=draw(st.integers(0, 20)),
            index_bytes=draw(st.integers(1, 2 * count)),
        )
    )


UPLINKS = st.one_of(st.lists(dense(), max_size=3), indexed().map(lambda payload: [payload]))


def chunk_bytes_for(payloads: list[Payload], drawn: int) -> int:
    """Not so small that a payload would take thousands of chunks."""
    return max(drawn, sum(payload.header.total_bytes for payload in payloads) // 400 // 4 * 4)


def counted_by_the_server(report: Report, kind: Kind, payloads: list[Payload], chunk_bytes: int) -> WireCount:
    """As the server counts what comes in."""
    count, conversation = WireCount(), Conversation(1, Outbox(Counters(), chunk_bytes))
    for frame in report_frames(report, kind, payloads, chunk_bytes):
        for event in conversation.events_of(frame.data):
            if isinstance(event, FrameCame):
                count.add(event.size, replace(event.content, traffic=traffic_of_kind(kind)))
    return count


def totals(costs: list[Cost]) -> WireCount:
    count = WireCount()
    for length, content in costs:
        count.add(length, content)
    return count


@given(
    payloads=UPLINKS,
    drawn=CHUNKS,
    worker=WORKERS,
    round_=ROUNDS,
    kind=st.sampled_from([Kind.TRAIN, Kind.LOSS]),
    loss=LOSSES,
    examples=st.integers(1, 1 << 40),
    weight=st.sampled_from([0.0, 1.0, 4800.0]),
)
def test_a_report_of_training(
    payloads: list[Payload],
    drawn: int,
    worker: int,
    round_: int,
    kind: Kind,
    loss: float,
    examples: int,
    weight: float,
) -> None:
    headers = tuple(payload.header for payload in payloads)
    report = Report(worker, Position(round_, int(kind is Kind.LOSS)), loss, examples, headers, weight=weight)
    chunk_bytes = chunk_bytes_for(payloads, drawn)
    costs = list(report_costs(report, kind, chunk_bytes))
    made = list(report_frames(report, kind, payloads, chunk_bytes))
    assert [cost.length for cost in costs] == [len(frame.data) for frame in made]
    assert totals(costs) == counted_by_the_server(report, kind, payloads, chunk_bytes)


@given(
    worker=WORKERS,
    round_=ROUNDS,
    metrics=st.dictionaries(st.text(max_size=9), LOSSES, max_size=5),
    digest=st.sampled_from([b"", b"0123456789abcdef"]),
    loss=LOSSES,
)
@settings(deadline=None)
def test_a_report_of_an_evaluation(
    worker: int, round_: int, metrics: dict[str, float], digest: bytes, loss: float
) -> None:
    report = Report(worker, Position(round_, EVALUATION_PHASE), loss, 7, (), metrics, digest)
    costs = list(report_costs(report, Kind.EVALUATE, 4096))
    (made,) = report_frames(report, Kind.EVALUATE, [], 4096)
    assert [cost.length for cost in costs] == [len(made.data)]
    assert totals(costs) == counted_by_the_server(report, Kind.EVALUATE, [], 4096)


def sent_by_the_server(
    step: Step, payloads: list[Payload], chunk_bytes: int, worker: int, weights: list[float]
) -> WireCount:
    """As a session of one worker follows a broadcast."""
    outbox = Outbox(Counters(), chunk_bytes)
    opening = Opening(step, tuple(payloads), np.array(weights), range(worker + 1))
    broadcast = Broadcast.whole(opening, NOWHERE, dual_weights=weights, chunk_bytes=chunk_bytes)
    goodbye = Frame(b"", FrameContent(Traffic.CONTROL))

    async def follow() -> WireCount:
        outbox.follow(Follow(1, (worker,), broadcast))
        outbox.put(goodbye)
        count = WireCount()
        async for frame in outbox.frames():
            if frame is goodbye:
                break
            if frame is QUESTION:
                outbox.answered()
                continue
            count.add(len(frame.data), frame.content)
        return count

    return asyncio.run(follow())


MODELS = st.lists(dense((Role.MODEL,)), min_size=1, max_size=1).flatmap(
    lambda model: st.sampled_from(
        [
            model,
            [
                *model,
                payload_of(PayloadHeader(Role.FROZEN, Encoding.DENSE, 13, 13, 13, ValueType.BYTES)),
            ],
        ]
    )
)


@given(
    payloads=st.one_of(st.just([]), UPLINKS, MODELS),
    drawn=CHUNKS,
    worker=st.integers(0, 40),
    round_=ROUNDS,
    kind=st.sampled_from(Kind),
    weight=st.one_of(st.none(), st.floats(0, 1)),
)
def test_a_step_for_a_session(
    payloads: list[Payload], drawn: int, worker: int, round_: int, kind: Kind, weight: float | None
) -> None:
    step = Step(Position(round_, 0), kind, tuple(payload.header for payload in payloads))
    chunk_bytes = chunk_bytes_for(payloads, drawn)
    weights = [] if weight is None else [*np.linspace(0, 1, worker).tolist(), weight]
    commit = commit_frame(step.position, kind, weights[worker:])
    costs = step_costs(step, commit, chunk_bytes)
    assert totals(costs) == sent_by_the_server(step, payloads, chunk_bytes, worker, weights)


def test_a_dense_report_by_hand() -> None:
    """One frame: worker 3 (2 bytes), position (2 + 2), loss (9), examples (2), a payload, and a chunk."""
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, 25, 25, 100)
    report = Report(3, Position(9, 0), 0.5, 64, (header,))
    (cost,) = report_costs(report, Kind.TRAIN, 4096)
    # role, encoding, value type, dim, count, value bytes: a tag and a byte each; then a tag and a length.
    payload = 6 * 2 + 2
    # position: round 9 is a tag and a byte, phase 0 nothing; a tag and a length around it.
    opening = 2 + (2 + 2) + 9 + 2 + payload
    # worker, data's tag and length, the data, and a tag and a two-byte length around it where it needs one.
    chunk = 2 + 2 + 100
    assert cost.length == (2 + opening) + (2 + chunk)
    assert (cost.content.values, cost.content.indices, cost.content.scalars) == (100, 0, 8)


@pytest.mark.parametrize("rounds", [(1, 127), (128, 16383), (16384, 20000)])
def test_alike_reports_are_as_long_in_all_rounds(rounds: tuple[int, int]) -> None:
    costs = {
        report_costs(Report(1, Position(round_, 0), loss, 2), Kind.TRAIN, 4096)[0]
        for round_ in rounds
        for loss in (0.25, -7e300)
    }
    assert len(costs) == 1
