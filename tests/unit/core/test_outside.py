"""Text from outside reaches no log, terminal or page as anything but text."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.core.messages import Position
from afl.daemon.logs import JsonFormatter, TextFormatter
from afl.errors import ConfigError
from afl.outside import continued, lines, paragraph, plain, printable, words
from afl.runs.files import metrics_entries
from afl.terminal import view
from afl.terminal.entry import failed
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import ack_of, report_of

CLEAR, CLIPBOARD, RIGHT_TO_LEFT = "\x1b[2J", "\x1b]52;c;ZXZpbA==\x07", "\u202e"
FORGED = "\n12:00:00 INFO    all workers ready"
EVIL = f"{CLEAR}{CLIPBOARD}{RIGHT_TO_LEFT}{FORGED}\r\x9b2J\u2028\u200b"


@given(st.text(), st.integers(3, 50))
def test_what_comes_out_is_printable_and_short(text: str, most: int) -> None:
    assert printable(text).isprintable()
    assert words(text, most).isprintable()
    assert len(words(text, most)) <= most
    for shown in (lines(text), continued(text), paragraph(text, most)):
        assert all(line.isprintable() for line in shown.split("\n"))
    assert len(paragraph(text, most)) <= 2 * most + len("...")


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=40))
def test_text_that_is_printable_stays_as_it_is(text: str) -> None:
    assert printable(text) == words(text) == lines(text) == continued(text) == paragraph(text, 40) == text


def test_values_of_json_are_printable_to_the_last_key() -> None:
    found = plain({"a": [EVIL, {"b" + EVIL: EVIL}], "n": 1.5, "none": None})
    assert json.dumps(found, ensure_ascii=False).isprintable()
    assert (found["n"], found["none"]) == (1.5, None)


def test_a_line_of_the_log_cannot_be_forged() -> None:
    record = logging.LogRecord("afl", logging.INFO, "", 1, "%s leaves: %s", ("worker 1", EVIL), None)
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.isprintable()
    assert "worker 1 leaves: \\x1b[2J" in first
    assert rest
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert JsonFormatter().format(record).isascii()


def test_a_command_ends_with_printable_words(capsys: pytest.CaptureFixture[str]) -> None:
    failed("afl", ConfigError(f"two\nlines {CLEAR}{RIGHT_TO_LEFT}"))
    assert capsys.readouterr().err == "afl: two\nlines \\x1b[2J\\u202e\n"


def test_a_terminal_shows_names_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    console = view.make_console()
    found = view.table("name " + CLEAR, "value>", title="Title " + CLIPBOARD)
    found.add_row(RIGHT_TO_LEFT, CLEAR)
    console.print(found)
    console.print(f"said: {CLEAR}")
    shown = capsys.readouterr().out
    assert "said: \\x1b[2J" in shown
    assert not set(CLEAR + CLIPBOARD + RIGHT_TO_LEFT) & set("\x1b\x07\u202e") & set(shown)


def test_metrics_of_another_program_are_read_as_text(tmp_path: Path) -> None:
    entry = {"event": "evaluation", "round": 1, "workers": [{EVIL: 1.0}]}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(entry) + "\n" + '{"event": "round"}' + "\n", encoding="utf-8")
    (found, plainly), _ = metrics_entries(path)
    assert plainly == {"event": "round"}
    assert next(iter(found["workers"][0])) == printable(EVIL)


def test_what_frames_word_is_cut_as_it_comes() -> None:
    ack = ack_of(pb.Ack(worker=1, status=pb.Ack.STATUS_REFUSED, reason=EVIL + "x" * 10_000))
    report = report_of(pb.Report(worker=1, missing=EVIL + "x" * 10_000))
    assert report.position == Position(0, 0)
    for text in (ack.reason, report.missing):
        assert text.isprintable()
        assert len(text) <= 1000


def test_what_a_live_view_is_given_is_text() -> None:
    console = view.make_console()
    console.file = io.StringIO()
    console.print(view.facts({"reason": EVIL}, title=EVIL))
    assert "\x1b" not in console.file.getvalue()
