"""docs/privacy.md names tests that there are, and every field that a worker's failure tells."""

from __future__ import annotations

import re

from afl.core.secrecy.neighbours import COMPLETE_UP_TO, degree
from afl.v1 import federation_pb2 as pb
from support.pages import ROOT

PAGE = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")


def test_the_tests_of_the_threat_model_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 12
    assert not [name for name in named if f"def {name}(" not in sources]
    table = PAGE.partition("## Who can see what")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows
    assert not [row for row in rows if "`test_" not in row], "a claim that no test shows"


def test_the_numbers_of_the_graph_are_the_codes() -> None:
    text = " ".join(PAGE.split())
    assert f"up to {COMPLETE_UP_TO} workers everybody" in text
    assert f"k is {degree(65)} for 65 workers and {degree(10_000)} for 10,000" in text


def test_the_fields_that_it_names_are_the_protocols() -> None:
    for name in re.findall(r"`failure\.(\w+)`", PAGE):
        assert name in pb.Failure.DESCRIPTOR.fields_by_name
