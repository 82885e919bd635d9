"""The ordered sum: the same bits for every order of arrival and every cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.sums import OrderedSum

Messages = list[NDArray[np.float32]]
Arrival = tuple[int, NDArray[np.float32]]


def sequential(messages: Messages) -> NDArray[np.float32]:
    """``((0 + c_0) + c_1) + ...``, one rounding each."""
    total = np.zeros_like(messages[0])
    for message in messages:
        total = (total + message).astype(np.float32)
    return total


def bits(values: NDArray[np.float32]) -> bytes:
    return values.tobytes()


@st.composite
def messages_and_arrivals(draw: st.DrawFn) -> tuple[Messages, list[Arrival]]:
    """Workers' messages over many magnitudes, and their pieces in an order that keeps each worker's own."""
    workers, length = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    magnitudes = 10.0 ** random.integers(-30, 30, (workers, length))
    messages = list((random.standard_normal((workers, length)) * magnitudes).astype(np.float32))
    pieces: list[list[NDArray[np.float32]]] = []
    for message in messages:
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
        pieces.append(np.split(message, cuts))
    order = draw(st.permutations([worker for worker in range(workers) for _ in pieces[worker]]))
    return messages, [(worker, pieces[worker].pop(0)) for worker in order]


@given(case=messages_and_arrivals())
def test_total_is_the_sequential_sum_for_every_arrival(case: tuple[Messages, list[Arrival]]) -> None:
    messages, arrivals = case
    folded = OrderedSum(len(messages), len(messages[0]))
    for _ in range(2):
        for worker, piece in arrivals:
            folded.add(worker, piece)
        assert folded.done == len(messages[0])
        assert bits(folded.total) == bits(sequential(messages))
        folded.reset()


@given(case=messages_and_arrivals())
def test_what_is_final_and_what_waits_is_known_at_every_moment(case: tuple[Messages, list[Arrival]]) -> None:
    messages, arrivals = case
    workers = len(messages)
    folded = OrderedSum(workers, len(messages[0]))
    right = sequential(messages)
    received = [0] * workers
    for worker, piece in arrivals:
        before = min(received[:worker], default=len(right) + 1)
        # Who has sent everything has nothing that could wait.
        assert folded.would_wait(worker) == (before <= received[worker] < len(right))
        folded.add(worker, piece)
        received[worker] += len(piece)
        in_the_sum = [min(received[: index + 1]) for index in range(workers)]
        assert [folded.received(index) for index in range(workers)] == received
        assert folded.done == in_the_sum[-1]
        assert folded.waiting_bytes == 4 * (sum(received) - sum(in_the_sum))
        assert bits(folded.total[: folded.done]) == bits(right[: folded.done])


def test_the_order_is_ascending_worker_id_and_it_matters() -> None:
    # In float32, (1 + 2^24) - 2^24 is 0 while (2^24 - 2^24) + 1 is 1.
    values = [np.float32(1), np.float32(2**24), np.float32(-(2**24))]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        folded = OrderedSum(3, 1)
        for worker in order:
            folded.add(worker, np.array([values[worker]]))
        assert folded.total.tolist() == [0.0]
    renumbered = OrderedSum(3, 1)
    for worker, index in enumerate((1, 2, 0)):
        renumbered.add(worker, np.array([values[index]]))
    assert renumbered.total.tolist() == [1.0]


def test_reset_forgets_a_sum_cut_in_the_middle() -> None:
    folded = OrderedSum(2, 3)
    folded.add(0, np.array([1, 2], np.float32))
    folded.add(1, np.array([3, 4, 5], np.float32))
    assert folded.waiting_bytes == 4
    folded.reset()
    assert (folded.done, folded.waiting_bytes, folded.received(0), folded.received(1)) == (0, 0, 0, 0)
    assert folded.would_wait(1)
    folded.add(0, np.array([10, 20, 30], np.float32))
    folded.add(1, np.array([1, 1, 1], np.float32))
    assert folded.total.tolist() == [11, 21, 31]


def test_the_first_worker_never_waits_and_pieces_are_not_changed() -> None:
    folded = OrderedSum(2, 2)
    assert not folded.would_wait(0)
    piece = np.array([1, 2], np.float32)
    piece.flags.writeable = False
    folded.add(1, piece)
    folded.add(0, piece)
    assert folded.total.tolist() == [2, 4]
    assert piece.tolist() == [1, 2]


def test_more_than_a_worker_s_share_is_a_mistake() -> None:
    folded = OrderedSum(1, 2)
    with pytest.raises(AssertionError):
        folded.add(0, np.zeros(3, np.float32))
    assert folded.received(0) == 0
