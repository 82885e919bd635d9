"""Names of sites: what they may be, and the words by which people read of a worker.

A worker's id is what everything is kept by; its site's name is only ever shown beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

Names: TypeAlias = Mapping[int, str]
"""By worker, of those that have one; one that a worker has given itself stands in quotes."""

# Latin letters: they take one column each, and do not turn the direction of writing.
_LETTER: Final = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
_NAME: Final = re.compile(f"[{_LETTER}](?:[{_LETTER} ._-]{{0,30}}[{_LETTER}])?")
_WORKER: Final = re.compile(r"\bworker ([0-9]{1,10})\b")

ACCEPTED: Final = (
    "1 to 32 Latin letters, digits, spaces, dots, hyphens and underscores, a letter or a digit at both ends"
)


def is_name(text: str) -> bool:
    """Whether a site may be called so."""
    return _NAME.fullmatch(text) is not None


def own_word(name: str) -> str:
    """A name that a worker has given itself, as it is shown."""
    return f"'{name}'"


def named(worker: object, names: Names) -> str:
    """A worker in words: ``2 (north)``, or ``2``."""
    name = names.get(worker) if isinstance(worker, int) else None
    return str(worker) if name is None else f"{worker} ({name})"


def with_names(text: str, names: Names) -> str:
    """A message in which each ``worker 2`` is ``worker 2 (north)``."""
    return _WORKER.sub(lambda found: f"worker {named(int(found[1]), names)}", text) if names else text


def names_of(listed: Mapping[str, Any]) -> Names:
    """The names in ``sites`` of a state, a summary or an evaluation's line, by worker."""
    sites: Iterable[object] = listed.get("sites") or ()
    return {worker: str(name) for worker, name in enumerate(sites) if name}
