"""docs/architecture.md walks through functions that there are, each called where the page says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
ENTRY = re.compile(
    r"^\d+\. `(?P<file>[\w/]+\.py):(?P<name>[\w.]+)`(?:, called by `(?P<caller>[\w.]+)`)?", re.MULTILINE
)


class Hop(NamedTuple):
    section: str
    file: str
    name: str
    caller: str
    """As it is named in one of the page's files; empty for the entry before."""


def walk() -> list[Hop]:
    way = PAGE.read_text(encoding="utf-8").partition("## The way of a gradient")[2]
    hops = []
    for section in re.split(r"^### ", way, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        text = re.sub(r"\n {3,}", " ", text)
        before = ""
        for entry in ENTRY.finditer(text):
            hops.append(Hop(title, entry["file"], entry["name"], entry["caller"] or before))
            before = entry["name"]
        assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == len(ENTRY.findall(text)), title
    return hops


@cache
def functions(file: str) -> dict[str, ast.AST]:
    """Those of a file, by their names in it."""
    found: dict[str, ast.AST] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                found[name] = child
                look(child, f"{name}.")

    look(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return found


def mentions(node: ast.AST, name: str) -> bool:
    """By its name, or as an attribute that holds it: ``self._deliver`` is ``Shell.deliver``."""
    return any(
        (isinstance(each, ast.Attribute) and each.attr in {name, f"_{name}"})
        or (isinstance(each, ast.Name) and each.id == name)
        for each in ast.walk(node)
    )


WALK = walk()
FILES = sorted({hop.file for hop in WALK})


def test_the_page_walks_both_ways_on_both_sides_and_to_the_masks() -> None:
    assert len({hop.section for hop in WALK}) == 5
    assert len(WALK) > 40


@pytest.mark.parametrize("hop", WALK, ids=lambda hop: f"{hop.section}: {hop.name}")
def test_each_function_is_there_and_is_called_where_the_page_says(hop: Hop) -> None:
    assert hop.name in functions(hop.file), f"{hop.file} has no {hop.name}"
    if not hop.caller:
        return
    callers = [functions(file)[hop.caller] for file in FILES if hop.caller in functions(file)]
    assert callers, f"no file of the page has {hop.caller}"
    last = hop.name.rpartition(".")[2]
    assert any(mentions(caller, last) for caller in callers), f"{hop.caller} does not call {hop.name}"


def test_every_other_name_on_the_page_is_of_one_of_its_files() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## The way of a gradient")[2]
    named = set(re.findall(r"`([A-Za-z_]+\.[A-Za-z_]+)`", text))
    known = {name for file in FILES for name in functions(file)}
    assert named <= known, sorted(named - known)
