"""What a classifier gives: logits, and each example's on its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afl.tasks import Classification, Task
from afl_lab.check.blame import blaming
from afl_lab.check.findings import Level, Report
from afl_worker.training.oracle import TaskOracle

CLOSE = 1e-3
"""Sums of probabilities, and an example's outputs in two batches, differ by rounding alone: 1e-6 in float32,
1e-3 where a part of the model has fewer bits."""


def check_outputs(report: Report, task: Task, oracle: TaskOracle, worker: int) -> None:
    """Look at the outputs for a worker's first minibatch, where the loss is ``afl.Classification``'s own."""
    if not isinstance(task, Classification) or type(task).loss is not Classification.loss:
        return
    inputs = oracle.minibatch(worker, 1)[0]
    module = oracle.module(worker, training=False)
    with blaming(report, f"outputs of worker {worker}'s first batch"), torch.no_grad():
        outputs: object = module(inputs)
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or min(outputs.shape) < 2:
            return
        if _are_probabilities(outputs):
            report.add(
                Level.WARNING,
                "the model",
                f"its outputs are probabilities: they sum to 1 over the classes{_named(module)}",
                "afl.Classification's loss takes logits, and has a softmax of its own: leave the model's out,"
                " or it learns slowly and not well",
            )
        if _mixes(module, inputs, outputs):
            report.add(
                Level.WARNING,
                "the model",
                f"what it gives for an example depends on the others in the batch{_named(module)}",
                "does an operation run over the first dimension, which is the batch's? Softmax takes dim=1",
            )


def _are_probabilities(outputs: Tensor) -> bool:
    return bool((outputs >= 0).all()) and bool(((outputs.sum(dim=1) - 1).abs() < CLOSE).all())


def _mixes(module: nn.Module, inputs: Tensor, outputs: Tensor) -> bool:
    half = len(inputs) // 2
    alone: Tensor = module(inputs[:half])
    scale = float(outputs.abs().max())
    return float((alone - outputs[:half]).abs().max()) > CLOSE * max(scale, CLOSE)


def _named(module: nn.Module) -> str:
    found = [f"{name}, Softmax" for name, part in module.named_modules() if isinstance(part, nn.Softmax)]
    return f" ({found[0]})" if found else ""
