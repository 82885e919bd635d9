"""What frames would carry, to the byte, without making them: for simulation.

Chunks are measured, not copied; every other part is small and serialized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from afl.messages import Kind, Payload, Report, Step
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent
from afl.wire.frames import (
    JOIN_BELOW_BYTES,
    Frame,
    chunk_content,
    chunk_head,
    joined_content,
    report_frame,
    step_frame,
    traffic_of_kind,
)


class Cost(NamedTuple):
    """A frame's length in bytes (without gRPC's prefix), and what it holds."""

    length: int
    content: FrameContent


def report_costs(report: Report, kind: Kind, payloads: Sequence[Payload], chunk_bytes: int) -> list[Cost]:
    """The frames of a report, as the server counts them."""
    costs = [_of(report_frame(report, kind))]
    for index, payload in enumerate(payloads):
        costs += _chunks(pb.WorkerFrame, payload, chunk_bytes, worker=report.worker, index=index)
    # The server tells what a worker's frame is for by the step that is open.
    traffic = traffic_of_kind(kind)
    costs = [
        Cost(length, FrameContent(traffic, content.values, content.indices, content.scalars))
        for length, content in costs
    ]
    small = sum(payload.header.total_bytes for payload in payloads) < JOIN_BELOW_BYTES
    return [_joined(costs)] if small else costs


def step_costs(step: Step, payloads: Sequence[Payload], chunk_bytes: int) -> list[Cost]:
    """The frames of a step that are the same for all sessions: all but the commit."""
    costs = [_of(step_frame(step))]
    for index, payload in enumerate(payloads):
        costs += _chunks(pb.ServerFrame, payload, chunk_bytes, worker=0, index=index)
    return [_joined(costs)] if sum(cost.length for cost in costs) < JOIN_BELOW_BYTES else costs


def session_costs(shared: Sequence[Cost], commit: Frame) -> list[Cost]:
    """The frames of a step for one session: the shared ones and its commit."""
    *before, last = shared
    if last.length < JOIN_BELOW_BYTES:
        return [*before, _joined([last, _of(commit)])]
    return [*shared, _of(commit)]


def _chunks(
    sender: type[pb.ServerFrame | pb.WorkerFrame],
    payload: Payload,
    chunk_bytes: int,
    *,
    worker: int,
    index: int,
) -> Iterator[Cost]:
    offset = 0
    for section in payload.sections:
        for start in range(0, len(section), chunk_bytes):
            size = min(chunk_bytes, len(section) - start)
            head = chunk_head(sender, offset, size, worker=worker, index=index)
            yield Cost(len(head) + size, chunk_content(payload.header, offset, size))
            offset += size


def _of(frame: Frame) -> Cost:
    return Cost(len(frame.data), frame.content)


def _joined(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.length for cost in costs), joined_content([cost.content for cost in costs]))
