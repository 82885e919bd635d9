"""Counts what a simulated run would have carried: the frames of training, evaluation and first models.

Each worker counts as a process of its own. Joining, heartbeats and goodbyes are not part of a simulation;
their few bytes (kind ``control``) are zero here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from afl.core.engine import Opening
from afl.core.messages import Kind, Payload, Position, Report, Step
from afl.core.model.parameters import ParameterVector
from afl.wire.costs import Lengths, lengths_of, report_costs, session_costs, step_costs
from afl.wire.frames import commit_frame
from afl_server.federation.broadcast import model_payloads
from afl_server.federation.counters import Counters


class WireMeter:
    """A :class:`afl_lab.simulation.driver.Meter` that keeps the server's counters.

    Args:
        sends_dual_weights: whether the algorithm tells each worker its dual weight.
    """

    def __init__(self, *, chunk_bytes: int, sends_dual_weights: bool) -> None:
        self.counters = Counters()
        self._chunk_bytes = chunk_bytes
        self._sends_dual_weights = sends_dual_weights

    def first_models(self, vector: ParameterVector, params: Tensor, workers: int) -> None:
        """Every process is sent the initial model."""
        payloads = model_payloads(vector, params)
        step = Step(Position(1, 0), Kind.MODEL, tuple(payload.header for payload in payloads))
        self._send(step, payloads, range(workers), ())

    def step(self, opening: Opening) -> None:
        """A step goes to those who answer it."""
        weights = opening.dual_weights.tolist() if self._sends_dual_weights else ()
        self._send(opening.step, opening.payloads, opening.participants, weights)

    def reports(self, kind: Kind, reports: Sequence[tuple[Report, Lengths]]) -> None:
        """The reports of a step have come in."""
        for report, lengths in reports:
            for length, content in report_costs(report, kind, lengths, self._chunk_bytes):
                self.counters.uplink.add(length, content)
            if not kind.is_of_evaluation:
                self.counters.charge_report(report)

    def _send(
        self, step: Step, payloads: Sequence[Payload], workers: Sequence[int], weights: Sequence[float]
    ) -> None:
        shared = step_costs(step, lengths_of(payloads), self._chunk_bytes)
        # A double takes eight bytes, whatever it is: all commits are as long.
        costs = session_costs(shared, commit_frame(step.position, step.kind, weights[:1]))
        for length, content in costs:
            self.counters.downlink.add(length, content, times=len(workers))
        self.counters.charge_step(
            step.payloads, len(workers), has_weights=bool(weights), sessions=len(workers)
        )
