"""The public names of ``afl`` with a line of each, for readers of the repository; the site shows more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import afl
import afl.theory

if TYPE_CHECKING:
    from griffe import Object

OTHERS = ("afl.runs.tracking.tracker.Tracker",)
"""What is public beside the names of ``afl`` and ``afl.theory``."""


def names() -> list[str]:
    """All public names, in the reference's order: of ``afl``, then the others, then of ``afl.theory``."""
    return [
        *(f"afl.{name}" for name in afl.__all__),
        *OTHERS,
        *(f"afl.theory.{name}" for name in afl.theory.__all__),
    ]


def api_table() -> str:
    """Each public name, and the first sentence of its docstring.

    Raises:
        ValueError: if a name has no docstring.
    """
    # Only developers have it.
    import griffe  # noqa: PLC0415

    from afl_tools.docs.roles import as_markdown  # noqa: PLC0415

    package = griffe.load("afl", search_paths=[Path(afl.__file__).parents[1]], resolve_aliases=True)
    rows = ["| name | what it is |", "|---|---|"]
    for name in names():
        found: Object = package[name.removeprefix("afl.")]
        if found.docstring is None:
            raise ValueError(f"{name} has no docstring")
        sentence = as_markdown(first_sentence(found.docstring.value)).replace("|", "\\|")
        rows.append(f"| `{name}` | {sentence} |")
    return "\n".join(rows) + "\n"


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring's first paragraph, in one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z:`])", paragraph)[0]
