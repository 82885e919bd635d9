"""Each other page, followed in a fresh folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation_plans import PAGES, follow

OF_THEIR_OWN = {"README.md", "docs/first-hour.md"}
"""Pages whose tests are files of their own, so that they run beside these."""


@pytest.mark.parametrize("page", sorted(PAGES.keys() - OF_THEIR_OWN))
def test_a_page_is_followed(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", sorted(page for page in PAGES.keys() - OF_THEIR_OWN if PAGES[page].has_whole)
)
def test_a_page_is_followed_as_a_whole(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path, is_quick=False)
