"""The HTTP that both daemons serve: a page that fails takes nothing with it."""

from __future__ import annotations

import logging
import urllib.error

import pytest

from afl.config.address import Address
from afl.http_pages import Answer, Environ, HttpPages, text
from support.federation import fetch


class Pages(HttpPages):
    """One page is there, one fails."""

    def answer(self, path: str, environ: Environ) -> Answer:
        if path == "/fails":
            raise RuntimeError("a fault of the page")
        return text("200 OK", "here\n")


def test_a_page_that_fails_is_logged_and_the_next_is_served(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages(Address("127.0.0.1", 0), "--http")
    try:
        with pytest.raises(urllib.error.HTTPError) as failed:
            fetch(f"http://127.0.0.1:{pages.port}/fails")
        with failed.value as answer:
            assert answer.code == 500
            assert b"a fault of the page" not in answer.read()
        assert fetch(f"http://127.0.0.1:{pages.port}/") == "here\n"
    finally:
        pages.close()
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert getattr(record, "event", "") == "page_failed"
    assert record.exc_info is not None
    assert "a fault of the page" in str(record.exc_info[1])
