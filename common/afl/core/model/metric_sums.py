"""The sum of all workers' metrics, where the server learns no worker's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afl.core.aggregation import ModularSum
from afl.core.algorithms.base import Arrays, SumCollector
from afl.core.messages import Payload, PayloadHeader, Position, Report
from afl.core.secrecy.fixed_point import BITS, means_of, metrics_header
from afl.core.sums import Sum
from afl.errors import ProtocolError


class MetricSums(SumCollector):
    """Takes the reports of an evaluation, whose metrics have names only; their values are in the payload."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._sum = ModularSum(metrics_header().count, 0, BITS, workers)
        self._names: frozenset[str] | None = None

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:  # noqa: ARG002
        """One payload: the worker's metrics."""
        return (metrics_header(),)

    @property
    def sums(self) -> Sequence[Sum]:
        """Of the metrics."""
        return (self._sum,)

    def open_report(self, report: Report) -> None:
        """Its metrics have the names that all others' have.

        Raises:
            ProtocolError: if they have not: then it is not known what was added up.
        """
        names = frozenset(report.metrics)
        if self._names is None:
            self._names = names
        elif names != self._names:
            other = sorted(names ^ self._names)[0]
            raise ProtocolError(
                f"worker {report.worker}: the metric {other!r}, which not all workers have; where metrics "
                "are told as sums only, each must have the same"
            )

    def reset(self) -> None:
        """Begin the sum again."""
        super().reset()
        self._names = None

    def means_of(self, reports: Sequence[Report]) -> tuple[dict[str, float], float]:
        """The means by name, and the smooth worst loss; the sum is then free for the next evaluation."""
        found = means_of(self._sum.total, reports[0].metrics, self._workers)
        self.reset()
        return found

    def close(self) -> Payload:
        """An evaluation makes no payload."""
        raise AssertionError("an evaluation's sums are read by means_of")

    def replay(
        self,
        losses: NDArray[np.float64],  # noqa: ARG002
        payload: Payload,  # noqa: ARG002
        unsent: Arrays,  # noqa: ARG002
    ) -> None:
        """An outcome has the evaluation itself."""
        raise AssertionError("an evaluation is replayed from its record")
