"""What frames would carry, to the byte, without making them: for simulation.

Chunks are measured, not copied; every other part is small and serialized, once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from afl.core.messages import Kind, Payload, PayloadHeader, Position, Report, Step
from afl.v1 import federation_pb2 as pb
from afl.wire.accounting import FrameContent
from afl.wire.frames import (
    JOIN_BELOW_BYTES,
    Frame,
    chunk_content,
    chunk_head,
    is_sent,
    joined_content,
    report_frame,
    step_frame,
    traffic_of_kind,
)


class Cost(NamedTuple):
    """A frame's length in bytes (without gRPC's prefix), and what it holds."""

    length: int
    content: FrameContent


Lengths = tuple[tuple[int, ...], ...]
"""Of each payload's sections, in bytes."""


def lengths_of(payloads: Sequence[Payload]) -> Lengths:
    """What is to be known of payloads; their headers are in the step or report that they belong to."""
    return tuple(tuple(len(section) for section in payload.sections) for payload in payloads)


def report_costs(report: Report, kind: Kind, lengths: Lengths, chunk_bytes: int) -> Sequence[Cost]:
    """The frames of a report, as the server counts them."""
    if report.metrics or report.model_digest or report.missing:
        return _report_costs(report, kind, lengths, chunk_bytes)
    return _alike_costs(
        _widest(report.worker),
        Position(_widest(report.position.round), report.position.phase),
        report.examples,
        report.payloads,
        kind=kind,
        lengths=lengths,
        chunk_bytes=chunk_bytes,
        has_loss=is_sent(report.loss),
        has_weight=is_sent(report.weight),
    )


@lru_cache(maxsize=256)
def _alike_costs(
    worker: int,
    position: Position,
    examples: int,
    headers: tuple[PayloadHeader, ...],
    *,
    kind: Kind,
    lengths: Lengths,
    chunk_bytes: int,
    has_loss: bool,
    has_weight: bool,
) -> Sequence[Cost]:
    """The frames of a report whose numbers take as many bytes: a double eight, or none for zero."""
    report = Report(worker, position, float(has_loss), examples, headers, weight=float(has_weight))
    return _report_costs(report, kind, lengths, chunk_bytes)


def _widest(number: int) -> int:
    """The largest number that takes as many bytes in protobuf, seven bits each; 0 takes none."""
    return (1 << -(-number.bit_length() // 7) * 7) - 1


def _report_costs(report: Report, kind: Kind, lengths: Lengths, chunk_bytes: int) -> Sequence[Cost]:
    # The server tells what a worker's frame is for by the step that is open.
    traffic = traffic_of_kind(kind)
    chunks = _chunks(report.payloads, lengths, chunk_bytes, sender=pb.WorkerFrame, worker=report.worker)
    costs = [_of(report_frame(report, kind))]
    costs += [Cost(length, replace(content, traffic=traffic)) for length, content in chunks]
    small = sum(header.total_bytes for header in report.payloads) < JOIN_BELOW_BYTES
    return [_joined(costs)] if small else costs


def step_costs(step: Step, lengths: Lengths, chunk_bytes: int) -> list[Cost]:
    """The frames of a step that are the same for all sessions: all but the commit."""
    costs = [_of(step_frame(step)), *_chunks(step.payloads, lengths, chunk_bytes, sender=pb.ServerFrame)]
    return [_joined(costs)] if sum(cost.length for cost in costs) < JOIN_BELOW_BYTES else costs


def session_costs(shared: Sequence[Cost], commit: Frame) -> list[Cost]:
    """The frames of a step for one session: the shared ones and its commit."""
    *before, last = shared
    if last.length < JOIN_BELOW_BYTES:
        return [*before, _joined([last, _of(commit)])]
    return [*shared, _of(commit)]


def _chunks(
    headers: Sequence[PayloadHeader],
    lengths: Lengths,
    chunk_bytes: int,
    *,
    sender: type[pb.ServerFrame | pb.WorkerFrame],
    worker: int = 0,
) -> Iterator[Cost]:
    for index, (header, sections) in enumerate(zip(headers, lengths, strict=True)):
        offset = 0
        for section in sections:
            for start in range(0, section, chunk_bytes):
                size = min(chunk_bytes, section - start)
                head = chunk_head(sender, offset, size, worker=worker, index=index)
                yield Cost(len(head) + size, chunk_content(header, offset, size))
                offset += size


def _of(frame: Frame) -> Cost:
    return Cost(len(frame.data), frame.content)


def _joined(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.length for cost in costs), joined_content([cost.content for cost in costs]))
