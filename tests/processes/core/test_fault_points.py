"""Fault points: off unless the environment says so, and only at places that there are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afl.daemon.fault_points import POINTS, _parsed
from afl.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_every_place_is_passed_somewhere_in_the_daemons():
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("server", "worker")
        for path in (ROOT / folder).rglob("*.py")
    )
    assert set(re.findall(r'reached\("([^"]+)"\)', source)) == POINTS


@pytest.mark.parametrize(
    "text",
    [
        "server.nowhere:1:kill",
        "server.before-log:x:kill",
        "server.before-log:1:explode",
        "server.before-log:1:delay=",
    ],
)
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(ConfigError, match="AFL_FAULT_POINTS: '"):
        _parsed(text)


def test_the_process_ends_at_the_passage_that_is_named():
    program = (
        "from afl.daemon.fault_points import reached\n"
        "for i in range(5):\n"
        "    print(i, flush=True)\n"
        "    reached('server.before-log')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "AFL_FAULT_POINTS": "server.after-log:1:kill,server.before-log:3:kill"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()) == (-signal.SIGKILL, ["0", "1", "2"])
