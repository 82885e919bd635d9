"""README.md: what is on it besides commands and code, which tests/documentation follows."""

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
    (task,) = [block for block in blocks("README.md", "python") if block.text.startswith("# my_task.py\n")]
    assert len([line for line in task.text.splitlines()[1:] if line.strip()]) <= 30
