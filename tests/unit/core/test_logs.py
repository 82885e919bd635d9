"""Where log lines go."""

import io
import logging

import pytest

from afl.daemon.logs import set_up_logs


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
