"""docs/guide.md: the units read what it writes. Its commands are followed in tests/documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_units_read_what_the_guide_writes() -> None:
    units = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy/systemd").iterdir())
    for path in sorted(set(re.findall(r"/etc/afl/[\w.-]+", units))):
        name = path.removeprefix("/etc/afl/").replace("worker-", "worker-N")
        assert path in GUIDE or name in GUIDE, path
    assert "/opt/afl/bin" in GUIDE
    assert "/opt/afl/bin" in units
