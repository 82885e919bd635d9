"""What is wrong with a configuration, as data, and the one error that shows all of it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from afl.errors import ConfigError
from afl.outside import words

KeyPath: TypeAlias = "tuple[str | int, ...]"
"""Where a value stands: section names and keys from the root, and positions inside lists."""

_LONGEST_VALUE: Final = 80
_LONGEST_LINE: Final = 400
"""Characters: a message shows what a person wrote, which may be anything."""


@dataclass(frozen=True)
class Problem:
    """One value, or one missing value, that cannot be used."""

    key: KeyPath
    """Its path from the root; empty for the configuration as a whole."""
    found: str
    accepted: str
    nearest: str | None = None
    """The right name nearest to a wrong one, if any is near."""
    note: str | None = None
    where: str = ""
    """``file:line`` or the ``--set`` text; empty until the place is known."""

    def __str__(self) -> str:
        lines = [": ".join(filter(None, (self.where, dotted(self.key))))]
        told = {name: getattr(self, name) for name in ("found", "accepted", "nearest", "note")}
        lines += [f"    {name + ':':<11}{text}" for name, text in told.items() if text is not None]
        return "\n".join(words(line, _LONGEST_LINE) for line in lines)


class InvalidConfigError(ConfigError):
    """A configuration with one problem or more; the message shows each, and the file they are in."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
        super().__init__("\n\n".join([f"{source} cannot be used: {count}", *map(str, problems)]))


def dotted(key: KeyPath) -> str:
    """The key as it is written for ``--set``: ``algorithm.eta_w``."""
    return ".".join(str(part) for part in key)


def shown(value: object) -> str:
    """A value as a person would write it in the file, on one line, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return words(text, _LONGEST_VALUE)


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The one of ``names`` that a person most likely meant by ``name``, or None."""
    if not isinstance(name, str):
        return None
    name = name[:_LONGEST_VALUE]  # the search takes time for each of its characters
    # Without what people confuse most: case, and the kind of dash.
    dashes = str.maketrans("_ ", "--")
    by_folded = {candidate.casefold().translate(dashes): candidate for candidate in names}
    close = difflib.get_close_matches(name.casefold().translate(dashes), by_folded, n=1)
    return by_folded[close[0]] if close else None
