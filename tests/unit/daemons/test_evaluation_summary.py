from __future__ import annotations

from afl.core.rounds.results import Evaluation
from afl_server.federation.evaluation_summary import EvaluationSummary


def standing(round_: int, accuracies: list[float], losses: list[float]) -> EvaluationSummary:
    metrics = tuple({"accuracy": a, "loss": x} for a, x in zip(accuracies, losses, strict=True))
    return EvaluationSummary.of(Evaluation(round_, round_, metrics, (10,) * len(metrics), ()))


def test_the_best_model_serves_the_worst_worker_best_and_ties_go_to_the_lower_loss() -> None:
    first = standing(10, [0.9, 0.7], [0.2, 0.6])
    assert (first.worst_worker, first.worst_accuracy, first.max_loss) == (1, 0.7, 0.6)
    assert standing(20, [0.8, 0.8], [0.9, 0.9]).is_better_than(first)
    assert standing(20, [1.0, 0.7], [0.1, 0.5]).is_better_than(first)
    assert not standing(20, [1.0, 0.7], [0.1, 0.6]).is_better_than(first)
    assert not standing(20, [1.0, 0.6], [0.1, 0.1]).is_better_than(first)
