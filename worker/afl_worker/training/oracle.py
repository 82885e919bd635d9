"""Losses and gradients of the task's model on each hosted worker's data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afl.core.messages import MAX_METRICS, METRIC_NAMES, is_metric_name
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.vectors import Weighted
from afl.errors import DataError, TaskError
from afl.outside import words
from afl.tasks.base import Batch, Examples, Task, WorkerData, example_count, form_problem, take_batch
from afl.tasks.dtypes import telling_types
from afl_worker.training.timings import Spent

DRAWN_AHEAD = 8
"""Minibatches are drawn for so many rounds at once: between a model's large products, a draw alone takes
three times as long (measured)."""


class _Local(NamedTuple):
    """A worker's examples, on the device, and how many of them there are and make a minibatch."""

    train: Examples
    test: Examples
    train_count: int
    test_count: int
    batch_size: int


@dataclass
class _Drawn:
    """A worker's minibatches of :data:`DRAWN_AHEAD` rounds: int64 ``[DRAWN_AHEAD, batch_size]``.

    Their memory is taken at the start: taken between a model's temporary vectors, it would lie in the gaps
    that they leave, and the next ones would need new memory for each worker (measured).
    """

    indices: Tensor
    first: int = -DRAWN_AHEAD
    """The first of the rounds, which begin at 1; the default is before any draw."""


class TaskOracle:
    """Computes at the module's present parameters.

    Args:
        data: by hosted worker.
        batch_size: examples of a minibatch.
        clip_norm: the largest norm of a gradient, before its factor; ``None`` for no limit.
        spent: to which the time of gradients, losses and evaluations is added.

    Raises:
        DataError: if a worker has no training or test examples, or fewer than a batch and the task does
            not allow a smaller one.
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
        spent: Spent | None = None,
    ) -> None:
        self._spent = spent or Spent()
        self._task = task
        self._vector = vector
        self._randomness = randomness
        self._device = vector.values.device
        self._evaluation_batch_size = evaluation_batch_size
        self._clip_norm = clip_norm
        self._local = {
            worker: _checked(worker, own, batch_size, task, self._device) for worker, own in data.items()
        }
        self._drawn = {
            (worker, purpose): _Drawn(torch.empty((DRAWN_AHEAD, local.batch_size), dtype=torch.int64))
            for worker, local in self._local.items()
            for purpose in (Purpose.MINIBATCH, Purpose.LOSS_MINIBATCH)
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
        with self._spent:
            loss, examples, weighted = self._gradient(worker, round_, scale)
            if self._clip_norm is not None:
                weighted.clip(self._clip_norm)
            return loss, examples, weighted

    def _gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        self._seed(Purpose.TASK_IN_GRADIENT, worker, round_)
        batch = self.augmented(worker, round_)
        module = self.module(worker, training=True)
        self._vector.clear_gradient()
        what = f"{type(self._task).__name__}.loss returned"
        with telling_types(module, batch):
            loss = self._task.loss(module, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TaskError(
                    f"{what} {_described(loss)}; a scalar tensor is needed: the mean over the batch, without "
                    ".item()"
                )
            if not loss.requires_grad:
                raise TaskError(
                    f"{what} a tensor that does not depend on the parameters; does it call .detach(), "
                    ".item() or .numpy(), or work under torch.no_grad()?"
                )
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), self.batch_size(worker), self._vector.gradient(scale)

    def train_examples(self, worker: int) -> int:
        """How many training examples the worker has in all."""
        return self._local[worker].train_count

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        """On a minibatch of its own, as evaluation sees the model, without a gradient."""
        with self._spent:
            self._seed(Purpose.TASK_IN_LOSS, worker, round_)
            batch = self.minibatch(worker, round_, Purpose.LOSS_MINIBATCH)
            module = self.module(worker, training=False)
            with torch.no_grad(), telling_types(module, batch):
                loss = self._task.loss(module, batch)
            return float(loss), self.batch_size(worker)

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        """Example-weighted means over the test data, in order, in float64."""
        count, size = self._local[worker].test_count, self._evaluation_batch_size
        totals: dict[str, float] = {}
        with self._spent:
            self._seed(Purpose.TASK_IN_EVALUATION, worker)
            for start in range(0, count, size):
                stop = min(start + size, count)
                for name, value in self.metrics(worker, start, stop).items():
                    totals[name] = totals.get(name, 0.0) + value * (stop - start)
        return {name: total / count for name, total in totals.items()}, count

    def metrics(self, worker: int, start: int, stop: int) -> dict[str, float]:
        """The task's metrics of the worker's test examples from ``start`` to ``stop``, as one batch."""
        module = self.module(worker, training=False)
        batch = self._batch(self._local[worker].test, torch.arange(start, stop))
        with torch.no_grad(), telling_types(module, batch):
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
        seed = int(self._randomness.stream(purpose, round_, worker).words(1)[0])
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        torch.default_generator.manual_seed(seed)

    def batch_size(self, worker: int) -> int:
        """Examples of a minibatch of the worker's."""
        return self._local[worker].batch_size

    def minibatch(self, worker: int, round_: int, purpose: Purpose = Purpose.MINIBATCH) -> Batch:
        """The worker's minibatch of a round."""
        local = self._local[worker]
        # The draw of all examples would give them in order.
        is_whole = local.batch_size == local.train_count
        chosen = torch.arange(local.train_count) if is_whole else self._draw(worker, round_, purpose)
        return self._batch(local.train, chosen)

    def augmented(self, worker: int, round_: int) -> Batch:
        """The worker's minibatch of a round, as its gradient sees it."""
        batch = self.minibatch(worker, round_)
        if type(self._task).augment is Task.augment:
            return batch
        seed = int(self._randomness.stream(Purpose.AUGMENTATION, round_, worker).words(1)[0])
        return self._task.augment(batch, torch.Generator().manual_seed(seed))

    def _draw(self, worker: int, round_: int, purpose: Purpose) -> Tensor:
        drawn, local = self._drawn[worker, purpose], self._local[worker]
        if not drawn.first <= round_ < drawn.first + DRAWN_AHEAD:
            for ahead, indices in enumerate(drawn.indices):
                stream = self._randomness.stream(purpose, round_ + ahead, worker)
                indices.copy_(torch.from_numpy(stream.subset(local.train_count, local.batch_size)))
            drawn.first = round_
        return drawn.indices[round_ - drawn.first]

    def module(self, worker: int, *, training: bool) -> nn.Module:
        """The module with the worker's buffers, in training or evaluation mode."""
        self._vector.buffers.select(worker)
        module = self._vector.module
        if module.training is not training:
            module.train(training)
        return module

    def _batch(self, examples: Examples, chosen: Tensor) -> Batch:
        if isinstance(examples, torch.utils.data.Dataset):
            return _on_device(take_batch(examples, chosen), self._device)
        return take_batch(examples, chosen.to(self._device))


def _checked(worker: int, own: WorkerData, batch_size: int, task: Task, device: torch.device) -> _Local:
    for examples, what in ((own.train, "train"), (own.test, "test")):
        problem = form_problem(examples)
        if problem:
            raise DataError(f"what the task gives worker {worker} as {what} cannot be used: {problem}")
    train_count, test_count = example_count(own.train), example_count(own.test)
    if not train_count or not test_count:
        raise DataError(
            f"worker {worker} has no {'test' if train_count else 'training'} examples ({train_count} "
            f"training, {test_count} test); each worker needs at least one of each: look at how the task "
            "divides its data"
        )
    if train_count < batch_size and not task.allow_smaller_batch:
        raise DataError(
            f"worker {worker} has {train_count} training examples, fewer than task.batch_size "
            f"({batch_size}); lower it, or set `allow_smaller_batch = True` in the task"
        )
    train, test = _on_device(own.train, device), _on_device(own.test, device)
    return _Local(train, test, train_count, test_count, min(batch_size, train_count))


def _on_device(data: Batch, device: torch.device) -> Batch:
    return mapped(lambda tensor: tensor.to(device), data)


def mapped(change: Callable[..., Tensor], *batches: Batch) -> Batch:
    """Tensors, also in tuples, lists and mappings, changed, those at one place of all batches together;
    anything else as it is in the first."""
    first = batches[0]
    if isinstance(first, Tensor):
        return change(*batches)
    if isinstance(first, tuple | list):
        return tuple(mapped(change, *parts) for parts in zip(*batches, strict=True))
    if isinstance(first, dict):
        return {key: mapped(change, *(batch[key] for batch in batches)) for key in first}
    return first


def _described(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
