"""A tracker: the one interface that TensorBoard, MLflow, W&B and users' own have, found by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from afl.config.problems import nearest
from afl.core.installed import entry_points
from afl.errors import ConfigError

GROUP = "afl.trackers"
"""The entry point group in which trackers are found, ours and users' own."""

Status: TypeAlias = Literal["finished", "stopped", "failed"]
"""How a run, or this process's part of it, ended: complete; stopped, to be resumed; or ended early."""

Setting: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is told of.

    Attributes:
        run_id: the same whenever the run is resumed.
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
    """All numbers of one round: ``round/loss_max``, ``evaluation/worst_accuracy``, ``worker/3/accuracy``."""

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
        """The run begins, or is resumed."""

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        """Take some rounds, ascending; no round comes twice in a run's life."""

    def ended(self, status: Status) -> None:
        """The process has no more rounds for the tracker."""


def load_trackers(names: Sequence[str]) -> Mapping[str, Tracker]:
    """The trackers of ``run.trackers``; :class:`ConfigError` if there is none, or it lacks what it needs."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    made = {}
    for name in names:
        if name not in points:
            near = nearest(name, points)
            hint = f"did you mean {near}? " if near else ""
            installed = ", ".join(sorted(points)) or "none"
            raise ConfigError(f"run.trackers: no tracker is called {name}; {hint}Installed: {installed}")
        where = f"run.trackers: {name} ({points[name].value})"
        try:
            made[name] = points[name].load()()
        except (ImportError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where} cannot be made: {error}") from error
        missing = [method for method in ("started", "log", "ended") if not hasattr(made[name], method)]
        if missing:
            raise ConfigError(
                f"{where} is no tracker: it lacks {', '.join(missing)}; see afl.runs.tracking.tracker.Tracker"
            )
    return made
