"""Weights & Biases: offline files in the run directory's ``trackers/wandb``, unless ``WANDB_MODE`` says
otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from afl.optional_dependencies import check_installed
from afl.runs.tracking.tracker import Status, TrackedRound, TrackedRun

PROJECT = "afl"  # unless `WANDB_PROJECT` names another
_EXIT_CODES: Mapping[Status, int] = {"finished": 0, "stopped": 130, "failed": 1}


class WandbTracker:
    """One W&B run, whose id is the run's own.

    Offline, each process that runs it writes a folder of its own; ``wandb sync`` makes one run of them.
    """

    def __init__(self) -> None:
        check_installed("wandb", "log to Weights & Biases", "wandb")
        self._run: Any = None

    def started(self, run: TrackedRun) -> None:
        """Begin the W&B run, or resume it."""
        # It reports its own errors to its makers otherwise.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415  # takes seconds

        # The user's word, which wandb checks.
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.directory.name,
            dir=str(run.folder),
            config=dict(run.config),
            mode=mode,
            resume=None if mode == "offline" else "allow",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        """Log the rounds' metrics, with the round as the step."""
        for each in rounds:
            self._run.log(dict(each.metrics), step=each.round)

    def ended(self, status: Status) -> None:
        """Give the W&B run its exit code."""
        self._run.finish(exit_code=_EXIT_CODES[status])
