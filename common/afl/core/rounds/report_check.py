"""Whether a report is one that the open step asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from afl.core.codecs.payload import check_header, joint_header
from afl.core.messages import MAX_METRICS, METRIC_NAMES, Kind, PayloadHeader, Report, is_metric_name
from afl.errors import NonFiniteError, ProtocolError
from afl.outside import words


@dataclass(frozen=True)
class ReportCheck:
    """What reports for a step must be.

    Attributes:
        payloads: the headers of the payloads that are due.
        may_miss: whether a report may say that there is nothing finite to report.
        tensors: how many norms of the residual by tensor may come; ``None`` for any number.
    """

    kind: Kind
    participants: Sequence[int]
    payloads: Sequence[PayloadHeader]
    may_miss: bool
    tensors: int | None

    def check(self, report: Report, place: Callable[[Report], str]) -> None:
        """Check one, which may be joint.

        Args:
            place: of what worker and round a report is, as messages say it.

        Raises:
            ProtocolError: if it is not what the step asks for.
            NonFiniteError: if a number of it is not finite.
        """
        for own in report.of_each():
            self._check_own(own, place)
        if report.missing:
            if not self.may_miss or report.payloads or report.metrics or report.others:
                raise ProtocolError(f"{place(report)}: a report of nothing, where one is due")
            return
        if report.metrics:
            _check_metrics(report, place(report))
        if self.kind is Kind.EVALUATE and "loss" not in report.metrics:
            raise ProtocolError(f"{place(report)}: an evaluation without the metric loss")
        norms = len(report.tensor_residual_norms)
        if norms and self.tensors is not None and norms != self.tensors:
            raise ProtocolError(
                f"{place(report)}: {norms} norms of its residual by tensor; here there are {self.tensors}"
            )
        self._check_payloads(report, place)

    def _check_own(self, report: Report, place: Callable[[Report], str]) -> None:
        """What each worker of a joint report has of its own."""
        if report.worker not in self.participants:
            raise ProtocolError(f"{place(report)}: a report that was not asked for")
        if report.missing:
            return
        if not math.isfinite(report.loss):
            raise NonFiniteError(f"{place(report)}: the loss is {report.loss}; it must be finite")
        if report.examples < 1 and self.kind is not Kind.BUFFERS:
            raise ProtocolError(
                f"{place(report)}: a loss over {report.examples} examples; it takes at least one"
            )

    def _check_payloads(self, report: Report, place: Callable[[Report], str]) -> None:
        due = self.payloads
        if len(report.payloads) != len(due):
            raise ProtocolError(f"{place(report)}: {len(report.payloads)} payloads; {len(due)} are due")
        if report.others and not (due and all(right.bits for right in due)):
            raise ProtocolError(
                f"{place(report)}: a joint report, where only integers can be added before they come"
            )
        for header, right in zip(report.payloads, due, strict=True):
            check_header(header, joint_header(right, len(report.workers)) if report.others else right)


def _check_metrics(report: Report, where: str) -> None:
    if len(report.metrics) > MAX_METRICS:
        raise ProtocolError(f"{where}: {len(report.metrics)} metrics; {MAX_METRICS} are the most")
    for name, value in report.metrics.items():
        if not is_metric_name(name):
            raise ProtocolError(f"{where}: a metric called {words(name)}; {METRIC_NAMES}")
        if not math.isfinite(value):
            raise NonFiniteError(f"{where}: the metric {name} is {value}; it must be finite")
