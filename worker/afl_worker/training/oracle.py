"""Losses and gradients of the task's model on each hosted worker's data."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from afl.core.messages import MAX_METRICS, METRIC_NAMES, is_metric_name
from afl.core.model.parameters import ParameterVector
from afl.core.participant import Oracle
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.record_privacy import Account
from afl.core.rounds.patience import HELD_OUT
from afl.core.vectors import Weighted
from afl.errors import TaskError
from afl.outside import words
from afl.tasks.base import Batch, Task, WorkerData
from afl.user_code import ending_forks
from afl_worker.training.calls import Calls
from afl_worker.training.examples import Part, WorkerExamples
from afl_worker.training.timings import Spent

DRAWN_AHEAD = 8
"""Minibatches are drawn for so many rounds at once: between a model's large products, a draw alone takes
three times as long (measured)."""


@dataclass
class _Drawn:
    """A worker's minibatches of :data:`DRAWN_AHEAD` rounds: int64 ``[DRAWN_AHEAD, batch_size]``.

    Their memory is taken at the start: taken between a model's temporary vectors, it would lie in the gaps
    that they leave, and the next ones would need new memory for each worker (measured).
    """

    indices: Tensor
    first: int = -DRAWN_AHEAD
    """The first of the rounds, which begin at 1; the default is before any draw."""


class TaskOracle(Oracle):
    """Computes at the module's present parameters.

    Attributes:
        accounts: by worker, of those whose records' privacy is accounted for.
        calls: those of the task's loss and metrics.

    Args:
        data: by hosted worker.
        batch_size: examples of a minibatch.
        clip_norm: the largest norm of a gradient, before its factor; ``None`` for no limit.
        held_out: the share of each worker's training examples that gives no gradients.
        loss_of_held_out: whether :meth:`loss` is on minibatches of those.
        spent: to which the time of gradients, losses and evaluations is added.

    Raises:
        DataError: if a worker has no training, test or held-out examples, or fewer than a batch to train with
            and the task does not allow a smaller one.
    """

    def __init__(
        self,
        task: Task,
        vector: ParameterVector,
        data: Mapping[int, WorkerData],
        randomness: SharedRandomness,
        *,
        batch_size: int,
        evaluation_batch_size: int,
        clip_norm: float | None = None,
        held_out: float = 0.0,
        loss_of_held_out: bool = False,
        spent: Spent | None = None,
    ) -> None:
        self.accounts: dict[int, Account] = {}
        self._spent = spent or Spent()
        self._task = task
        self._vector = vector
        self.calls = Calls(vector)
        self._randomness = randomness
        self._device = vector.values.device
        self._evaluation_batch_size = evaluation_batch_size
        self._clip_norm = clip_norm
        self._examples = {
            worker: WorkerExamples.of(
                worker,
                own,
                randomness,
                batch_size=batch_size,
                held_out=held_out,
                allow_smaller=task.allow_smaller_batch,
                device=self._device,
            )
            for worker, own in data.items()
        }
        self._loss_of_held_out = loss_of_held_out
        self._drawn = {
            (worker, purpose): _Drawn(torch.empty((DRAWN_AHEAD, size), dtype=torch.int64))
            for worker in data
            for purpose in (Purpose.MINIBATCH, Purpose.LOSS_MINIBATCH)
            for size in (self._drawn_from(worker, purpose).batch_size,)
        }
        vector.buffers.host(data)

    def gradient(self, worker: int, round_: int, scale: float = 1.0) -> tuple[float, int, Tensor]:
        """As :meth:`weighted_gradient`, as one vector, in memory that the next call takes."""
        loss, examples, weighted = self.weighted_gradient(worker, round_, scale)
        with self._spent:
            weighted.write(self._whole)
        return loss, examples, self._whole

    @functools.cached_property
    def _whole(self) -> Tensor:
        return torch.empty_like(self._vector.values)

    def weighted_gradient(self, worker: int, round_: int, scale: float = 1.0) -> tuple[float, int, Weighted]:
        """The minibatch is a pure function of (seed, worker, round), drawn without replacement; so is what
        the task draws from PyTorch's own generator, dropout for one."""
        with ending_forks(), self._spent:
            loss, examples, weighted = self._gradient(worker, round_, scale)
            if self._clip_norm is not None:
                weighted.clip(self._clip_norm)
            return loss, examples, weighted

    def _gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        self._seed(Purpose.TASK_IN_GRADIENT, worker, round_)
        batch = self.augmented(worker, round_)
        module = self.module(worker, training=True)
        self._vector.clear_gradient()
        with self.calls.of(module, batch):
            name = type(self._task).__name__
            loss = differentiable(name, scalar(name, self._task.loss(module, batch)))
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), self.batch_size(worker), self._vector.gradient(scale)

    def train_examples(self, worker: int) -> int:
        """How many training examples the worker has in all; without those that are held out."""
        return self._examples[worker].train.count

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        """On a minibatch of its own, as evaluation sees the model, without a gradient."""
        with ending_forks(), self._spent:
            self._seed(Purpose.TASK_IN_LOSS, worker, round_)
            batch = self.minibatch(worker, round_, Purpose.LOSS_MINIBATCH)
            module = self.module(worker, training=False)
            with torch.no_grad(), self.calls.of(module, batch):
                loss = self._task.loss(module, batch)
            return float(loss), self._drawn_from(worker, Purpose.LOSS_MINIBATCH).batch_size

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        """Example-weighted means over the test data, in order, in float64; and over what is held out, under
        names that begin with :data:`HELD_OUT`."""
        own = self._examples[worker]
        with ending_forks(), self._spent:
            self._seed(Purpose.TASK_IN_EVALUATION, worker)
            means = self._means(worker, own.test)
            if own.held_out is not None:
                held_out = self._means(worker, own.held_out)
                _check_names(type(self._task).__name__, means)
                means |= {f"{HELD_OUT}{name}": value for name, value in held_out.items()}
        return means, own.test.count

    def _means(self, worker: int, part: Part) -> dict[str, float]:
        found: dict[str, list[tuple[float, int]]] = {}
        for start in range(0, part.count, self._evaluation_batch_size):
            stop = min(start + self._evaluation_batch_size, part.count)
            for name, value in self._metrics(worker, part, start, stop).items():
                found.setdefault(name, []).append((value, stop - start))
        return {name: _weighted_mean(values, part.count) for name, values in found.items()}

    def metrics(self, worker: int, start: int, stop: int) -> dict[str, float]:
        """The task's metrics of the worker's test examples from ``start`` to ``stop``, as one batch."""
        return self._metrics(worker, self._examples[worker].test, start, stop)

    def _metrics(self, worker: int, part: Part, start: int, stop: int) -> dict[str, float]:
        module = self.module(worker, training=False)
        batch = part.batch(torch.arange(start, stop), self._device)
        with torch.no_grad(), self.calls.of(module, batch):
            found: object = self._task.metrics(module, batch)
        what = f"{type(self._task).__name__}.metrics returned"
        if not isinstance(found, Mapping) or "loss" not in found:
            keys = f"the keys {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
            raise TaskError(
                f"{what} {keys or _described(found)}; a dict of scalar tensors with a `loss` is needed"
            )
        if len(found) > MAX_METRICS:
            raise TaskError(f"{what} {len(found)} metrics; {MAX_METRICS} are the most")
        numbers = {}
        for name, value in found.items():
            if not is_metric_name(name):
                shown = words(name) if isinstance(name, str) else _described(name)
                raise TaskError(f"{what} a metric called {shown}; {METRIC_NAMES}")
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                needed = "a scalar tensor is needed, the mean over the batch"
                raise TaskError(f"{what} {_described(value)} as {name}; {needed}") from error
        return numbers

    def _seed(self, purpose: Purpose, worker: int, round_: int = 0) -> None:
        """Seed PyTorch's generator of the device: ``torch.manual_seed`` would seed those of all devices, and
        takes ninety times as long (measured)."""
        self._seed_with(int(self._randomness.stream(purpose, round_, worker).words(1)[0]))

    def _seed_with(self, seed: int) -> None:
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        torch.default_generator.manual_seed(seed)

    def batch_size(self, worker: int) -> int:
        """Examples of a minibatch of the worker's."""
        return self._examples[worker].train.batch_size

    def minibatch(self, worker: int, round_: int, purpose: Purpose = Purpose.MINIBATCH) -> Batch:
        """The worker's minibatch of a round."""
        part = self._drawn_from(worker, purpose)
        # The draw of all examples would give them in order.
        is_whole = part.batch_size == part.count
        chosen = torch.arange(part.count) if is_whole else self._draw(worker, round_, purpose)
        return part.batch(chosen, self._device)

    def _drawn_from(self, worker: int, purpose: Purpose) -> Part:
        own = self._examples[worker]
        is_held_out = purpose is Purpose.LOSS_MINIBATCH and self._loss_of_held_out
        return own.held_out if is_held_out and own.held_out is not None else own.train

    def augmented(self, worker: int, round_: int) -> Batch:
        """The worker's minibatch of a round, as its gradient sees it."""
        batch = self.minibatch(worker, round_)
        if type(self._task).augment is Task.augment:
            return batch
        seed = int(self._randomness.stream(Purpose.AUGMENTATION, round_, worker).words(1)[0])
        return self._task.augment(batch, torch.Generator().manual_seed(seed))

    def _draw(self, worker: int, round_: int, purpose: Purpose) -> Tensor:
        drawn, part = self._drawn[worker, purpose], self._drawn_from(worker, purpose)
        if not drawn.first <= round_ < drawn.first + DRAWN_AHEAD:
            for ahead, indices in enumerate(drawn.indices.numpy()):
                stream = self._randomness.stream(purpose, round_ + ahead, worker)
                indices[:] = stream.subset(part.count, part.batch_size)
            drawn.first = round_
        return drawn.indices[round_ - drawn.first]

    def module(self, worker: int, *, training: bool) -> nn.Module:
        """The module with the worker's buffers, in training or evaluation mode."""
        self._vector.buffers.select(worker)
        module = self._vector.module
        if module.training is not training:
            module.train(training)
        return module


def scalar(task: str, loss: object) -> Tensor:
    """What a task's ``loss`` returned. Raises TaskError where it is no one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TaskError(
            f"{task}.loss returned {_described(loss)}; a scalar tensor is needed: the mean over the batch, "
            "without .item()"
        )
    return loss


def differentiable(task: str, loss: Tensor) -> Tensor:
    """What a task's ``loss`` returned. Raises TaskError where no gradient can be taken of it."""
    if not loss.requires_grad:
        raise TaskError(
            f"{task}.loss returned a tensor that does not depend on the parameters; does it call .detach(), "
            ".item() or .numpy(), or work under torch.no_grad()?"
        )
    return loss


def _weighted_mean(values: Sequence[tuple[float, int]], count: int) -> float:
    """Of batches' means, each with its number of examples, ``count`` in all."""
    total = 0.0
    for value, examples in values:
        total += value * examples
    if math.isfinite(total):
        return total / count
    # Divided before the sum, which has overflowed; rounding must not lead past the ends.
    means = [value for value, _ in values]
    total = sum(value * (examples / count) for value, examples in values)
    return min(max(total, min(means)), max(means))


def _check_names(task: str, metrics: Mapping[str, float]) -> None:
    """Raise TaskError where the task's metrics leave no room for those of what is held out."""
    what = f"{task}.metrics returned"
    if 2 * len(metrics) > MAX_METRICS:
        raise TaskError(f"{what} {len(metrics)} metrics; with task.held_out {MAX_METRICS // 2} are the most")
    for name in metrics:
        if name.startswith(HELD_OUT) or not is_metric_name(f"{HELD_OUT}{name}"):
            raise TaskError(
                f"{what} a metric called {name}; with task.held_out it may not begin with {HELD_OUT}, which "
                f"names the same of what is held out, and has at most {64 - len(HELD_OUT)} "
                "characters"
            )


def _described(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
