"""TensorBoard: event files in the run directory's ``trackers/tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afl.optional_dependencies import check_installed
from afl.runs.tracking.tracker import Status, TrackedRound, TrackedRun


class TensorBoardTracker:
    """Writes scalars; a resumed run has another event file in the same folder."""

    def __init__(self) -> None:
        check_installed("tensorboard", "write TensorBoard event files", "tensorboard")
        self._writer: Any = None

    def started(self, run: TrackedRun) -> None:
        """Open an event file."""
        from torch.utils.tensorboard.summary import text  # noqa: PLC0415  # takes a second
        from torch.utils.tensorboard.writer import FileWriter  # noqa: PLC0415

        self._writer = FileWriter(str(run.folder))
        if not run.is_resumed:
            rows = "\n".join(f"| {key} | {value} |" for key, value in run.config.items())
            self._writer.add_summary(text("config", f"| key | value |\n|---|---|\n{rows}"))  # type: ignore[no-untyped-call]

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        """Write the rounds, and hand them to the operating system."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        for each in rounds:
            # One event for all: torch's SummaryWriter makes one of each value, at six times the cost.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in each.metrics.items()]
            self._writer.add_summary(Summary(value=values), each.round)
        self._writer.flush()

    def ended(self, status: Status) -> None:
        """Close the event file."""
        from torch.utils.tensorboard.summary import text  # noqa: PLC0415

        self._writer.add_summary(text("status", status))  # type: ignore[no-untyped-call]
        self._writer.close()
