"""The project's pages, and what they show: fenced blocks, and commands in their text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROJECT = "cli/afl_cli/project/README.md.template"
"""The page of a project that ``afl new`` makes."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[^`]*)$")
_PATH = re.compile(
    r"(?:deploy|docs|lab|common/afl|server/afl_server|worker/afl_worker|tests|proto)/[\w./*-]+"
)
_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)(?P<code>.+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the page's path in the repository.
        line: of the opening fence, from 1.
        section: the nearest heading above it.
        language: after the fence; empty where there is none.
        text: what is between the fences, without the indentation of the opening one.
    """

    page: str
    line: int
    section: str
    language: str
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README, CONTRIBUTING, all of docs and a project's README, by their paths in the repository."""
    found = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / PROJECT,
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks(page: str, language: str = "") -> list[Block]:
    """The fenced blocks of a page in order, or those of one language."""
    found = blocks_of(page, _text(page))
    return [block for block in found if language in {"", block.language}]


def blocks_of(page: str, text: str) -> list[Block]:
    """The fenced blocks of a text.

    Raises:
        ValueError: if a fence is never closed.
    """
    found, section = [], ""
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if line.startswith("#"):
            section = line.lstrip("#").strip()
        fence = _FENCE.match(line)
        if fence is None:
            continue
        indent = len(fence["indent"])
        body = []
        for _, inner in lines:
            end = inner.strip()
            if end.startswith(fence["ticks"]) and not end.strip(fence["ticks"][0]):
                break
            body.append(inner[indent:] if not inner[:indent].strip() else inner.lstrip(" "))
        else:
            raise ValueError(f"{page}:{number}: this block is never closed")
        text_of_block = "".join(f"{each}\n" for each in body)
        found.append(Block(page, number, section, fence["language"].strip(), text_of_block))
    return found


def commands(page: str) -> list[str]:
    """The lines of a page's ``sh`` blocks, one command each."""
    return [line for block in blocks(page, "sh") for line in command_lines(block.text)]


def command_lines(text: str) -> list[str]:
    """The commands of a block: lines that end in a backslash go on, comments are none."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def inline(page: str, *programs: str) -> list[str]:
    """The commands of these programs that stand in a page's text, between back-ticks."""
    return [code for code in _spans(_text(page)) if code.partition(" ")[0] in programs]


def paths(page: str) -> list[str]:
    """Paths into the repository that stand in a page's text, between back-ticks."""
    return [code for code in _spans(_text(page)) if _PATH.fullmatch(code)]


def _spans(text: str) -> Iterator[str]:
    prose, fence = [], ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        if found and not fence:
            fence = found["ticks"]
        elif fence and line.strip() == fence:
            fence = ""
        elif not fence:
            prose.append(line)
    for paragraph in re.split(r"\n\s*\n", "\n".join(prose)):
        for span in _SPAN.finditer(paragraph):
            yield " ".join(span["code"].split())


@cache
def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")
