"""What a tracker is: the one interface that TensorBoard, MLflow, Weights & Biases and users' own have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

Status: TypeAlias = Literal["finished", "stopped", "failed"]
"""How a run, or this process's part of it, ended: complete; stopped, to be gone on with; or ended early."""

Setting: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is told of.

    Attributes:
        run_id: the same whenever the run is gone on with.
        directory: the run directory.
        folder: the tracker's own in it, which exists.
        config: every key of the configuration, dotted (``algorithm.eta_w``).
        after: the last round that the tracker was handed by earlier processes of this run; 0 if none was.
    """

    run_id: str
    directory: Path
    folder: Path
    config: Mapping[str, Setting]
    after: int

    @property
    def is_resumed(self) -> bool:
        """Whether the tracker knows this run already."""
        return self.after > 0


@dataclass(frozen=True)
class TrackedRound:
    """All numbers of one update round.

    Attributes:
        metrics: by name: ``round/loss_max``, ``evaluation/worst_accuracy``, ``worker/3/accuracy``.
    """

    round: int
    metrics: Mapping[str, float]


class Tracker(Protocol):
    """An experiment tracker: a class of your own that is told of a run's rounds.

    It is made without arguments, then used by one thread of its own: it may be slow, hang, or raise anything.
    An entry point of the group ``afl.trackers`` names a class like this; the configuration's
    ``run.trackers`` names the entry point. ``__init__`` raises :class:`afl.ConfigError` where something that
    it needs is not installed, and does nothing that takes time.
    """

    def started(self, run: TrackedRun) -> None:
        """The run begins, or is gone on with."""

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        """Take some rounds, ascending; no round comes twice in a run's life."""

    def ended(self, status: Status) -> None:
        """Nothing more comes from this process."""
