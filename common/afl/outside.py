"""Text from outside, made fit for any sink: a log, a terminal, a page.

Whatever a peer words, and whatever a file or a server says that is only shown, passes through here as it
arrives; the log's lines pass once more as they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MOST_WORDS: Final = 300
"""Characters of a name, a version or a reason."""

MOST_OF_REASON: Final = 1000
"""Characters of why something failed or ended."""

MOST_OF_TRACEBACK: Final = 6000

_SET_IN: Final = "    "


def printable(text: str) -> str:
    """The text in one line, with what would not be seen as itself escaped as Python does it: escape
    sequences, ends of lines, marks that turn the direction of writing, characters of no width."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines(text: str) -> str:
    """A text of several lines, each of them printable."""
    return text if text.isprintable() else "\n".join(map(printable, text.expandtabs(4).split("\n")))


def words(text: str, most: int = MOST_WORDS) -> str:
    """At most ``most`` printable characters of a text, in one line."""
    # Cut before it is looked at: a peer may send megabytes.
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def paragraph(text: str, most: int) -> str:
    """At most about ``most`` printable characters of a text of several lines, its beginning and its end."""
    if len(text) > most:
        left_out = f"... {len(text) - most} characters left out ..."
        text = f"{text[: most // 3]}\n{left_out}\n{text[-(most - most // 3) :]}"
    shown = lines("\n".join(line for line in text.split("\n") if line.strip()))
    return shown if len(shown) <= 2 * most else f"{shown[: 2 * most]}..."


def continued(text: str) -> str:
    """A printable text whose further lines are set in, so that none can be taken for a line of its own."""
    return lines(text).replace("\n", f"\n{_SET_IN}")


def plain(value: Any) -> Any:
    """A value as JSON has it, with all its texts and keys printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
