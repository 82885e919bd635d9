"""Named places at which a test makes a process die, stop or wait. For tests: nothing else sets the variable.

``AFL_FAULT_POINTS=server.after-log:5:kill`` ends the process with SIGKILL at its fifth passage of that
place; ``stop`` sends SIGSTOP, ``delay=SECONDS`` sleeps. Several are separated by commas. An unknown place is
refused at the start.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Final

from afl.errors import ConfigError

VARIABLE: Final = "AFL_FAULT_POINTS"

POINTS: Final = frozenset(
    {
        "server.before-log",
        "server.mid-log",
        "server.after-log",
        "server.mid-broadcast",
        "server.mid-checkpoint",
        "server.before-rename",
        "server.mid-replay",
        "worker.before-apply",
        "worker.before-journal",
        "worker.mid-journal",
        "worker.after-journal",
        "worker.mid-chunk",
    }
)


def _parsed(text: str) -> dict[tuple[str, int], str]:
    traps = {}
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition(":")
        passage, _, action = rest.partition(":")
        if name not in POINTS or not passage.isdecimal() or not _is_action(action):
            raise ConfigError(
                f"{VARIABLE}: {entry!r}; accepted: PLACE:PASSAGE:ACTION with ACTION kill, stop or "
                f"delay=SECONDS, and PLACE one of {', '.join(sorted(POINTS))}"
            )
        traps[name, int(passage)] = action
    return traps


def _is_action(action: str) -> bool:
    name, _, seconds = action.partition("=")
    return action in {"kill", "stop"} or (name == "delay" and seconds.replace(".", "", 1).isdecimal())


_TRAPS: Final = _parsed(os.environ.get(VARIABLE, ""))
_PASSAGES: Counter[str] = Counter()


def reached(name: str) -> None:
    """Count a passage of the place ``name``, and do what ``AFL_FAULT_POINTS`` asks for there."""
    if not _TRAPS:
        return
    assert name in POINTS
    _PASSAGES[name] += 1
    action = _TRAPS.get((name, _PASSAGES[name]))
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action is not None:
        time.sleep(float(action.partition("=")[2]))
