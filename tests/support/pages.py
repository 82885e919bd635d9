"""The project's pages, and what they show: fenced blocks, and commands in their text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sybil import Document, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).resolve().parents[2]

PROJECT = "cli/afl_cli/project/README.md.template"
"""The page of a project that ``afl new`` makes."""

_LEXER = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
_PATH = re.compile(
    r"(?:benchmarks|cli|common/afl|deploy|docs|lab|proto|reproduction|server/afl_server|tests|tools"
    r"|worker/afl_worker)/[\w./*-]+"
)
_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)(?P<code>.+?)(?<!`)\1(?!`)", re.DOTALL)
_NAME = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the page's path in the repository.
        line: of the opening fence, from 1.
        language: after the fence; empty where there is none.
        text: what is between the fences, without the indentation of the opening one.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that the first line says it is; empty if it says none."""
        named = _NAME.match(self.text)
        return named[1] if named else ""


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
    text = _text(page)
    found = [
        Block(
            page, text.count("\n", 0, region.start) + 1, region.lexemes["language"], region.lexemes["source"]
        )
        for region in _regions(page)
    ]
    return [block for block in found if language in {"", block.language}]


def commands(page: str) -> list[str]:
    """The lines of a page's ``sh`` blocks, one command each."""
    return [line for block in blocks(page, "sh") for line in command_lines(block.text)]


def command_lines(text: str) -> list[str]:
    """The commands of a block: lines that end in a backslash go on, comments are none."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def inline(page: str, *programs: str) -> list[str]:
    """The commands of these programs that stand in a page's text, between back-ticks."""
    return [code for code in _spans(page) if code.partition(" ")[0] in programs]


def paths(page: str) -> list[str]:
    """Paths into the repository that stand in a page's text, between back-ticks."""
    return [code for code in _spans(page) if _PATH.fullmatch(code)]


def _spans(page: str) -> Iterator[str]:
    prose = _text(page)
    for region in reversed(_regions(page)):
        prose = prose[: region.start] + prose[region.end :]
    for paragraph in re.split(r"\n\s*\n", prose):
        for span in _SPAN.finditer(paragraph):
            yield " ".join(span["code"].split())


def _regions(page: str) -> list[Region]:
    return sorted(_LEXER(Document(_text(page), page)), key=lambda region: region.start)


@cache
def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")
