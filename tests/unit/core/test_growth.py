"""When a run's largest loss is said to have grown: never of the runs that the reports keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afl.runs.metrics import GROWN_TIMES, growth

KEPT = sorted((Path(__file__).parents[3] / "docs" / "reproduction").rglob("runs/**/*-seed-*.jsonl"))


def evaluation(round_: int, loss: float) -> dict[str, Any]:
    return {"round": round_, "max_loss": loss}


def first_round(loss: float) -> dict[str, Any]:
    return {"round": 1, "loss_max": loss}


def test_a_loss_that_has_grown_is_named_with_its_beginning_and_its_end() -> None:
    said = growth(first_round(1.25), evaluation(15, 310.0), evaluation(300, 3.5e12))
    assert said == (
        "the largest loss has grown from 1.25 in round 1 to 3.5e+12 after round 300; "
        "begin again with a smaller algorithm.eta_w, in a new run.directory"
    )
    later = growth(first_round(90.0), evaluation(15, 0.5), evaluation(300, 80.0))
    assert later.startswith("the largest loss has grown from 0.5 after round 15 to 80 after round 300; ")


@pytest.mark.parametrize(
    ("begun", "ended", "has_grown"),
    [
        (2.0, 2.0 * GROWN_TIMES, False),
        (2.0, 2.0 * GROWN_TIMES + 0.01, True),
        (2.0, 1.0, False),
        (-3.0, -2.0, False),
        (-3.0, 8.9, False),
        (-3.0, 9.1, True),
    ],
)
def test_the_bound(begun: float, ended: float, has_grown: bool) -> None:
    assert bool(growth(first_round(begun), None, evaluation(9, ended))) is has_grown
    assert bool(growth(None, evaluation(3, begun), evaluation(9, ended))) is has_grown


def test_one_evaluation_alone_says_nothing_but_beside_the_first_round_it_does() -> None:
    only = evaluation(9, 1e9)
    assert growth(None, only, only) == ""
    assert growth(first_round(1.0), only, only)
    assert growth(first_round(1.0), None, None) == ""


def test_no_run_of_the_reports_has_diverged() -> None:
    assert len(KEPT) > 100
    for path in KEPT:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        points = [line for line in lines if "max_loss" in line]
        # Whichever evaluation were the first.
        least = min(points, key=lambda point: point["max_loss"])
        assert growth(None, {**least, "round": 0}, points[-1]) == "", path
