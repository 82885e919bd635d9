"""When a worker without a session tries again, and when it gives up."""

from __future__ import annotations

import pytest

from afl_worker.runtime import (
    EARLY_S,
    FIRST_PAUSE_S,
    LONGEST_EARLY_PAUSE_S,
    LONGEST_PAUSE_S,
    Reconnection,
)


def pauses(reconnection: Reconnection, now: float, tries: int) -> list[float]:
    found = []
    for _ in range(tries):
        found.append(reconnection.pause)
        reconnection.has_paused(now)
    return found


def test_pauses_double_up_to_a_second_and_long_after_a_session_to_more() -> None:
    early = pauses(Reconnection(None, 100.0), 100.0 + EARLY_S - 1, 6)
    assert early == [FIRST_PAUSE_S, 0.2, 0.4, 0.8, LONGEST_EARLY_PAUSE_S, LONGEST_EARLY_PAUSE_S]
    assert pauses(Reconnection(None, 100.0), 100.0 + EARLY_S, 8)[-2:] == [LONGEST_PAUSE_S] * 2


@pytest.mark.parametrize("has_progressed", [False, True])
def test_only_a_session_that_got_on_makes_pauses_short_again(has_progressed: bool) -> None:
    reconnection = Reconnection(None, 0.0)
    pauses(reconnection, 1.0, 3)
    reconnection.session_ended(2.0, has_progressed=has_progressed)
    assert reconnection.pause == (FIRST_PAUSE_S if has_progressed else 8 * FIRST_PAUSE_S)


def test_it_gives_up_so_long_after_its_last_session() -> None:
    reconnection = Reconnection(10.0, 0.0)
    assert [reconnection.left(now) for now in (0.0, 4.0, 10.0, 11.0)] == [10.0, 6.0, 0.0, 0.0]
    reconnection.session_ended(11.0, has_progressed=False)
    assert (reconnection.left(12.0), reconnection.silence(12.0)) == (9.0, 1.0)
    assert Reconnection(None, 0.0).left(1e9) is None
