"""What is said of a site that is served worst and weighted least, or whose records are learned by heart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from afl.core.rounds.policy import RankBy
from afl.core.rounds.site_watch import SiteWatch


def told(
    watch: SiteWatch,
    round_: int,
    *,
    weights: Sequence[float] = (1 / 3, 1 / 3, 1 / 3),
    training: Sequence[float] = (1.0, 1.0, 1.0),
    test: Sequence[float] = (1.0, 0.5, 0.5),
    **other: Sequence[float],
) -> tuple[str, ...]:
    """Two rounds, of which the second begins a block with even weights, and an evaluation."""
    watch.take_round(np.array(weights), np.array(training))
    watch.take_round(np.full(3, 1 / 3), np.array(training))
    metrics = [
        {"loss": loss} | {name: values[worker] for name, values in other.items()}
        for worker, loss in enumerate(test)
    ]
    return watch.take_evaluation(round_, metrics)


BELOW, ABOVE = (0.2, 0.4, 0.4), (0.5, 0.25, 0.25)


def test_the_worst_that_is_weighted_below_even_is_named_at_the_fifth_evaluation_in_a_row() -> None:
    watch = SiteWatch(3)
    assert [told(watch, 10 * n, weights=BELOW) for n in range(1, 5)] == [()] * 4
    (warning,) = told(watch, 50, weights=BELOW)
    assert warning.startswith(
        "worker 0 is served worst (loss 1), and weighted below even (0.267; 1/m is 0.333), at the last 5 "
        "evaluations; let the weights follow held-out records: task.held_out, algorithm.dual_loss"
    )
    assert told(watch, 60, weights=ABOVE) == ()
    assert [told(watch, 70 + n, weights=BELOW) for n in range(4)] == [()] * 4, "it begins anew"


def test_another_worst_begins_another_row() -> None:
    watch = SiteWatch(3)
    for n in range(4):
        told(watch, n + 1, weights=BELOW)
    assert told(watch, 5, weights=(0.2, 0.2, 0.6), test=(0.5, 1.0, 0.5)) == ()
    assert told(watch, 6, weights=BELOW) == ()


def test_accuracy_says_who_is_worst_where_there_is_any() -> None:
    watch = SiteWatch(3)
    accuracy = (0.9, 0.8, 0.95)
    found = [told(watch, n, weights=(0.4, 0.2, 0.4), accuracy=accuracy) for n in range(1, 6)]
    assert found[-1][0].startswith("worker 1 is served worst (accuracy 0.8)")


def test_the_metric_that_ranks_says_who_is_worst() -> None:
    watch = SiteWatch(3, by=RankBy("auc", higher_is_better=True))
    values = {"accuracy": (0.1, 0.8, 0.95), "auc": (0.9, 0.8, 0.4)}
    found = [told(watch, n, weights=(0.4, 0.4, 0.2), **values) for n in range(1, 6)]
    assert found[-1][0].startswith("worker 2 is served worst (auc 0.4)")


def test_weights_that_hardly_move_and_means_of_models_are_not_told() -> None:
    for watch, weights in (
        (SiteWatch(3), (0.333, 0.3335, 0.3335)),
        (SiteWatch(3, has_dual_weights=False), BELOW),
    ):
        assert not any(told(watch, n, weights=weights) for n in range(1, 9))


@pytest.mark.parametrize("kind", ["test", "held-out"])
def test_a_loss_that_rises_while_training_falls_is_told(kind: str) -> None:
    watch = SiteWatch(3)
    found = []
    for n in range(1, 9):
        rising = (0.5 + 0.02 * n, 0.5, 0.4)
        own = {"test": rising} if kind == "test" else {"held_out_loss": rising}
        found.append(told(watch, 10 * n, training=(1.0 - 0.1 * n, 0.5, 0.5), **own))
    assert found[:5] == [()] * 5
    assert found[5][0].startswith(
        f"worker 0's {kind} loss rises, from 0.52 after round 10 to 0.62, while its training loss falls, "
        "from 0.9 to 0.4: the model learns its records by heart; hold records out and stop earlier"
    )
    assert found[-1], "it is still so"
    own = {"test": (0.4, 0.4, 0.4)} if kind == "test" else {"held_out_loss": (0.4, 0.4, 0.4)}
    assert told(watch, 90, training=(0.1, 0.5, 0.5), **own) == ()


@pytest.mark.parametrize(
    ("training", "test"),
    [
        pytest.param([0.5] * 9, [0.5 + 0.02 * n for n in range(9)], id="training does not fall"),
        pytest.param([1 - 0.1 * n for n in range(9)], [0.5 + 0.002 * n for n in range(9)], id="hardly rises"),
        pytest.param([1 - 0.1 * n for n in range(9)], [0.5 - 0.02 * n for n in range(9)], id="falls"),
    ],
)
def test_other_losses_are_not_told(training: list[float], test: list[float]) -> None:
    watch = SiteWatch(3)
    for n in range(9):
        own = (training[n], 0.5, 0.5), (test[n], 0.1, 0.1)
        assert told(watch, n + 1, training=own[0], test=own[1]) == ()


def test_with_held_out_losses_in_the_rounds_nothing_is_known_of_training() -> None:
    watch = SiteWatch(3, dual_loss_held_out=True)
    for n in range(9):
        assert not told(watch, n + 1, training=(1 - 0.1 * n, 0.5, 0.5), test=(0.5 + 0.02 * n, 0.1, 0.1))


def test_losses_with_noise_say_nothing_of_training_and_nothing_can_be_held_out() -> None:
    watch = SiteWatch(3, noisy_losses=True)
    for n in range(9):
        assert not told(watch, n + 1, training=(1 - 0.1 * n, 0.5, 0.5), test=(0.5 + 0.02 * n, 0.1, 0.1))
    watch = SiteWatch(3, noisy_losses=True)
    found = [told(watch, n, weights=BELOW) for n in range(1, 6)][-1]
    assert (
        "the noise of privacy.records, which a larger task.batch_size steadies (docs/records.md)" in found[0]
    )


def test_of_several_the_one_that_rises_most_is_named() -> None:
    watch = SiteWatch(3)
    for n in range(7):
        down = 1.0 - 0.1 * n
        found = told(watch, n + 1, training=(down, down, down), test=(0.5 + 0.02 * n, 0.5 + 0.05 * n, 0.4))
    assert found[0].startswith("worker 1's test loss rises (so do 1 others')")


def test_hidden_absent_and_huge_losses_do_no_harm() -> None:
    watch = SiteWatch(3)
    for n in range(1, 9):
        watch.take_round(np.full(3, np.nan), np.full(3, np.nan))
        assert watch.take_evaluation(n, [{}, {}, {}]) == ()
    for n in range(1, 9):
        for loss in (1e308, -1e308):
            watch.take_round(np.full(3, 1 / 3), np.full(3, loss))
            watch.take_round(np.full(3, 1 / 3), np.full(3, loss))
        watch.take_evaluation(n, [{}, {"loss": 1e308}, {"loss": -1e308}])


def test_a_state_goes_on_where_it_was() -> None:
    one, other = SiteWatch(3), SiteWatch(3)
    for n in range(1, 12):
        one.take_round(np.array(BELOW), np.array((1.0 - 0.05 * n, 0.5, 0.5)))
        other.take_round(np.array(BELOW), np.array((1.0 - 0.05 * n, 0.5, 0.5)))
        again = SiteWatch(3)
        again.restore(other.state())
        other = again
        test = (0.6 + 0.02 * n, 0.5, 0.4)
        assert told(one, n, weights=BELOW, test=test) == told(other, n, weights=BELOW, test=test)
    assert len(told(other, 20, weights=BELOW, training=(0.1, 1.0, 1.0), test=(1.0, 0.5, 0.4))) == 2
