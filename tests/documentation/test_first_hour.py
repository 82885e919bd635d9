"""docs/first-hour.md, followed in a fresh folder: with few rounds, and word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation_plans import follow


def test_the_first_hour_in_short(tmp_path: Path) -> None:
    follow("docs/first-hour.md", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_hour(tmp_path: Path) -> None:
    follow("docs/first-hour.md", tmp_path, is_quick=False)
