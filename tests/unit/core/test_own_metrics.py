"""A task's own metrics, as the worst worker and the mean have them."""

from __future__ import annotations

from afl.core.rounds.results import Evaluation
from afl.runs.metrics import own_metrics, own_metrics_line
from afl_server.federation.evaluation_summary import EvaluationSummary, evaluation_of_line

WORKERS = (
    {"loss": 1.0, "mae": 0.5, "bias": -0.25},
    {},
    {"loss": 4.0, "mae": 1.5},
)


def test_the_worst_worker_s_value_and_the_mean_over_those_that_have_one() -> None:
    assert own_metrics(WORKERS, 2) == {
        "bias": {"worst_worker": None, "mean": -0.25},
        "mae": {"worst_worker": 1.5, "mean": 1.0},
    }
    assert own_metrics([{"loss": 1.0, "accuracy": 0.5}], 0) == {}


def test_they_are_one_line_of_the_first_few_by_name() -> None:
    own = own_metrics(WORKERS, 2)
    assert own_metrics_line(own) == "bias not measured (mean -0.25), mae 1.5 (mean 1)"
    many = own_metrics([{"loss": 1.0, **{f"m{number}": number / 3 for number in range(6)}}], 0)
    line = own_metrics_line(many)
    assert line.startswith("m0 0 (mean 0), m1 0.33333 (mean 0.33333), ")
    assert line.endswith("m3 1 (mean 1), and 2 more")
    assert own_metrics_line({}) == ""


def test_a_standing_has_them_of_the_worker_that_it_names_also_from_a_line_of_the_metrics() -> None:
    seen = EvaluationSummary.of(Evaluation(7, 7, WORKERS, (10, 0, 10), (), absent=(1,)))
    assert seen.worst_worker == 2
    assert seen.own_metrics["mae"] == {"worst_worker": 1.5, "mean": 1.0}
    line = {**seen.__dict__, "workers": list(WORKERS), "absent": [1]}
    assert EvaluationSummary.of(evaluation_of_line(line)) == seen

    ranked = ({"loss": 1.0, "accuracy": 0.25, "f1": 0.2}, {"loss": 4.0, "accuracy": 0.5, "f1": 0.4})
    by_accuracy = EvaluationSummary.of(Evaluation(7, 7, ranked, (10, 10), ()))
    assert by_accuracy.worst_worker == 0
    assert by_accuracy.own_metrics["f1"]["worst_worker"] == 0.2
