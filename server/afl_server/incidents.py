"""What has gone wrong, by worker: for metrics that say whose fault it is."""

from __future__ import annotations

import enum
from collections.abc import Iterable


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
    DIGEST_MISMATCH = "digest_mismatch"
    """Its model differed from the server's."""


class Incidents:
    """How often each has happened to each worker in this process of the server.

    The run's own counters (:class:`afl_server.tallies.Tallies`) are written down with every step, which is
    why they are not kept by worker.
    """

    def __init__(self, workers: int) -> None:
        self.counts: dict[Incident, list[int]] = {incident: [0] * workers for incident in Incident}

    def count(self, incident: Incident, workers: Iterable[int]) -> None:
        """It has happened to each of these."""
        for worker in workers:
            self.counts[incident][worker] += 1
