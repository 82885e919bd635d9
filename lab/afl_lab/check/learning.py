"""The model on each worker's first minibatch: its outputs, its loss and its gradient."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from afl.config.quantities import shown_bytes
from afl.core.model.parameters import ParameterVector
from afl.errors import ExitCode
from afl.tasks import Classification, Task
from afl.tasks.base import Batch
from afl_lab.check.findings import Report, blaming
from afl_worker.training.oracle import TaskOracle

TRIED_WORKERS = 8
"""Workers whose gradients are tried: the dry run is of all."""

SUM_LIKE = 1.5
"""A mean does not change when a batch is doubled, a sum doubles; what is between is nobody's sum."""

MEAN_LIKE = 1e-3
"""A mean of two halves' means is the whole's mean to rounding, which takes 1e-6 in float32 and more in parts
of fewer bits."""

CLOSE = 1e-3
"""Sums of probabilities, and an example's outputs in two batches, differ by rounding alone: 1e-6 in float32,
1e-3 where a part of the model has fewer bits."""

LEARNING_SHARE = 0.4
"""The share of the check's time until which further workers are tried."""

STEP_LENGTH = 0.01
"""Of the step after which a gradient is looked at again: enough to leave zero, too little to harm."""

BUFFERS_ADVICE = {
    "local": "each worker keeps its own; saved models are without them (load_state_dict(..., strict=False))",
    "mean": "all workers' are averaged before each evaluation, which takes one exchange more",
    "refuse": "",
}

FROZEN_ADVICE = {
    "sent": "{} are sent to each worker once, with its first model; none where each site has a file of them"
    ' (frozen = "local" in the task)',
    "local": "{} are each site's own, neither sent nor saved; a worker with other values is refused",
}

COMPILED = "_orig_mod"
"""What torch.compile calls a module inside the one that it returns."""

MOST_NAMED = 6


def describe_model(report: Report, task: Task, vector: ParameterVector) -> None:
    """Add the model's facts, and notes on what is special in it."""
    named = list(vector.module.named_parameters())
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    first = dict(named)
    twice = [name for name, _ in vector.module.named_parameters(remove_duplicate=False) if name not in first]
    kinds = Counter(str(p.dtype).removeprefix("torch.") for _, p in named if p.requires_grad)
    size = f"{vector.dim:,} parameters in {kinds.total()} tensors, {shown_bytes(4 * vector.dim)} as float32"
    report.facts["Model"] = {"class": type(vector.module).__name__, "trainable": size}
    report.values["model"] = {"dim": vector.dim, "frozen": frozen, "tied": twice, "types": dict(kinds)}
    if frozen:
        what = f"{len(frozen)} parameters are frozen: {_names(frozen)}"
        report.values["model"]["frozen_digest"] = vector.frozen_digest
        advice = FROZEN_ADVICE[task.frozen].format(shown_bytes(vector.frozen_length + vector.base_length))
        report.note("the model", what, advice)
    if twice:
        report.note("the model", f"parameters that are tied count once: {_names(twice)} share another's")
    if others := sorted(set(kinds) - {"float32"}):
        report.note(
            "the model",
            f"{sum(kinds[kind] for kind in others)} trainable tensors are {', '.join(others)}",
            "updates are summed in float32, of which the model has a rounded copy; saved models are float32",
        )
    if compiled := [name for name in first if COMPILED in name.split(".")]:
        what = f"torch.compile gave its parameters names that saved models have too: {_names(compiled)}"
        report.note("the model", what, "call `module.compile()` instead, which keeps their own")
    floats = [name for name, buffer in vector.module.named_buffers() if buffer.dtype.is_floating_point]
    if floats:
        what = f"{len(floats)} floating-point buffers, with buffers = {task.buffers!r}: {_names(floats)}"
        report.note("the model", what, BUFFERS_ADVICE[task.buffers])


def check_learning(
    report: Report,
    task: Task,
    vector: ParameterVector,
    oracle: TaskOracle,
    workers: Sequence[int],
    *,
    rank_by: str | None,
) -> float:
    """Try loss, gradient and metrics at some workers; StoppedError if one cannot be computed.

    Returns:
        seconds of a worker's evaluation, the longest.
    """
    seen: dict[str, str] = {}
    """By parameter the best that any worker's gradient was: missing, zero or good."""
    longest = 0.0
    for worker in workers:
        others = f"loss, gradient and metrics of workers {worker} to {workers[-1]}"
        if worker != workers[0] and not report.has_time(others, share=LEARNING_SHARE):
            break
        report.watch(f"loss, gradient and metrics of worker {worker}")
        batch = oracle.minibatch(worker, 1)
        report.facts["Model"].setdefault("a batch", _shape(batch))
        with blaming(report, f"loss of worker {worker}'s first batch"):
            vector.clear_gradient()
            module = oracle.module(worker, training=True)
            with oracle.calls.of(module, batch):
                loss = _checked_loss(report, task, worker, task.loss(module, batch))
                loss.backward()  # type: ignore[no-untyped-call]
        _check_gradient(report, vector.module, worker, seen)
        _check_mean(report, task, oracle, worker, batch)
        with blaming(report, f"metrics of worker {worker}'s test examples"):
            started = time.monotonic()
            metrics, _ = oracle.evaluate(worker)
            longest = max(longest, time.monotonic() - started)
        _check_metrics(report, worker, metrics)
        if rank_by is not None and rank_by not in metrics:
            there = _names(sorted(metrics))
            what = f"worker {worker} does not report {rank_by} (evaluation.rank_by), but {there}"
            report.warn("the metrics", what, "return it from the task's metrics, or name another")
    if missing := [name for name, state in seen.items() if state == "missing"]:
        what = f"no loss depends on {_names(missing)}"
        advice = "they are sent and never learned: use them, remove them, or set requires_grad = False"
        report.warn("the gradient", what, advice)
    zero = [name for name, state in seen.items() if state == "zero"]
    if zero:
        with blaming(report, "loss of a worker's first batch after a step"):
            zero = _zero_after_a_step(task, oracle, workers, zero)
    if zero:
        what = f"it is zero at every worker for {_names(zero)}, before and after a step"
        advice = "is what they compute multiplied by zero, cut by .detach(), or are all units dead?"
        report.warn("the gradient", what, advice)
    return longest


def _zero_after_a_step(task: Task, oracle: TaskOracle, workers: Sequence[int], zero: list[str]) -> list[str]:
    """Those of the parameters whose gradient stays zero at every worker when the others have moved a little.

    A factor of a product has none while the other is zero, as LoRA's A while B is.
    """
    for worker in workers:
        module = oracle.module(worker, training=True)
        moved = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        before = {name: parameter.detach().clone() for name, parameter in moved.items()}
        grads: dict[str, Tensor] = {}
        for _ in range(2):
            length = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
            with torch.no_grad():
                for name, grad in grads.items():
                    moved[name].sub_(grad, alpha=STEP_LENGTH / max(length, STEP_LENGTH))
            module.zero_grad()
            task.loss(module, oracle.minibatch(worker, 1)).backward()  # type: ignore[no-untyped-call]
            grads = {name: p.grad.to_dense() for name, p in moved.items() if p.grad is not None}
        zero = [name for name in zero if not int(grads[name].count_nonzero())]
        with torch.no_grad():
            for name, parameter in moved.items():
                parameter.copy_(before[name])
    return zero


def _checked_loss(report: Report, task: Task, worker: int, loss: object) -> Tensor:
    where = f"{type(task).__name__}.loss"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        what = f"it returns {got} where a scalar tensor is needed"
        advice = "take the mean over the batch (loss.mean(), or reduction='mean'), and do not call .item()"
        report.fail(where, what, advice)
    if not loss.requires_grad:
        what = "its value does not depend on the parameters"
        advice = "does it call .detach(), .item() or .numpy(), or work under torch.no_grad()?"
        report.fail(where, what, advice)
    if not bool(torch.isfinite(loss)):
        report.fail(
            f"{where}, worker {worker}'s first batch",
            f"it is {float(loss.detach())}",
            "look for a logarithm or a division of zero, for inputs that are not scaled, and for labels that"
            " are out of range",
            code=ExitCode.DIVERGED,
        )
    return loss


def _check_gradient(report: Report, module: nn.Module, worker: int, seen: dict[str, str]) -> None:
    infinite = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        grad = parameter.grad
        if grad is None:
            seen.setdefault(name, "missing")
        elif not bool(torch.isfinite(grad.to_dense() if grad.layout != torch.strided else grad).all()):
            infinite.append(name)
        elif int(grad.count_nonzero()):
            seen[name] = "good"
        elif seen.get(name) != "good":
            seen[name] = "zero"
    if infinite:
        what = f"it is infinite or NaN for {_names(infinite)}"
        advice = "the loss is finite and its derivative is not: look for sqrt, norm, log or division at zero"
        report.fail(f"worker {worker}'s first gradient", what, advice, code=ExitCode.DIVERGED)


def _check_mean(report: Report, task: Task, oracle: TaskOracle, worker: int, batch: Batch) -> None:
    """Whether the loss is a mean: of a batch that is there twice, and of its halves together."""
    where = f"{type(task).__name__}.loss"
    if not isinstance(batch, tuple) or not all(isinstance(part, Tensor) and part.dim() for part in batch):
        return
    if any(finding.where == where for finding in report.findings):
        return
    module = oracle.module(worker, training=False)
    with torch.no_grad(), blaming(report, "loss in evaluation mode"):
        once, again = (float(task.loss(module, batch)) for _ in range(2))
        twice = float(task.loss(module, tuple(torch.cat([part, part]) for part in batch)))
    if abs(twice) > SUM_LIKE * abs(once) and abs(once) > 0:
        what = f"a batch repeated twice has {twice / once:.2f} times the loss: it looks like a sum"
        advice = "return the mean over the batch; otherwise step sizes depend on task.batch_size"
        report.warn(where, what, advice)
        return
    count = len(batch[0])
    half = count // 2
    # A loss that draws gives other numbers anyway.
    if count < 2 or once != again:
        return
    with torch.no_grad(), blaming(report, "loss of half a batch"):
        first = float(task.loss(module, tuple(part[:half] for part in batch)))
        second = float(task.loss(module, tuple(part[half:] for part in batch)))
    mean = (first * half + second * (count - half)) / count
    if abs(mean - once) > MEAN_LIKE * max(abs(first), abs(second), abs(once)):
        report.warn(
            where,
            f"the loss of a batch ({once:.4g}) is not the mean over its examples: its halves have"
            f" {first:.4g} and {second:.4g}",
            "does it weigh classes? cross_entropy(weight=...) divides by the weights of the batch's own"
            " labels: take reduction='sum' and divide by the number of examples. Is it a root, a median or a"
            " product of the batch? Or do shapes broadcast, as [32, 1] and [32] do: squeeze(1) makes them"
            " alike",
        )


def _check_metrics(report: Report, worker: int, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if not abs(value) < float("inf"):
            what = f"it is {value} on the test examples"
            advice = "what is evaluated must be finite"
            report.error(f"the metric {name} of worker {worker}", what, advice, code=ExitCode.DIVERGED)
    accuracy = metrics.get("accuracy")
    if accuracy is not None and not 0 <= accuracy <= 1:
        what = f"it is {accuracy:.4g}, and an accuracy is from 0 to 1"
        advice = "return the mean of what is right, not a sum or a percentage"
        report.warn(f"the metric accuracy of worker {worker}", what, advice)


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
        found = [
            f" ({name}, Softmax)" for name, part in module.named_modules() if isinstance(part, nn.Softmax)
        ]
        softmax = "".join(found[:1])
        if bool((outputs >= 0).all()) and bool(((outputs.sum(dim=1) - 1).abs() < CLOSE).all()):
            report.warn(
                "the model",
                f"its outputs are probabilities: they sum to 1 over the classes{softmax}",
                "afl.Classification's loss takes logits, and has a softmax of its own: leave the model's out,"
                " or it learns slowly and not well",
            )
        half = max(1, len(inputs) // 2)
        difference = float((module(inputs[:half]) - outputs[:half]).abs().max())
        if difference > CLOSE * max(float(outputs.abs().max()), CLOSE):
            report.warn(
                "the model",
                f"what it gives for an example depends on the others in the batch{softmax}",
                "does an operation run over the first dimension, which is the batch's? Softmax takes dim=1",
            )


def _shape(batch: Batch) -> str:
    if isinstance(batch, Tensor):
        return f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, tuple | list):
        return ", ".join(map(_shape, batch))
    if isinstance(batch, dict):
        return ", ".join(f"{key}: {_shape(value)}" for key, value in batch.items())
    return type(batch).__name__


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
