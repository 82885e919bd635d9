"""docs/operations.md names events, metrics and commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

from afl.daemon.events import EVENTS
from afl.errors import ExitCode
from afl_server.pages.metrics import FAMILIES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    table = PAGE.partition("| what happens |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_every_event_is_one_that_is_logged():
    named = {event for row in rows() for event in re.findall(r"`([a-z_]+)`", row[1])}
    assert len(named) > 15
    assert named <= EVENTS.keys(), named - EVENTS.keys()


def test_every_metric_is_one_that_is_served():
    named = set(re.findall(r"`(afl_\w+?)(?:_total)?(?:\{\w+\})?`", PAGE))
    assert len(named) > 10
    served = {name.removesuffix("_total") for name in FAMILIES}
    assert named <= served, named - served


def test_every_exit_code_is_one_of_the_commands():
    named = {int(code) for code in re.findall(r"code (\d+)", PAGE)}
    assert len(named) > 3
    assert named <= {int(code) for code in ExitCode}


def test_every_benchmark_is_there():
    for module in re.findall(r"python -m (afl_lab[\w.]+)", PAGE):
        assert (ROOT / "lab" / Path(*module.split("."))).with_suffix(".py").is_file()
