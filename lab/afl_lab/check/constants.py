"""The constants that the paper's step sizes need: smoothness, and how much minibatch losses differ.

Each estimate is the largest that was seen at some workers and two models, the first and one trained a little:
a lower bound; docs/theory.md says what that means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from afl import theory
from afl.config import Config
from afl.core.model.parameters import ParameterVector
from afl_lab.check.findings import Report, blaming
from afl_worker.training.oracle import TaskOracle

GRADIENT_BATCHES: Final = 8
"""Of which a worker's gradient is the mean: the same ones before and after a step."""

ITERATIONS: Final = 12
"""Of the power method, for each worker and model; it ends before where a step changes little."""

SETTLED: Final = 0.01

STEP: Final = 0.01
"""How long a step is, after which the gradient is looked at again: long enough for float32's rounding."""

LOSSES: Final = 64
"""Minibatches whose losses are compared, for each worker and model."""

TRAINED_STEPS: Final = 20

MOST_WORKERS: Final = 4


def check_constants(
    report: Report, config: Config, vector: ParameterVector, oracle: TaskOracle, workers: Sequence[int]
) -> None:
    """Add the estimates; ``values["constants"]`` has ``smoothness``, ``sigma_q`` and ``dim``.

    The model is left as it was; buffers are not.
    """
    workers, first = workers[:MOST_WORKERS], vector.values.clone()
    smoothness = sigma_q = 0.0
    try:
        with blaming(report, "estimates of smoothness and of the loss's deviation"):
            for is_trained in (False, True):
                if is_trained:
                    _train(vector, oracle, workers, config.algorithm.eta_w_value)
                smoothness = max(smoothness, *(smoothness_of(vector, oracle, worker) for worker in workers))
                sigma_q = max(sigma_q, *(deviation_of(oracle, worker) for worker in workers))
    finally:
        _set(vector, first)
    if not (math.isfinite(smoothness) and math.isfinite(sigma_q)):
        return
    report.values["constants"] = {"smoothness": smoothness, "sigma_q": sigma_q, "dim": vector.dim}
    rounds = config.algorithm.rounds
    shown = {"smoothness L": f"about {smoothness:.3g}", "a batch's loss": f"deviates by about {sigma_q:.3g}"}
    if smoothness:
        shown["theory's eta_w"] = f"{theory.primal_step(rounds, smoothness):.3g} in {rounds} rounds"
    if sigma_q:
        shown["theory's eta_q"] = f"{theory.dual_step(rounds, config.workers, sigma_q):.3g}"
    report.facts["Constants of the theory"] = shown


def smoothness_of(vector: ParameterVector, oracle: TaskOracle, worker: int) -> float:
    """The largest eigenvalue's size of the Hessian of a worker's risk, by the power method.

    A Hessian's product with a direction is the difference of two gradients, :data:`STEP` apart.
    """
    here = vector.values.clone()
    gradient = _gradient(vector, oracle, worker)
    direction = gradient.clone()
    if not float(direction.norm()):
        direction = torch.ones_like(here)
    largest = 0.0
    for _ in range(ITERATIONS):
        direction /= direction.norm()
        _set(vector, here + STEP * direction)
        product = (_gradient(vector, oracle, worker) - gradient) / STEP
        _set(vector, here)
        size = float(product.norm())
        if not size:
            break
        is_settled = abs(size - largest) <= SETTLED * size
        largest, direction = max(size, largest), product
        if is_settled:
            break
    return largest


def deviation_of(oracle: TaskOracle, worker: int) -> float:
    """The standard deviation of the losses of minibatches, of those that move the worker's dual weight."""
    losses = [oracle.loss(worker, round_)[0] for round_ in range(1, LOSSES + 1)]
    return float(torch.tensor(losses, dtype=torch.float64).std())


def _gradient(vector: ParameterVector, oracle: TaskOracle, worker: int) -> Tensor:
    total = torch.zeros_like(vector.values)
    for round_ in range(1, GRADIENT_BATCHES + 1):
        total += oracle.gradient(worker, round_)[2]
    return total / GRADIENT_BATCHES


def _train(vector: ParameterVector, oracle: TaskOracle, workers: Sequence[int], eta_w: float) -> None:
    for round_ in range(1, TRAINED_STEPS + 1):
        total = torch.zeros_like(vector.values)
        for worker in workers:
            total += oracle.gradient(worker, round_)[2]
        _set(vector, vector.values - eta_w / len(workers) * total)


def _set(vector: ParameterVector, values: Tensor) -> None:
    vector.values.copy_(values)
    vector.publish()
