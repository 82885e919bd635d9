"""What has happened in a run, counted: for metrics, the summary, and whose fault it was."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from afl.core.messages import PayloadHeader, Report
from afl.wire.accounting import WireCount, float_equivalents, saved_bytes


@dataclass
class Counters:
    """What has happened so far."""

    uplink: WireCount = field(default_factory=WireCount)
    downlink: WireCount = field(default_factory=WireCount)
    sessions: int = 0
    refused: int = 0
    reconnections: int = 0
    lost_residuals: int = 0
    digest_mismatches: int = 0
    failures: int = 0
    refused_reports: int = 0
    late_reports: int = 0
    starts: int = 0
    replayed_steps: int = 0
    worker_restarts: int = 0
    absent_reports: int = 0
    saved_bytes: int = 0
    """What compression has spared: whole vectors in its place would have taken so much more."""

    def copied(self) -> Counters:
        """As they are now."""
        return replace(self, uplink=self.uplink.copied(), downlink=self.downlink.copied())

    def set(self, other: Counters) -> None:
        """Take over another's."""
        vars(self).update(vars(other.copied()))

    def values(self) -> dict[str, Any]:
        """As JSON has it, for :meth:`of_values`; of counters that go on counting, a copy must be asked."""
        # dataclasses.asdict does the same at ten times the price, in every round.
        return {**vars(self), "uplink": vars(self.uplink), "downlink": vars(self.downlink)}

    @property
    def uncompressed_bytes(self) -> int:
        """What both directions together would have carried with whole vectors."""
        return self.uplink.total + self.downlink.total + self.saved_bytes

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Counters:
        """From :meth:`values`, also by way of JSON."""
        counts = {name: WireCount.of_values(values[name]) for name in ("uplink", "downlink")}
        return cls(**{**values, **counts})

    def charge_report(self, report: Report) -> None:
        """What the paper charges for a report: its payloads, its loss, and its weight if it has one."""
        scalars = 1 + (report.weight != 0.0)
        self.uplink.float_equivalents += scalars + sum(map(float_equivalents, report.payloads))
        self.saved_bytes += sum(map(saved_bytes, report.payloads))

    def charge_step(
        self, headers: Sequence[PayloadHeader], workers: int, *, has_weights: bool, sessions: int = 1
    ) -> None:
        """What the paper charges for a step: its payloads and, if sent, one dual weight, for each worker.

        Args:
            sessions: connections that it crossed.
        """
        self.saved_bytes += sessions * sum(map(saved_bytes, headers))
        self.downlink.float_equivalents += workers * (has_weights + sum(map(float_equivalents, headers)))


class Incident(enum.StrEnum):
    """Something that happens to one worker."""

    ABSENT = "absent"
    """A step was closed without it: late, or with nothing finite."""
    NON_FINITE = "non_finite"
    """Its loss, gradient or metric was not finite."""
    FAILURE = "failure"
    """It could not do a step."""
    RESTART = "restart"
    """It came back as another process."""
    LOST_RESIDUAL = "lost_residual"
    """It came back without its uplink residual."""
    LARGE_UPDATE = "large_update"
    """Its update was far larger than the others', and was left out."""
    CAPPED_LOSS = "capped_loss"
    """Its loss was beyond ``faults.loss_cap``."""
    HIGH_LOSS = "high_loss"
    """Its training loss of a round was far above the others'."""
    DIGEST_MISMATCH = "digest_mismatch"
    """Its model differed from the server's."""


@dataclass(frozen=True)
class Moment:
    """When a step was closed.

    Attributes:
        round_seconds: since the round before.
        seconds: since the run began, without the time between its processes.
        counters: as they were.
    """

    round_seconds: float
    seconds: float
    counters: Counters

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "round_seconds": self.round_seconds,
            "seconds": self.seconds,
            "tallies": self.counters.values(),
        }

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Moment:
        """From :meth:`values`."""
        return cls(values["round_seconds"], values["seconds"], Counters.of_values(values["tallies"]))
