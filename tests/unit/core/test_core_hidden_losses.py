"""Hidden losses: dual weights are those of the shown rule, and what is known of an evaluation is ranked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from afl.core.dual import DualRule, DualWeights
from afl.core.rounds.policy import DivergenceWatch
from afl.core.rounds.results import Evaluation
from afl.core.secrecy.fixed_point import LARGEST_IN_WORST, means_of, metrics_payload
from afl.core.secrecy.hidden_weights import HiddenWeights, OwnWeight
from afl.errors import DivergedError
from afl.runs.metrics import growth, hidden_figures
from afl_server.federation.evaluation_summary import EvaluationSummary, Ranking


@pytest.mark.parametrize(("workers", "block", "eta_q"), [(3, 9, 0.5), (10, 40, 0.2), (50, 1000, 0.05)])
def test_each_worker_s_own_weight_is_the_shown_one(workers: int, block: int, eta_q: float) -> None:
    generator = np.random.default_rng(workers)
    shown: DualRule = DualWeights(workers, eta_q, block)
    hidden = HiddenWeights(workers)
    halves = [OwnWeight(workers, lambda _: eta_q, block) for _ in range(workers)]
    for round_ in range(1, 121):
        weights = [half.of_round(round_, hidden.total) for half in halves]
        assert np.abs(np.array(weights) - shown.weights).max() < 1e-9
        losses = generator.gamma(2.0, 1.0, workers)
        shares = [
            half.share(round_, weight, float(loss))
            for half, weight, loss in zip(halves, weights, losses, strict=True)
        ]
        sums = np.array([sum(column) % 2**64 for column in zip(*shares, strict=True)], dtype=np.uint64)
        hidden.take(sums)
        shown.update(round_, losses)
        assert hidden.mean_loss == pytest.approx(losses.mean(), abs=1e-8)


def evaluation(round_: int, losses: list[float], **own: float) -> Evaluation:
    """What the server has of workers with these test losses."""
    payloads = [metrics_payload({"loss": loss, "accuracy": 0.5, **own}) for loss in losses]
    arrays = [np.frombuffer(payload.data, dtype="<u8") for payload in payloads]
    total = np.sum(arrays, axis=0, dtype=np.uint64)
    means, smooth = means_of(total, ["loss", "accuracy", *own], len(losses))
    nothing: tuple[dict[str, float], ...] = tuple({} for _ in losses)
    return Evaluation(round_, round_, nothing, (), (), means=means, smooth_worst=smooth)


def test_the_best_model_is_that_of_the_lowest_smooth_worst_loss() -> None:
    ranking = Ranking()
    # The mean of the second is lower, its worst worker is served worse.
    found = [
        ranking.see(evaluation(round_, losses))
        for round_, losses in enumerate(([1.0, 1.2], [0.1, 1.3], [0.9, 1.1]))
    ]
    assert found == [True, False, True]
    assert ranking.best is not None
    assert ranking.best.worst_worker is ranking.best.max_loss is ranking.best.worst_accuracy is None
    assert 1.1 <= ranking.best.highest_loss <= 1.1 + math.log(2) / 50 + 1e-6


def test_own_metrics_are_told_as_means() -> None:
    summary = EvaluationSummary.of(evaluation(5, [1.0, 2.0], mae=0.25))
    assert summary.own_metrics == {"mae": {"mean": pytest.approx(0.25)}}
    assert hidden_figures(vars(summary)).endswith("mean loss 1.5, mean accuracy 0.5000, mean mae 0.25")


def test_the_divergence_watch_goes_by_the_smooth_worst_loss() -> None:
    ranking = Ranking(DivergenceWatch(max_loss=3.0, evaluations=2))
    ranking.see(evaluation(1, [0.1, 4.0]))
    ranking.require_convergence()
    ranking.see(evaluation(2, [0.1, 4.0]))
    with pytest.raises(
        DivergedError, match=r"after round 2 the smooth worst loss is 4; the highest was above"
    ):
        ranking.require_convergence()


def test_a_loss_beyond_what_the_smooth_worst_counts_still_shows_in_it() -> None:
    assert EvaluationSummary.of(evaluation(1, [500.0, 300.0])).highest_loss == pytest.approx(400)
    assert LARGEST_IN_WORST < 400


def test_growth_compares_means_with_means() -> None:
    first_round = {"round": 1, "loss_max": None, "loss_mean": 2.0}
    first = vars(EvaluationSummary.of(evaluation(10, [2.0, 3.0])))
    assert growth(first_round, first, vars(EvaluationSummary.of(evaluation(20, [1.0, 11.0])))) == ""
    said = growth(first_round, first, vars(EvaluationSummary.of(evaluation(20, [20.0, 11.0]))))
    assert said.startswith("the mean loss has grown from 2 in round 1 to 15.5 after round 20")
    said = growth(None, first, vars(EvaluationSummary.of(evaluation(20, [20.0, 11.0]))))
    assert said.startswith("the smooth worst loss has grown from 3")
