"""Counts, to the byte, what a simulated run would have carried, without making the frames.

Training, evaluation and first models are counted, each worker as a process of its own. Joining, heartbeats
and goodbyes are not part of a simulation; their few bytes (kind ``control``) are zero here. Chunks are
measured by their headers; every other part is small and serialized, once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from afl.core.messages import Kind, PayloadHeader, Position, Report, Step
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.results import Opening
from afl.v1 import federation_pb2 as pb
from afl.wire import frames
from afl.wire.accounting import FrameContent
from afl.wire.frames import JOIN_BELOW_BYTES, Frame, is_sent
from afl_server.federation.broadcast import model_payloads
from afl_server.federation.counters import Counters


class WireMeter:
    """Hears of what would cross the wire, and keeps the server's counters.

    Args:
        sends_dual_weights: whether the algorithm tells each worker its dual weight.
    """

    def __init__(self, *, chunk_bytes: int, sends_dual_weights: bool) -> None:
        self.counters = Counters()
        self._chunk_bytes = chunk_bytes
        self._sends_dual_weights = sends_dual_weights

    def first_models(self, engine: RoundEngine) -> None:
        """Count the initial model, once for each worker, which is a process of its own."""
        payloads = model_payloads(engine.model, engine.worker_params, engine.algorithm.companions)
        headers = tuple(payload.header for payload in payloads)
        self._send(Step(Position(1, 0), Kind.MODEL, headers), engine.workers, ())

    def step(self, opening: Opening) -> None:
        """Count a step's opening, once for each participant."""
        weights = opening.dual_weights.tolist() if self._sends_dual_weights else ()
        self._send(opening.step, len(opening.participants), weights)

    def reports(self, kind: Kind, reports: Sequence[Report]) -> None:
        """Count the reports of a step."""
        for report in reports:
            for length, content in report_costs(report, kind, self._chunk_bytes):
                self.counters.uplink.add(length, content)
            if not kind.is_of_evaluation:
                self.counters.charge_report(report)

    def _send(self, step: Step, sessions: int, weights: Sequence[float]) -> None:
        # A double takes eight bytes, whatever it is: all commits are as long.
        commit = frames.commit_frame(step.position, step.kind, weights[:1])
        for length, content in step_costs(step, commit, self._chunk_bytes):
            self.counters.downlink.add(length, content, times=sessions)
        self.counters.charge_step(step.payloads, sessions, has_weights=bool(weights), sessions=sessions)


class Cost(NamedTuple):
    """A frame's length in bytes (without gRPC's prefix), and what it holds."""

    length: int
    content: FrameContent


def report_costs(report: Report, kind: Kind, chunk_bytes: int) -> Sequence[Cost]:
    """The frames of a report, as :func:`afl.wire.frames.report_frames` makes them."""
    if report.metrics or report.model_digest or report.missing:
        return _report_costs(report, kind, chunk_bytes)
    # A double takes eight bytes, or none for zero; a number as many as the widest of its length.
    worker, position = _widest(report.worker), Position(_widest(report.position.round), report.position.phase)
    alike = worker, position, float(is_sent(report.loss)), report.examples, report.payloads
    return _alike_costs(alike, float(is_sent(report.weight)), kind, chunk_bytes)


@lru_cache(maxsize=256)
def _alike_costs(
    alike: tuple[int, Position, float, int, tuple[PayloadHeader, ...]],
    weight: float,
    kind: Kind,
    chunk_bytes: int,
) -> Sequence[Cost]:
    return _report_costs(Report(*alike, weight=weight), kind, chunk_bytes)


def _widest(number: int) -> int:
    """The largest number that takes as many bytes in protobuf, seven bits each; 0 takes none."""
    return (1 << -(-number.bit_length() // 7) * 7) - 1


def _report_costs(report: Report, kind: Kind, chunk_bytes: int) -> Sequence[Cost]:
    opening = _of(frames.report_frame(report, kind))
    costs = [opening, *_chunks(report.payloads, chunk_bytes, pb.WorkerFrame, report.worker)]
    small = sum(header.total_bytes for header in report.payloads) < JOIN_BELOW_BYTES
    return [_joined(costs)] if small else costs


def step_costs(step: Step, commit: Frame, chunk_bytes: int) -> list[Cost]:
    """The frames of a step for one session, the commit among them, as the server sends them."""
    costs = [_of(frames.step_frame(step)), *_chunks(step.payloads, chunk_bytes, pb.ServerFrame)]
    if sum(cost.length for cost in costs) < JOIN_BELOW_BYTES:
        costs = [_joined(costs)]
    if costs[-1].length < JOIN_BELOW_BYTES:
        return [*costs[:-1], _joined([costs[-1], _of(commit)])]
    return [*costs, _of(commit)]


def _chunks(
    headers: Sequence[PayloadHeader],
    chunk_bytes: int,
    sender: type[pb.ServerFrame | pb.WorkerFrame],
    worker: int = 0,
) -> Iterator[Cost]:
    for index, header in enumerate(headers):
        offset = 0
        for section in (header.index_bytes, header.value_bytes):
            for start in range(0, section, chunk_bytes):
                size = min(chunk_bytes, section - start)
                head = frames.chunk_head(sender, offset, size, worker=worker, index=index)
                yield Cost(len(head) + size, frames.chunk_content(header, offset, size))
                offset += size


def _of(frame: Frame) -> Cost:
    return Cost(len(frame.data), frame.content)


def _joined(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.length for cost in costs), frames.joined_content([cost.content for cost in costs]))
