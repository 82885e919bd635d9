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


def test_a_collector_that_is_away_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's exporter says so every few seconds, of each try."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    set_up_logs(as_json=True)
    for number in range(1, 101):
        logging.getLogger("opentelemetry.exporter").error("no collector, at port %d", number)
        logging.getLogger("afl.test").error("ours")
    messages = [json.loads(line)["message"] for line in written.getvalue().splitlines()]
    assert messages.count("ours") == 100
    assert [message for message in messages if message != "ours"] == [
        "no collector, at port 1",
        *(f"no collector, at port {n} (no. {n} of its kind)" for n in (2, 4, 8, 16, 32, 64)),
    ]


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
