"""TensorBoard: event files in the run directory's ``trackers/tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afl.extras import check_installed
from afl.tracking.tracker import Status, TrackedRound, TrackedRun


class TensorBoardTracker:
    """Writes scalars; a run that is gone on with has another event file in the same folder."""

    def __init__(self) -> None:
        check_installed("tensorboard", "write TensorBoard event files", "tensorboard")
        self._writer: Any = None

    def started(self, run: TrackedRun) -> None:
        """Open an event file."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # takes a second

        self._writer = SummaryWriter(str(run.folder))
        if not run.is_resumed:
            rows = "\n".join(f"| {key} | {value} |" for key, value in run.config.items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        """Write the rounds, and hand them to the operating system."""
        for each in rounds:
            for name, value in each.metrics.items():
                self._writer.add_scalar(name, value, each.round)
        self._writer.flush()

    def ended(self, status: Status) -> None:
        """Close the event file."""
        self._writer.add_text("status", status)
        self._writer.close()
