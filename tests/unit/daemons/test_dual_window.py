"""The window of dual weights that a status shows."""

import json

import numpy as np
import pytest

from afl_server.pages.dual_window import COLUMNS, MOST_VALUES, POINTS, SHOWN_WORKERS, DualWindow


def filled(rounds: int, workers: int, block: int) -> DualWindow:
    """In a block, worker i's weight grows with i and with the rounds since the restart."""
    history = DualWindow(workers, block)
    for round_ in range(1, rounds + 1):
        since = (round_ - 1) % block if block else round_
        weights = 1 + since * np.arange(workers)
        history.add(round_, weights / weights.sum())
    return history


def test_before_the_first_round_there_is_nothing() -> None:
    assert DualWindow(3, 5).view() == {"rounds": [], "restarts": [], "workers": [], "weights": []}


def test_a_point_a_round_while_there_is_room() -> None:
    view = filled(24, 3, 10).view()
    assert view["rounds"] == list(range(1, 25))
    assert view["restarts"] == [10, 20]
    assert view["workers"] == [0, 1, 2]
    assert len(view["weights"]) == 3
    for point in view["restarts"]:
        assert [line[point] for line in view["weights"]] == pytest.approx([1 / 3] * 3, abs=1e-5)
    assert view["weights"][2][9] > view["weights"][2][1] > 1 / 3


@pytest.mark.parametrize(("rounds", "block"), [(61, 7), (150, 13), (2000, 45), (10_000, 100), (5000, 1)])
def test_a_long_run_has_its_last_blocks(rounds: int, block: int) -> None:
    view = filled(rounds, 4, block).view()
    assert len(view["rounds"]) <= COLUMNS
    assert all(len(line) == len(view["rounds"]) for line in view["weights"])
    assert view["rounds"][-1] <= rounds < view["rounds"][-1] + 400
    assert len(view["restarts"]) >= 1
    ends = [*view["rounds"][1:], rounds + 1]
    for point, (first, end) in enumerate(zip(view["rounds"], ends, strict=True)):
        has_restart = any(round_ > 1 and (round_ - 1) % block == 0 for round_ in range(first, end))
        assert (point in view["restarts"]) == has_restart


def test_weights_that_never_restart_have_no_marks() -> None:
    assert filled(50, 3, 0).view()["restarts"] == []


def test_of_many_workers_those_with_most_weight() -> None:
    view = filled(30, 1000, 10).view()
    assert view["workers"] == list(range(1000 - SHOWN_WORKERS, 1000))
    assert len(json.dumps(view)) < 6000


def test_lines_keep_their_places() -> None:
    """Up to ten workers all have one, by id; of more, a line changes hands for a clear reason only."""
    few = DualWindow(10, 0)
    few.add(1, np.linspace(0.19, 0.01, 10))
    assert few.view()["workers"] == list(range(10))
    many = DualWindow(20, 0)
    weights = np.full(20, 1 / 20)
    many.add(1, weights)
    assert many.view()["workers"] == list(range(SHOWN_WORKERS))
    weights[15] *= 1.2
    many.add(2, weights)
    assert many.view()["workers"] == list(range(SHOWN_WORKERS)), "a little more is no reason"
    weights[15] *= 3
    many.add(3, weights)
    assert 15 in many.view()["workers"]
    assert len(set(many.view()["workers"]) & set(range(SHOWN_WORKERS))) == SHOWN_WORKERS - 1


def test_its_memory_is_bounded() -> None:
    history = DualWindow(MOST_VALUES, 1000)
    for round_ in range(1, 6):
        history.add(round_, np.full(MOST_VALUES, 1 / MOST_VALUES))
    assert history.view()["rounds"] == [4, 5]


def test_the_page_has_the_last_rounds_one_by_one() -> None:
    window = DualWindow(2, block=50)
    for number in range(1, 1001):
        window.add(number, np.array([number / 1000, 1 - number / 1000]))
    rounds, weights = window.curves([1])
    assert rounds == list(range(1001 - POINTS, 1001))
    assert weights[:, 0].tolist() == pytest.approx([1 - number / 1000 for number in rounds])


@pytest.mark.parametrize("block", [300, 1000, 5000])
def test_of_long_blocks_every_few_rounds_are_kept_and_every_restart_is_seen(block: int) -> None:
    window = filled(9 * block, 3, block)
    rounds, weights = window.curves([0, 2])
    assert len(rounds) == len(weights) <= POINTS
    (spacing,) = set(np.diff(rounds))
    assert rounds[-1] - rounds[0] >= 3 * block - 2 * spacing
    assert rounds[-1] > 9 * block - spacing
    view = window.view()
    assert len(view["restarts"]) in {3, 4}
    for point in view["restarts"]:
        heavy = view["weights"][2]
        assert heavy[point] < heavy[point - 1], "the heaviest falls back at a restart"


def test_before_the_first_round_the_page_has_no_point() -> None:
    rounds, weights = DualWindow(3, 5).curves([0, 2])
    assert (rounds, weights.shape) == ([], (0, 2))
