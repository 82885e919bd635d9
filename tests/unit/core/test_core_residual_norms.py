"""What workers and server say of their residuals at evaluations is what the residuals are."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.messages import Kind, Report
from afl.core.randomness import SharedRandomness
from afl.core.rounds.results import Evaluation
from afl.core.vectors import norm
from afl.errors import ProtocolError
from afl.tasks.registry import load_task
from afl_lab.simulation.driver import Driver

WORKERS = 3


def made(compressor: CompressorChoice, task_name: str = "synthetic", **options: Any) -> Driver:
    settings = AlgorithmSettings(
        workers=WORKERS, rounds=6, block=4, eta_w=0.1, eta_q=0.1, uplink=compressor, downlink=compressor
    )
    task = load_task(task_name, options or {"dim": 200}, allow_path=True)
    return Driver(
        task,
        settings,
        SharedRandomness.from_int(5),
        batch_size=8,
        evaluation_batch_size=64,
        evaluate_every=6,
    )


def driven(compressor: CompressorChoice, task_name: str = "synthetic", **options: Any) -> Driver:
    """After six rounds and the evaluation behind them."""
    driver = made(compressor, task_name, **options)
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


@pytest.mark.parametrize(
    ("name", "options", "is_told"),
    [
        ("rand-k", {"ratio": 0.2, "bits": 4}, True),
        ("dct-projection", {"ratio": 0.2, "bits": 4}, True),
        ("identity", {"bits": 3}, True),
        ("rand-k", {"ratio": 0.2}, False),
    ],
)
def test_where_messages_are_integers_norms_are_told_by_tensor(
    name: str, options: dict[str, float], is_told: bool
) -> None:
    driver = driven(CompressorChoice(name, options), "digits", hidden=[8])
    evaluation, model = driver.engine.last_evaluation, driver.engine.model
    assert evaluation is not None
    assert list(evaluation.tensor_residual_norms) == (list(model.named_values()) if is_told else [])
    if is_told:
        residuals = [half.residual for half in driver._participant._side.halves.values()]
        parts = [torch.split(own, list(model.tensors)) for own in residuals if own is not None]
        largest = [
            max(float(np.linalg.norm(part.double())) for part in of) for of in zip(*parts, strict=True)
        ]
        assert list(evaluation.tensor_residual_norms.values()) == pytest.approx(largest, rel=1e-12)
        assert all(norm > 0 for norm in largest)
    again = Evaluation.of_values(json.loads(json.dumps(dataclasses.asdict(evaluation))))
    assert again.tensor_residual_norms == evaluation.tensor_residual_norms


@pytest.mark.parametrize(
    ("kind", "norms", "due"), [(Kind.EVALUATE, 1, 6), (Kind.EVALUATE, 7, 6), (Kind.TRAIN, 6, 0)]
)
def test_norms_that_are_not_due_are_refused(kind: Kind, norms: int, due: int) -> None:
    driver = made(CompressorChoice("identity", {"bits": 4}), "digits", hidden=[8])
    steps = driver.steps()
    while driver.engine.step.kind is not kind:
        next(steps)
    report = Report(1, driver.engine.step.position, 1.0, 8, (), {"loss": 1.0})
    report = dataclasses.replace(report, tensor_residual_norms=(0.5,) * norms)
    with pytest.raises(ProtocolError, match=f"{norms} norms of its residual by tensor; here there are {due}"):
        driver.engine.begin_report(report)


def test_a_norm_does_not_overflow() -> None:
    assert norm(torch.full((4,), 3e38)) == pytest.approx(6e38)
    assert norm(torch.zeros(0)) == 0.0
