"""When a run ends because its worst site no longer gets better."""

from __future__ import annotations

import json

import pytest

from afl.config import config_from_mapping
from afl.core.rounds.patience import Patience
from afl.core.rounds.policy import RankBy
from afl.errors import ConfigError


def seen(patience: Patience, *worst: float, start: int = 1) -> list[bool]:
    """Evaluations of two sites, of which the second is served better; what each said."""
    return [
        patience.see(10 * (start + index), [{"held_out_loss": loss}, {"held_out_loss": loss / 2}])
        for index, loss in enumerate(worst)
    ]


def test_it_is_over_after_so_many_that_are_no_better_in_a_row() -> None:
    patience = Patience(3)
    assert seen(patience, 2.0, 1.5, 1.5, 1.6, 1.4, 1.5, 1.5) == [True, True, False, False, True, False, False]
    assert not patience.is_over
    assert (patience.best, patience.best_round, patience.since) == (1.4, 50, 2)
    assert seen(patience, 1.4, start=8) == [False]
    assert patience.is_over
    expected = "3 evaluations brought no better worst held_out_loss than 1.4 after round 50"
    assert patience.reason.startswith(expected)


def test_of_a_metric_of_which_more_is_better_the_lowest_is_the_worst() -> None:
    patience = Patience(1, RankBy("auc", higher_is_better=True))
    first, second = ([{"held_out_auc": value}, {"held_out_auc": 0.9}] for value in (0.6, 0.7))
    assert patience.see(1, first)
    assert patience.see(2, second)
    assert not patience.see(3, first)
    assert patience.is_over


def test_an_evaluation_without_a_site_is_no_evaluation() -> None:
    patience = Patience(1)
    assert seen(patience, 2.0) == [True]
    assert not patience.see(20, [{"held_out_loss": 1.0}, {}])
    assert not patience.is_over
    assert patience.best == 2.0


def test_a_site_that_does_not_report_the_metric_is_not_ranked() -> None:
    patience = Patience(1, RankBy("auc", higher_is_better=True))
    assert patience.see(1, [{"held_out_auc": 0.6, "held_out_loss": 1.0}, {"held_out_loss": 2.0}])
    assert patience.best == 0.6


def test_where_no_site_reports_the_metric_the_loss_counts() -> None:
    patience, again = (Patience(1, RankBy("auc", higher_is_better=True)) for _ in range(2))
    assert seen(patience, 2.0, 1.5) == [True, True]
    again.restore(json.loads(json.dumps(patience.state())))
    assert seen(again, 1.6, start=3) == [False]
    assert again.is_over
    assert again.reason.startswith(
        "1 evaluations brought no better worst held_out_loss than 1.5 after round 20"
    )


def test_a_state_goes_on_where_it_was() -> None:
    patience, again = Patience(3), Patience(3)
    again.restore(json.loads(json.dumps(patience.state())))
    assert seen(again, 2.0) == [True]
    seen(patience, 2.0, 2.1, 2.2)
    again.restore(json.loads(json.dumps(patience.state())))
    assert seen(again, 2.05, start=4) == [False]
    assert again.is_over
    assert again.best_round == 10


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({}, "evaluation.patience needs it"),
        (
            {
                "task": {"name": "synthetic", "held_out": 0.2},
                "privacy": {"secure_aggregation": True, "losses": "hidden"},
            },
            "nobody knows the worst site's loss",
        ),
    ],
)
def test_it_needs_held_out_losses_that_are_told(sections: dict[str, object], wrong: str) -> None:
    uplink = {"name": "rand-k", "ratio": 0.1, "bits": 16}
    config = {
        "workers": 3,
        "task": {"name": "synthetic"},
        "algorithm": {"name": "afl-com", "rounds": 9, "eta_w": 0.1, "eta_q": 0.1, "uplink": uplink},
        "evaluation": {"patience": 3},
    }
    with pytest.raises(ConfigError, match=wrong):
        config_from_mapping(config | sections)
    assert config_from_mapping(config | {"task": {"name": "synthetic", "held_out": 0.2}}).patience is not None
