"""Log lines that strangers can bring about: one a second of each kind, however many there are."""

from __future__ import annotations

from typing import Final

PERIOD_S: Final = 1.0
"""Between two lines of a kind."""

MOST_KINDS: Final = 64
"""Told apart at once; what comes besides is one kind: a peer may make up as many as it likes."""

_OTHERS: Final = ""


class LogRate:
    """Which lines are to be written."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def left_out(self, kind: str, now: float) -> int | None:
        """How many lines of this kind were left out since the last one; ``None`` if this one is to be too.

        Args:
            now: of a clock that does not go back, in seconds.
        """
        if kind not in self._said_at and len(self._said_at) >= MOST_KINDS:
            self._forget(now)
            if len(self._said_at) >= MOST_KINDS:
                kind = _OTHERS
        said_at = self._said_at.get(kind)
        if said_at is not None and now - said_at < PERIOD_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        self._said_at[kind] = now
        return self._left_out.pop(kind, 0)

    def _forget(self, now: float) -> None:
        """What was said long ago; what was left out of it is told with the others."""
        for kind in [kind for kind, at in self._said_at.items() if now - at >= PERIOD_S and kind != _OTHERS]:
            del self._said_at[kind]
            left = self._left_out.pop(kind, 0)
            if left:
                self._left_out[_OTHERS] = self._left_out.get(_OTHERS, 0) + left


def and_left_out(count: int) -> str:
    """What a message ends with."""
    return f" (and {count} more like it)" if count else ""
