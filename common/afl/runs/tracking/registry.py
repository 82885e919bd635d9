"""Finding trackers by name: the entry point group ``afl.trackers``, so that a user can add one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from afl.config.problems import nearest
from afl.errors import ConfigError
from afl.runs.tracking.tracker import Tracker

GROUP = "afl.trackers"


def load_trackers(names: Sequence[str]) -> Mapping[str, Tracker]:
    """The trackers of a configuration's ``run.trackers``, by name.

    Raises:
        ConfigError: if there is none of a name, or what one needs is not installed.
    """
    return {name: _made(name) for name in names}


def _made(name: str) -> Tracker:
    points = {point.name: point for point in entry_points(group=GROUP)}
    point = points.get(name)
    if point is None:
        near = nearest(name, points)
        hint = f"did you mean {near}? " if near else ""
        installed = ", ".join(sorted(points)) or "none"
        raise ConfigError(f"run.trackers: no tracker is called {name}; {hint}Installed: {installed}")
    try:
        made = point.load()()
    except (ImportError, TypeError, AttributeError) as error:
        raise ConfigError(f"run.trackers: {name} ({point.value}) cannot be made: {error}") from error
    missing = [method for method in ("started", "log", "ended") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(
            f"run.trackers: {name} ({point.value}) is no tracker: it lacks {', '.join(missing)}; "
            "see afl.runs.tracking.tracker.Tracker"
        )
    tracker: Tracker = made
    return tracker
