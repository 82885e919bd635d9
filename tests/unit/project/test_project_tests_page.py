"""docs/tests.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_page_names_is_there():
    page = (ROOT / "docs" / "tests.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^(?: {4})?(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert len(named) > 30
    assert named <= defined, sorted(named - defined)


def test_no_wall_clock_time_is_on_the_wire():
    """Durations, positions and counts travel; nothing in the schema holds a time of day."""
    schema = (ROOT / "proto" / "afl" / "v1" / "federation.proto").read_text(encoding="utf-8")
    fields = re.findall(r"^\s+(?:repeated )?(\S+) (\w+) = \d+;", schema, re.MULTILINE)
    assert len(fields) > 60
    assert not [
        name for kind, name in fields if "Timestamp" in kind or re.search(r"time$|_at$|clock|date", name)
    ]
