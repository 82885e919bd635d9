"""All hosted workers' gradients in one batched call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from afl.core.model.parameters import ParameterVector
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.vectors import Weighted
from afl.errors import TaskError
from afl.tasks.base import Batch, Task, WorkerData
from afl.tasks.dtypes import telling_types
from afl_worker.training.examples import mapped
from afl_worker.training.oracle import TaskOracle, scalar


class BatchedOracle(TaskOracle):
    """A :class:`TaskOracle` that computes the gradients of all its workers when the first is asked for.

    The minibatches are the same; losses and gradients differ from separate computations in the last bits,
    since a batched product adds in another order. The model must stay as it is until all workers have been
    asked, so algorithms with local steps cannot use it.

    Raises:
        TaskError: if the workers' minibatches differ in size.
    """

    def __init__(
        self,
        task: Task,
        vector: ParameterVector,
        data: Mapping[int, WorkerData],
        randomness: SharedRandomness,
        **options: Any,
    ) -> None:
        super().__init__(task, vector, data, randomness, **options)
        sizes = {worker: self.batch_size(worker) for worker in data}
        if len(set(sizes.values())) > 1:
            small = min(sizes, key=sizes.__getitem__)
            raise TaskError(
                f"worker {small} has minibatches of {sizes[small]} examples and others of "
                f"{max(sizes.values())}; worker.batch_oracles needs one size for all: lower "
                "task.batch_size, or leave it out"
            )
        self._lossy = LossModule(task, vector.module)
        self._gradients = torch.empty((len(data), vector.dim), dtype=torch.float32, device=self._device)
        self._rows = {worker: row for row, worker in enumerate(data)}
        self._losses: list[float] = []
        self._round = 0
        one = grad_and_value(self._loss, has_aux=True)
        self._call = vmap(one, in_dims=(None, 0, 0), randomness="different")

    def _gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        if round_ != self._round:
            self._compute(round_)
            self._round = round_
        row = self._rows[worker]
        gradient = self._gradients[row]
        return self._losses[row], self.batch_size(worker), Weighted([gradient], [len(gradient)], scale)

    def _compute(self, round_: int) -> None:
        workers = tuple(self._rows)
        self._seed(Purpose.TASK_IN_GRADIENT, workers[0], round_)
        module = self.module(workers[0], training=True)
        batches = [self.augmented(worker, round_) for worker in workers]
        trained = {
            name: parameter.detach()
            for name, parameter in self._lossy.named_parameters()
            if parameter.requires_grad
        }
        buffers = self._vector.buffers
        # Integers alone, such as indices, are more use to the module's code as they are.
        stacked = buffers.stacked(workers) if buffers.has_floats else {}
        inputs = {f"module.{name}": buffer for name, buffer in stacked.items()}
        with telling_types(module, batches[0]):
            stacked_batch = mapped(lambda *tensors: torch.stack(tensors), *batches)
            gradients, (losses, changed) = self._call(trained, inputs, stacked_batch)
        buffers.unstack(workers, {name: changed[f"module.{name}"] for name in stacked})
        parts = [gradients[name].reshape(len(batches), -1) for name in trained]
        torch.cat(parts, dim=1, out=self._gradients)
        self._losses = losses.tolist()

    def _loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the buffers after it."""
        own = dict(buffers)
        return functional_call(self._lossy, (parameters, own), (batch,)), own


class LossModule(nn.Module):
    """The task's loss as a module, whose parameters a functional call may replace."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return scalar(type(self._task).__name__, self._task.loss(self.module, batch)).reshape(())
