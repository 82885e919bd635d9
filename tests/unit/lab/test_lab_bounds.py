"""The theorems against runs: what is measured is below the bound, and the runs are what they should be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.randomness import SharedRandomness
from afl.tasks import TaskContext
from afl.tasks.synthetic import Synthetic
from afl_reproduction import bounds
from afl_reproduction.bounds import trained_models
from afl_reproduction.theory.risks import SyntheticRisks

SMALL = ["--workers", "2", "5", "--rounds", "16", "--dim", "6", "--noise-w", "0.3"]


@pytest.fixture
def results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    output = tmp_path / "bounds.jsonl"
    assert bounds.main([*SMALL, "--seeds", "2", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for method in bounds.METHODS:
        assert method in shown
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_bound_holds_and_is_the_theorem_s(results: list[dict[str, Any]]) -> None:
    assert len(results) == 3 * 2 * 2
    theorems = {"afl-br": 1, "afl-com top-k": 2, "afl-com rand-k": 3}
    for result in results:
        assert 0 < result["measured"] <= result["measured_at_most"] < result["trivial"]
        assert result["measured_at_most"] < result["bound"]
        # Theorem 3 at ratio 1, which two workers have, is Theorem 1: nothing is dropped.
        drops = result["delta"] < 1
        assert result["theorem"] == (theorems[result["method"]] if drops or "top" in result["method"] else 1)
    by_hand = next(one for one in results if one["method"] == "afl-br" and one["workers"] == 5)
    # d = 6: L = 2/6, G = 3 sqrt 3 / 8 / sqrt 6, sigma_w = 0.3 / sqrt 6, sigma_q = 0.1 + 0.15; T^(1/4) = 2.
    gradient, smooth = 3 * math.sqrt(3) / 8 / math.sqrt(6), 1 / 3
    gamma = math.hypot(gradient, 0.3 / math.sqrt(6))
    dual = 16 * smooth * 0.25 * math.sqrt(math.log(5)) / 2
    start = 32 * smooth * by_hand["delta_phi"] / 2
    rest = 4 * gradient * gamma / 2 + 10 * gamma**2 / 4 + gamma**2 / (2 * 8)
    assert by_hand["bound"] == pytest.approx(start + dual + rest, rel=1e-12)
    assert by_hand["dual_term"] == pytest.approx(dual, rel=1e-12)


def test_a_bound_that_does_not_hold_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def false(task: Synthetic, method: str, *, workers: int, seed: int, **_: object) -> bounds.Result:
        return bounds.Result(method, workers, 16, seed, 1, 1.0, 0.3, 0.3001, 0.3, 0.1, 0.5, 0.1, 1.0)

    monkeypatch.setattr(bounds, "measure", false)
    assert bounds.main(SMALL) == 1


def test_the_table_shows_growth_from_the_first_m() -> None:
    def result(workers: int, seed: int, measured: float) -> bounds.Result:
        return bounds.Result("afl-br", workers, 16, seed, 1, 1.0, measured, measured, 8.0, 2.0, 2.0, 0.1, 1.0)

    table = bounds.compared([result(4, 1, 0.1), result(4, 2, 0.3), result(16, 1, 0.5)])
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert cells == [
        ("afl-br", "4", "1.000", "0.1000", "4", "40", "1.000", "1.000", "1.000"),
        ("afl-br", "16", "1.000", "0.2500", "4", "16", "2.500", "1.000", "1.000"),
    ]


def test_the_runs_are_afl_br_s() -> None:
    """Against Algorithm 1 in numpy, with minibatches of all examples, whose noise cancels."""
    task = Synthetic(dim=7, examples=8)
    settings = AlgorithmSettings(workers=4, rounds=30, block=6, eta_w=2.0, eta_q=3.0, name="afl-br")
    models = list(trained_models(task, settings, seed=5, batch_size=8))
    risks = SyntheticRisks.of(task, TaskContext(4, SharedRandomness.from_int(5)))
    w, weights = np.full(7, 0.1), np.full(4, 0.25)
    assert len(models) == 30
    for round_, model in enumerate(models, start=1):
        assert model == pytest.approx(w, rel=1e-5, abs=1e-6)
        gradient = weights @ risks.gradients(w)
        weights = weights * np.exp(3.0 * risks.values(w))
        weights = np.full(4, 0.25) if round_ % 6 == 0 else weights / weights.sum()
        w -= 2.0 * gradient
    assert np.abs(models[-1] - models[0]).max() > 0.1
