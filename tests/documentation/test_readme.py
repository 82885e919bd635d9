"""README.md, followed in a fresh folder."""

from __future__ import annotations

from pathlib import Path

from documentation_plans import follow


def test_the_readme_is_followed(tmp_path: Path) -> None:
    follow("README.md", tmp_path)
