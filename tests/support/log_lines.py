"""Log lines, held against the events that are defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afl.daemon.events import EVENTS


def check_line(line: Mapping[str, Any]) -> str:
    """What is wrong with a JSON log line that says ``event``; empty if it is as defined."""
    name = line["event"]
    if name not in EVENTS:
        return f"{name!r} is no event of afl.daemon.events"
    standard = {"time", "level", "logger", "message", "event", "traceback"}
    logged, defined = line.keys() - standard, EVENTS[name].meanings().keys()
    # Which every line has, whatever it says, but for what a process says before it knows them.
    logged -= {"run_id", "ids"} - defined
    if "worker" in defined:
        logged -= {"site"}  # where sites have names
    return "" if logged == defined else f"{name}: fields {sorted(logged)}; defined are {sorted(defined)}"
