"""One way of a link under a clock that the test turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl_benchmarks.links.pipe import Link, Pipe

LINK = Link(rate=1000.0, delay=0.5)

GRAIN = 0.01


def test_a_byte_comes_after_its_turn_and_the_delay() -> None:
    pipe = Pipe(LINK)
    pipe.put(10.0, b"a" * 100)
    assert pipe.take(10.5) == b""
    assert pipe.take(10.5505) == b"a" * 50
    assert pipe.take(10.5505) == b""
    assert pipe.take(10.6005) == b"a" * 50
    assert pipe.due(11.0, GRAIN) is None


def test_what_comes_while_the_link_is_busy_waits_for_its_turn() -> None:
    pipe = Pipe(LINK)
    pipe.put(0.0, b"a" * 200)
    pipe.put(0.1, b"b" * 100)
    assert pipe.backlog(0.1) == pytest.approx(200)
    assert pipe.take(0.7) == b"a" * 200
    assert pipe.take(0.8) == b"b" * 100
    assert pipe.backlog(0.8) == 0


def test_an_idle_link_saves_nothing_up() -> None:
    pipe = Pipe(LINK)
    pipe.put(0.0, b"a" * 100)
    assert len(pipe.take(100.0)) == 100
    pipe.put(100.0, b"b" * 100)
    assert len(pipe.take(100.55001)) == 50


def test_who_looks_late_gets_all_that_was_due_and_delays_nothing_after_it() -> None:
    pipe = Pipe(LINK)
    for number in range(10):
        pipe.put(number * 0.1, bytes([number]) * 100)
    assert pipe.take(1.2001) == b"".join(bytes([number]) * 100 for number in range(7))
    assert len(pipe.take(1.5)) == 300


def test_when_to_look_next() -> None:
    pipe = Pipe(LINK)
    assert pipe.due(0.0, GRAIN) is None
    pipe.put(0.0, b"a" * 5)
    assert pipe.due(0.0, GRAIN) == pytest.approx(0.505), "all of a short message at once, and no later"
    pipe.put(0.0, b"a" * 500)
    assert pipe.due(0.0, GRAIN) == pytest.approx(0.51)
    assert pipe.due(0.7, GRAIN) == pytest.approx(0.71)


def test_the_end_comes_behind_the_last_byte() -> None:
    pipe = Pipe(LINK)
    pipe.put(0.0, b"a" * 100)
    pipe.end()
    assert not pipe.is_over
    pipe.take(0.59)
    assert not pipe.is_over
    pipe.take(0.6)
    assert pipe.is_over


@given(
    st.lists(st.tuples(st.floats(0, 2), st.binary(max_size=3000), st.floats(0, 2)), min_size=1, max_size=30),
    st.floats(1.0, 1e7),
    st.floats(0, 3),
)
def test_all_comes_out_once_in_order_and_never_faster_than_the_link(
    events: list[tuple[float, bytes, float]], rate: float, delay: float
) -> None:
    link = Link(rate, delay)
    pipe = Pipe(link)
    now, sent, received = 0.0, b"", b""
    for pause, data, later in events:
        now += pause
        pipe.put(now, data)
        sent += data
        now += later
        received += pipe.take(now)
        assert len(received) <= (now - delay) * rate + 1e-6 * len(sent) + 1e-6 or not received
    while (due := pipe.due(now, GRAIN)) is not None:
        assert due >= now or math.isclose(due, now)
        now = max(now, pipe.due(now, math.inf) or now)
        received += pipe.take(now)
    assert received == sent
