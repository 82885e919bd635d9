"""What workers and server say of their residuals at evaluations is what the residuals are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.messages import Kind
from afl.core.randomness import SharedRandomness
from afl.core.vectors import norm
from afl.tasks.registry import load_task
from afl_lab.simulation.driver import Driver

WORKERS = 3


def driven(compressor: CompressorChoice) -> Driver:
    """After six rounds and the evaluation behind them."""
    settings = AlgorithmSettings(
        workers=WORKERS, rounds=6, block=4, eta_w=0.1, eta_q=0.1, uplink=compressor, downlink=compressor
    )
    task = load_task("synthetic", {"dim": 200}, allow_path=True)
    driver = Driver(
        task,
        settings,
        SharedRandomness.from_int(5),
        batch_size=8,
        evaluation_batch_size=64,
        evaluate_every=6,
    )
    assert [step.kind for step in driver.steps()][-1] is Kind.EVALUATE
    return driver


def norms_of_workers(driver: Driver) -> list[float]:
    residuals = [half.residual for half in driver._participant._side.halves.values()]
    return [0.0 if residual is None else float(np.linalg.norm(residual.double())) for residual in residuals]


@pytest.mark.parametrize(
    ("name", "is_kept_above", "is_kept_below"),
    [("top-k", True, True), ("rand-k", False, True), ("identity", False, False)],
)
def test_the_norms_of_an_evaluation_are_those_of_the_residuals(
    name: str, is_kept_above: bool, is_kept_below: bool
) -> None:
    driver = driven(CompressorChoice(name, {} if name == "identity" else {"ratio": 0.1}))
    assert driver.engine.last_evaluation is not None
    told, true = driver.engine.last_evaluation.residual_norms, norms_of_workers(driver)
    assert told == pytest.approx(true, rel=1e-12)
    assert [value > 0 for value in true] == [is_kept_below] * WORKERS
    algorithm = driver.engine.algorithm
    assert algorithm.keeps_residuals is is_kept_below
    if not is_kept_above:
        assert algorithm.residual_norm is None
        return
    downlink = algorithm.unsent()["downlink_residual"].astype(np.float64)
    assert algorithm.residual_norm == pytest.approx(np.linalg.norm(downlink), rel=1e-12)
    assert algorithm.residual_norm > 0


def test_a_norm_does_not_overflow() -> None:
    assert norm(torch.full((4,), 3e38)) == pytest.approx(6e38)
    assert norm(torch.zeros(0)) == 0.0
