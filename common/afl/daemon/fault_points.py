"""Named places at which a test makes a process die, stop or wait. For tests: nothing else sets the variable.

``AFL_FAULT_POINTS=server.after-log:5:kill`` ends the process with SIGKILL at its fifth passage of that
place; ``stop`` sends SIGSTOP, ``delay=SECONDS`` sleeps. Several are separated by commas. An unknown place is
refused at the start.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from typing import Final

from afl.errors import ConfigError

VARIABLE: Final = "AFL_FAULT_POINTS"

_PLACES: Final = {
    "server": "before-log, mid-log, after-log, mid-broadcast, mid-checkpoint, before-rename, mid-replay",
    "worker": "before-apply, before-journal, mid-journal, after-journal, mid-chunk",
}

POINTS: Final = frozenset(
    f"{daemon}.{place}" for daemon, places in _PLACES.items() for place in places.split(", ")
)

_ENTRY: Final = re.compile(r"([a-z.-]+):(\d+):(kill|stop|delay=\d+(?:\.\d*)?)")


def _parsed(text: str) -> dict[tuple[str, int], str]:
    traps = {}
    for entry in filter(None, text.split(",")):
        match = _ENTRY.fullmatch(entry)
        if match is None or match[1] not in POINTS:
            raise ConfigError(
                f"{VARIABLE}: {entry!r}; accepted: PLACE:PASSAGE:ACTION with ACTION kill, stop or "
                f"delay=SECONDS, and PLACE one of {', '.join(sorted(POINTS))}"
            )
        traps[match[1], int(match[2])] = match[3]
    return traps


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
