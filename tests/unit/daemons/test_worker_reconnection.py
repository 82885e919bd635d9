"""When a worker without a session tries again, and when it gives up."""

from __future__ import annotations

import pytest

from afl_worker.reconnection import (
    EARLY_S,
    FIRST_PAUSE_S,
    LONGEST_EARLY_PAUSE_S,
    LONGEST_PAUSE_S,
    REASON_S,
    TOLD_AFTER,
    Carried,
    Reconnection,
)

LITTLE = Carried(1_000_000, 2_000, 5.0)


def pauses(reconnection: Reconnection, now: float, tries: int) -> list[float]:
    found = []
    for _ in range(tries):
        found.append(reconnection.pause)
        reconnection.has_paused(now)
    return found


def session(
    reconnection: Reconnection,
    now: float,
    *,
    up: object = 0,
    down: object = 0,
    owes: bool = False,
    is_receiving: bool = False,
) -> None:
    reconnection.welcomed(now, up, owes=owes)
    reconnection.session_ended(now, down, LITTLE, is_receiving=is_receiving)


def test_pauses_double_up_to_a_second_and_long_after_a_session_to_more() -> None:
    early = pauses(Reconnection(None, 100.0), 100.0 + EARLY_S - 1, 6)
    assert early == [FIRST_PAUSE_S, 0.2, 0.4, 0.8, LONGEST_EARLY_PAUSE_S, LONGEST_EARLY_PAUSE_S]
    assert pauses(Reconnection(None, 100.0), 100.0 + EARLY_S, 8)[-2:] == [LONGEST_PAUSE_S] * 2


def test_ever_fewer_failed_tries_are_told() -> None:
    reconnection = Reconnection(None, 0.0)
    told = [n for n in range(1, 200) if reconnection.failed(float(n), "nobody listens")]
    assert told == [1, 2, 4, 8, 16, 32, 64, 128]
    assert reconnection.tries == 199
    session(reconnection, 200.0)
    assert reconnection.failed(201.0, "nobody listens"), "it has got further meanwhile"


def test_another_reason_is_told_but_not_each_time() -> None:
    reconnection = Reconnection(None, 0.0)
    assert [reconnection.failed(float(n), f"reason {n}") for n in range(1, 8)].count(True) == 3
    assert reconnection.failed(4.0 + REASON_S, "another"), "the ninth try"
    assert not reconnection.failed(5.0 + REASON_S, "a third")
    assert not reconnection.failed(5.0 + 2 * REASON_S, "another")


def test_it_gives_up_so_long_after_its_last_session() -> None:
    reconnection = Reconnection(10.0, 0.0)
    assert [reconnection.left(now) for now in (0.0, 4.0, 10.0, 11.0)] == [10.0, 6.0, 0.0, 0.0]
    session(reconnection, 11.0)
    assert (reconnection.left(12.0), reconnection.silence(12.0)) == (9.0, 1.0)
    assert Reconnection(None, 0.0).left(1e9) is None


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_session_that_gets_no_further_is_no_progress(way: str) -> None:
    reconnection = Reconnection(10.0, 0.0)
    stuck = {"owes": True} if way == "up" else {"is_receiving": True}
    session(reconnection, 1.0, **stuck)
    pauses(reconnection, 1.0, 3)
    for now in (2.0, 3.0, 4.0, 5.0):
        session(reconnection, now, **stuck)
    assert reconnection.silence(6.0) == 5.0
    assert reconnection.pause == 8 * FIRST_PAUSE_S
    session(reconnection, 7.0, **{way: 1}, **stuck)
    assert reconnection.silence(7.0) == 0.0
    assert reconnection.pause == FIRST_PAUSE_S


def test_who_waits_for_the_others_gets_further_by_being_there() -> None:
    reconnection = Reconnection(10.0, 0.0)
    for now in range(1, 100, 9):
        session(reconnection, float(now), up="held", down="the same step")
        assert reconnection.silence(now) == 0.0
    assert reconnection.cut_short == []


@pytest.mark.parametrize("way", ["up", "down"])
def test_messages_that_are_cut_short_in_a_row_are_noticed_also_where_they_get_further(way: str) -> None:
    reconnection = Reconnection(None, 0.0)
    part = {"owes": True} if way == "up" else {"is_receiving": True}
    for count in range(TOLD_AFTER):
        assert not reconnection.is_stuck
        session(reconnection, float(count), **{way: count}, **part)
    reconnection.welcomed(9.0, 9, owes=True)
    assert reconnection.is_stuck
    assert reconnection.cut_short[:TOLD_AFTER] == [LITTLE] * TOLD_AFTER
    reconnection.session_ended(10.0, 9, LITTLE, is_receiving=False)
    reconnection.welcomed(11.0, 9, owes=False)
    assert not reconnection.is_stuck


def test_what_a_connection_carried_as_a_message_has_it() -> None:
    assert str(LITTLE) == "1.00 MB sent and 0.00 MB received in 5.0 s"
