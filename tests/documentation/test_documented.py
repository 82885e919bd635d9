"""Every page that shows commands or code is followed, and what it says in passing is so too."""

from __future__ import annotations

import shlex

import pytest
from documentation_exempt import in_passing
from documentation_plans import NOT_RUN, PAGES, REPLACEMENTS
from documentation_reader import NotRun, PageError, Replacement, parse

from support.pages import ROOT, blocks, commands, inline, pages, paths

WITH_BLOCKS = [page for page in pages() if blocks(page)]


def test_every_page_with_blocks_is_followed() -> None:
    """A new page with blocks needs an entry in PAGES of documentation_plans.py."""
    assert set(WITH_BLOCKS) == set(PAGES)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_says_its_language(page: str) -> None:
    """What is no code is ``text``."""
    assert not [block.where for block in blocks(page) if not block.language]


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda each: f"{each.page}: {each.old[:40]}")
def test_what_is_replaced_is_there(replacement: Replacement) -> None:
    assert replacement.why
    assert any(replacement.is_in(block.text) for block in blocks(replacement.page)), replacement.old


@pytest.mark.parametrize("exempt", NOT_RUN, ids=lambda each: each.words)
def test_what_is_not_run_is_there(exempt: NotRun) -> None:
    assert exempt.why
    shown = [(page, shlex.split(line, comments=True)) for page in WITH_BLOCKS for line in commands(page)]
    assert any(exempt.covers(page, words) for page, words in shown), exempt.words


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_is_planned_with_is_there(page: str) -> None:
    plan, found = PAGES[page], blocks(page)
    assert set(plan.back_at) <= {block.section for block in found}
    first_lines = {block.text.partition("\n")[0].strip() for block in found}
    assert plan.pictures.keys() <= first_lines
    for beginning in plan.whole_texts:
        assert any(line.startswith(beginning) for line in first_lines), beginning


def test_every_path_in_passing_is_there() -> None:
    named = [(page, path) for page in pages() for path in paths(page)]
    assert len(named) > 20
    assert not [f"{page}: {path}" for page, path in named if not list(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_commands_shown_take_their_options(page: str) -> None:
    """Before anything is replaced."""
    for line in commands(page):
        parse(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", pages())
def test_commands_in_passing_are_commands(page: str) -> None:
    """Options, targets, extras and modules that a page names between back-ticks."""
    wrong = []
    for line in inline(page, "afl", "afl-server", "afl-worker", "make", "pip", "python"):
        try:
            in_passing(line)
        except PageError as error:
            wrong.append(f"{line}: {error}")
    assert not wrong, "\n".join(wrong)
