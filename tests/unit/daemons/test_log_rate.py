"""One line a second of each kind, and none that is not counted."""

from __future__ import annotations

from afl_server.federation.run import MOST_KINDS, LogRate, and_left_out


def test_one_line_a_second_of_a_kind() -> None:
    rate = LogRate()
    told = [rate.left_out("a", now / 10) for now in range(25)]
    assert told == [0, *[None] * 9, 9, *[None] * 9, 9, *[None] * 4]
    assert rate.left_out("b", 2.4) == 0, "another kind is another matter"
    assert rate.left_out("a", 9.0) == 4


def test_kinds_that_a_peer_makes_up_are_one_kind() -> None:
    rate = LogRate()
    told = [rate.left_out(f"frame of {number} bytes", 5.0) for number in range(1000)]
    assert told == [*[0] * (MOST_KINDS + 1), *[None] * (1000 - MOST_KINDS - 1)]
    # A second later there is room again, and what was left out is told.
    written = [rate.left_out(f"garbage {number}", 6.0) for number in range(1000)]
    counts = [count for count in written if count is not None]
    assert len(counts) <= MOST_KINDS + 1
    assert sum(counts) == 1000 - MOST_KINDS - 1


def test_what_is_left_out_of_a_kind_that_is_forgotten_is_told_with_the_others() -> None:
    rate = LogRate()
    for _ in range(4):
        rate.left_out("first", 0.0)
    written = [rate.left_out(f"kind {number}", 2.0) for number in range(2 * MOST_KINDS)]
    assert sum(count for count in written if count) == 3


def test_what_a_message_says_of_it() -> None:
    assert and_left_out(0) == ""
    assert and_left_out(828) == " (and 828 more like it)"
