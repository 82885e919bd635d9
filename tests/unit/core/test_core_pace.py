"""How much is under way: never more than an eighth of what has come through, and no waiting for nothing."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.wire.pace import ALIGNED_BYTES, CAREFUL_BYTES, SHARE, UNPACED_BYTES, Pace

CHUNK = 1024 * 1024


class Link:
    """A sender's loop, and a peer that answers each question when it is told to."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.arrived = self.sent = 0
        self.questions: deque[int] = deque()

    def answer(self) -> None:
        """The peer answers the oldest question."""
        self.arrived = self.questions.popleft()
        self.pace.answered()

    def send(self, size: int) -> None:
        """As much as must be is waited for."""
        if self.pace.is_question_due(size):
            self.pace.asked()
            self.questions.append(self.sent)
        while self.pace.must_wait(size):
            assert self.questions, "waits for an answer to no question"
            self.answer()
        self.pace.sent(size)
        self.sent += size


@pytest.mark.parametrize("is_careful", [False, True])
def test_a_payload_is_sent_to_its_end_and_little_is_under_way(is_careful: bool) -> None:
    link = Link(Pace(CHUNK, is_careful=is_careful))
    least = CAREFUL_BYTES if is_careful else CHUNK
    while link.arrived // SHARE < UNPACED_BYTES:
        assert link.pace.piece_bytes() % ALIGNED_BYTES == 0
        link.send(link.pace.piece_bytes())
        assert link.sent - link.arrived <= max(least, link.arrived // SHARE)
    assert link.pace.piece_bytes() == CHUNK


def test_a_connection_that_has_carried_much_is_not_asked_any_more() -> None:
    link = Link(Pace(CHUNK, is_careful=True))
    while link.arrived // SHARE < UNPACED_BYTES:
        link.send(link.pace.piece_bytes())
    for _ in range(100):
        assert not link.pace.must_wait(CHUNK)
        link.pace.sent(CHUNK)
    assert not link.pace.is_question_due(CHUNK)


def test_what_shows_that_all_has_come_answers_every_question() -> None:
    pace = Pace(CHUNK, is_careful=True)
    for _ in range(100):
        # A report in one piece, and the next step, which the server sends only once it has it.
        assert not pace.is_question_due(300_000)
        assert not pace.must_wait(300_000)
        pace.sent(300_000)
        pace.all_arrived()


def test_an_answer_that_was_not_asked_for_counts_for_nothing() -> None:
    pace = Pace(CHUNK, is_careful=True)
    pace.sent(CAREFUL_BYTES)
    pace.answered()
    assert pace.is_question_due(1)


@given(
    sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=60),
    answers=st.lists(st.booleans()),
    is_careful=st.booleans(),
)
def test_nobody_waits_without_a_question(sizes: list[int], answers: list[bool], is_careful: bool) -> None:
    link = Link(Pace(CHUNK, is_careful=is_careful))
    for size, is_answered in zip(sizes, answers + [False] * len(sizes), strict=False):
        link.send(size)
        if is_answered and link.questions:
            link.answer()
    assert link.sent == sum(sizes)
