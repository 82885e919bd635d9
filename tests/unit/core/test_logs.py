"""Where log lines go."""

import io
import json
import logging

import pytest

from afl.daemon.logs import add_to_every_line, set_up_logs


def test_lines_go_to_what_standard_error_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)
    set_up_logs(as_json=False)
    logging.getLogger("afl.test").warning("to the first")
    # As a live view does while it is on the screen.
    monkeypatch.setattr("sys.stderr", second)
    logging.getLogger("afl.test").warning("to the second")
    assert first.getvalue().endswith("WARNING to the first\n")
    assert second.getvalue().endswith("WARNING to the second\n")


def test_a_json_line_has_the_process_s_fields_unless_it_names_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    set_up_logs(as_json=True)
    add_to_every_line(ids="0-2", run_id=None)
    logging.getLogger("afl.test").warning("before")
    add_to_every_line(run_id="r1")
    logging.getLogger("another").warning("after")
    logging.getLogger("afl.test").warning("of another run", extra={"run_id": "r2"})
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(line["ids"], line["run_id"]) for line in lines] == [("0-2", None), ("0-2", "r1"), ("0-2", "r2")]
