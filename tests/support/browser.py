"""Debian's Chromium, without a window, on pages of this machine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")

OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PATIENCE_MS = 60_000
"""On a machine that is busy with others, a page takes a while."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*OPTIONS])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page, and all that it asked for and complained of; a context manager that looks at both at its end.

    Args:
        expects_cuts: whether requests may fail, since the server is taken away.
        options: of the browser's context: ``viewport``, ``color_scheme`` and others.
    """

    def __init__(self, browser: Browser, url: str, *, expects_cuts: bool = False, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self._context.set_default_timeout(PATIENCE_MS)
        self._expects_cuts = expects_cuts
        self.host = "/".join(url.split("/", 3)[:3]) + "/"
        self.url = url
        self.page: Page = self._context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def __enter__(self) -> Page:
        self.page.goto(self.url)
        return self.page

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._context.close()
        if kind is None:
            assert not self.complaints, self.complaints
            elsewhere = [url for url in self.asked if not url.startswith(self.host)]
            assert not elsewhere, f"asked for {elsewhere}"

    def _said(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"} and not (self._expects_cuts and "Failed to load resource" in text):
            self.complaints.append(f"{kind}: {text}")


def drawn(page: Page) -> Page:
    """The page, once its curves are there."""
    page.locator("body[data-drawn]").wait_for()
    return page


def fact(page: Page, name: str) -> str:
    """What the page says of something."""
    return page.locator(f"[data-fact={name}]").first.inner_text()
