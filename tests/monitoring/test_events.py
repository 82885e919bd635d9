"""The registry of events: everything that is logged is in it, and everything in it is logged and tested."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest

from afl.daemon import events
from afl.daemon.events import EVENTS
from afl.daemon.logs import JsonFormatter
from afl_tools.monitoring import logged
from support.log_lines import check_line

TESTS = Path(__file__).parents[1]


def test_every_line_is_an_event_and_every_event_is_logged_somewhere() -> None:
    assert logged.sites().keys() == EVENTS.keys()


@pytest.mark.parametrize(
    "line",
    [
        'LOG.info("x")',
        'LOG.warning("x", extra={"event": "goodbye"})',
        'LOG.error("x", extra=other.Goodbye().extra)',
        'logger.exception("x", extra=events.Goodby().extra)',
    ],
)
def test_a_line_that_is_no_event_is_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "module.py").write_text(f"def call():\n    {line}\n", encoding="utf-8")
    monkeypatch.setattr(logged, "ROOT", tmp_path)
    with pytest.raises(logged.UnnamedEventError, match=r"module\.py:2"):
        logged.sites()


def test_a_test_makes_every_event_happen() -> None:
    """Where one that waits for it, or looks for it among what was logged, names it."""
    named: set[str] = set()
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__):
            named |= {
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    assert not EVENTS.keys() - named


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_says_what_it_is(name: str) -> None:
    event = EVENTS[name]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
    assert (event.__doc__ or "").rstrip().endswith(".")
    assert all(event.meanings().values())
    # Python's logging has fields of its own, which must not be written over.
    reserved = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "event", "time", "level"}
    assert not event.meanings().keys() & reserved


def test_a_line_has_the_name_and_all_fields_of_its_event(caplog: pytest.LogCaptureFixture) -> None:
    event = events.WorkerFailed(worker=3, round=None)
    logging.getLogger("afl.server").error("worker 3 failed", extra=event.extra)
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert line == {
        "time": line["time"],
        "level": "error",
        "logger": "afl.server",
        "message": "worker 3 failed",
        "event": "worker_failed",
        "worker": 3,
        "round": None,
    }
    assert check_line(line) == ""
    assert "fields ['round']" in check_line({"event": "worker_failed", "round": 1})
    assert "no event" in check_line({"event": "worker_felt"})


def test_the_table_says_who_logs_what() -> None:
    rows = {row.split(" | ")[0].strip("| `"): row for row in logged.events_table().splitlines()[2:]}
    assert rows.keys() == EVENTS.keys()
    assert "| `worker_ready` | server | info |" in rows["worker_ready"]
    assert "| `run_over` | server | info or error |" in rows["run_over"]
    assert "| `certificate_expires` | both | warning |" in rows["certificate_expires"]
