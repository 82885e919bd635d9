"""What a run takes on disks, from its settings alone: formulas, without running anything."""

from __future__ import annotations

from dataclasses import dataclass

from afl.core.compressors.base import Compressor

MODEL_FILES = 3
"""The best, the final, and the random one."""

CHECKPOINTS = 3
"""The last two are kept, and the next is written before the older is removed."""

LOGS = 2
"""Those since the kept checkpoints."""

SMALLEST_LOG_BYTES = 256 * 1024 * 1024
LOG_CHECKPOINTS = 8
"""A log may grow to so many bytes or checkpoints, whichever is more, before a checkpoint is due."""

JOURNAL_PLACES = 2
JOURNAL_SPARE = 8
"""A place has room for an entry and an eighth of it: entries vary in length."""


@dataclass(frozen=True)
class Disks:
    """The most bytes on disk of a run whose model has no buffers.

    Attributes:
        model: a model's file.
        checkpoint: a checkpoint.
        log: the outcomes since a checkpoint.
        journal: a worker's.
    """

    model: int
    checkpoint: int
    log: int
    journal: int

    @property
    def server(self) -> int:
        """The run directory, without ``metrics.jsonl``."""
        return MODEL_FILES * self.model + CHECKPOINTS * self.checkpoint + LOGS * self.log


def keeps_residuals(uplink: Compressor, downlink: Compressor) -> tuple[bool, bool]:
    """Whether workers, and whether the server, keep a residual in AFL-Com.

    Args:
        downlink: the same object as ``uplink`` where the two are configured alike. If that is additive and
            idempotent, the sum goes down as it is.
    """
    return not uplink.lossless, not (downlink is uplink and uplink.additive_idempotent)


def disks(
    model: int,
    *,
    sent: int,
    received: int,
    residuals: tuple[bool, bool],
    checkpoint_every: int,
    optimizer: int = 0,
) -> Disks:
    """What a run keeps.

    Args:
        model: bytes of a model.
        sent: bytes of a worker's payload.
        received: bytes of the server's.
        residuals: whether workers, and whether the server, keep one. Each outcome holds the server's.
        checkpoint_every: rounds, ``server.checkpoint_every``.
        optimizer: bytes of what it keeps from round to round.
    """
    workers_own, servers_own = (model if keeps else 0 for keeps in residuals)
    checkpoint = model + servers_own + optimizer
    outcome = received + servers_own
    entry = sent + workers_own
    return Disks(
        model=model,
        checkpoint=checkpoint,
        log=min((checkpoint_every + 1) * outcome, largest_log(checkpoint) + outcome),
        journal=JOURNAL_PLACES * (entry + entry // JOURNAL_SPARE),
    )


def largest_log(checkpoint: int) -> int:
    """The bytes of a log at which a checkpoint is due, whose own bytes these are."""
    return max(SMALLEST_LOG_BYTES, LOG_CHECKPOINTS * checkpoint)
