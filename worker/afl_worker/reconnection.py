"""When a worker without a session tries again, and when it gives up: decided without a clock."""

from __future__ import annotations

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_EARLY_PAUSE_S = 1.0
EARLY_S = 60.0
"""A server that is started again is there within seconds: for so long after a session, pauses stay short."""


class Reconnection:
    """Pauses that double while nothing gets better. All times are seconds of one monotonic clock.

    Args:
        give_up_after: how long a worker may be without a session; ``None`` for ever.

    Attributes:
        pause: before the next try.
    """

    def __init__(self, give_up_after: float | None, now: float) -> None:
        self._give_up_after = give_up_after
        self._last_session = now
        self.pause = FIRST_PAUSE_S

    def session_ended(self, now: float, *, has_progressed: bool) -> None:
        """A session in which the server had welcomed this process is over."""
        self._last_session = now
        if has_progressed:
            self.pause = FIRST_PAUSE_S

    def has_paused(self, now: float) -> None:
        """Note a pause that has passed; the next one is longer, up to a limit."""
        is_early = self.silence(now) < EARLY_S
        self.pause = min(2 * self.pause, LONGEST_EARLY_PAUSE_S if is_early else LONGEST_PAUSE_S)

    def silence(self, now: float) -> float:
        """Seconds since the last session ended."""
        return now - self._last_session

    def left(self, now: float) -> float | None:
        """How long until this worker gives up, at least 0; ``None`` for never."""
        return None if self._give_up_after is None else max(0.0, self._give_up_after - self.silence(now))
