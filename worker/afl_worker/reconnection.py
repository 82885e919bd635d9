"""When a worker tries again, when it gives up, and what it makes of being cut: decided without a clock."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_EARLY_PAUSE_S = 1.0
EARLY_S = 60.0
"""A server that is started again is there within seconds: for so long after a step, pauses stay short."""

REASON_S = 30.0
"""Between two warnings for another reason."""

TOLD_AFTER = 3
"""So many connections in a row that are cut in the middle of a message are no accident."""


@dataclass(frozen=True)
class Carried:
    """What has gone through a connection, in bytes of messages, and how long it lasted, in seconds."""

    sent: int
    received: int
    seconds: float

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.sent + other.sent, self.received + other.received, self.seconds + other.seconds)

    def __str__(self) -> str:
        """As a message has it."""
        return (
            f"{self.sent / 1e6:.2f} MB sent and {self.received / 1e6:.2f} MB received in {self.seconds:.1f} s"
        )


class Reconnection:
    """Pauses that double while nothing gets better; all times are seconds of one monotonic clock.

    A worker gives up when it has got no further for ``give_up_after``; ``None`` for never. To be welcomed is
    not to get further: on a link that cuts every message short, each try begins well.
    """

    def __init__(self, give_up_after: float | None, now: float) -> None:
        self._give_up_after = give_up_after
        self._last_progress = now
        self._up: Hashable = None
        self._down: Hashable = None
        self._owes = False
        self._carried: Carried | None = None
        self.cut_short: list[Carried] = []
        """What the last connections carried that were cut in the middle of a message, one after the other."""
        self.pause = FIRST_PAUSE_S
        """Before the next try."""
        self.tries = 0
        """Those that have failed, one after the other, since this process last got further."""
        self._told = ""
        self._told_at = -math.inf

    @property
    def is_stuck(self) -> bool:
        """Whether the link cuts messages short, again and again."""
        return len(self.cut_short) >= TOLD_AFTER

    def welcomed(self, now: float, up: Hashable, *, owes: bool) -> None:
        """The server has said what it holds.

        Args:
            up: how far this process's reports have come.
            owes: whether one of them is not held to its end, and is sent now.
        """
        if self._carried is not None:
            self.cut_short = [*self.cut_short, self._carried] if owes else []
        self._carried = None
        if up != self._up:
            self._progressed(now)
        self._up, self._owes = up, owes

    def session_ended(self, now: float, down: Hashable, carried: Carried, *, is_receiving: bool) -> None:
        """A session in which the server had welcomed this process is over.

        Args:
            down: how far the steps that the server sends have come.
            is_receiving: whether one of them has come in part.
        """
        has_come = down != self._down
        if has_come or not (is_receiving or self._owes):
            self._progressed(now)
        if is_receiving:
            self.cut_short.append(carried)
        else:
            # Whether a report was cut short, the next Welcome says.
            self._carried = carried
        self._down, self._owes = down, False

    def failed(self, now: float, reason: str) -> bool:
        """Note a try that has failed; returns whether to warn: of the first, second, fourth, eighth, ....

        Of another reason than was told last, too, but of such no more than one in :data:`REASON_S`.
        """
        self.tries += 1
        is_new = reason != self._told and now - self._told_at >= REASON_S
        if self.tries.bit_count() != 1 and not is_new:
            return False
        self._told, self._told_at = reason, now
        return True

    def has_paused(self, now: float) -> None:
        """Note a pause that has passed; the next one is longer, up to a limit."""
        longest = LONGEST_EARLY_PAUSE_S if self.silence(now) < EARLY_S else LONGEST_PAUSE_S
        self.pause = min(2 * self.pause, longest)

    def silence(self, now: float) -> float:
        """Seconds since this process last got further."""
        return now - self._last_progress

    def left(self, now: float) -> float | None:
        """How long until this worker gives up, at least 0; ``None`` for never."""
        return None if self._give_up_after is None else max(0.0, self._give_up_after - self.silence(now))

    def _progressed(self, now: float) -> None:
        self._last_progress = now
        self.pause = FIRST_PAUSE_S
        self.tries = 0
