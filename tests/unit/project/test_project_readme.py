"""README.md and the other pages: what is on them besides what tests/documentation follows."""

from __future__ import annotations

import re

from support.pages import ROOT, blocks, pages


def test_relative_links_lead_somewhere() -> None:
    for page in pages():
        document = ROOT / page
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (document.parent / target).exists(), f"{page}: {target}"


def test_the_task_is_about_30_lines() -> None:
    (task,) = [
        block for block in blocks("docs/tasks.md", "python") if block.text.startswith("# my_task.py\n")
    ]
    assert len([line for line in task.text.splitlines()[1:] if line.strip()]) <= 30


def test_the_readme_can_be_read_at_one_sitting() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8000


def test_lines_can_be_read_without_scrolling() -> None:
    """But for tables and what stands in blocks."""
    for page in pages():
        if page.startswith(("docs/reference/", "docs/reproduction/")):
            continue  # made from the code, and from runs
        text = (ROOT / page).read_text(encoding="utf-8")
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert not [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")], page
