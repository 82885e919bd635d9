"""Several hosted workers' gradients, local steps and losses in one batched call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from afl.core.algorithms.base import NOT_FINITE, LocalModel, LocalSteps, LocalUpdate, finite_loss
from afl.core.algorithms.local_sgd import LEFT_RANGE
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.vectors import Weighted, is_finite
from afl.errors import NonFiniteError, TaskError
from afl.tasks.base import Batch, Task, WorkerData
from afl.user_code import ending_forks
from afl_worker.training.examples import mapped
from afl_worker.training.oracle import TaskOracle, scalar

MEMORY: Final = 32 * 2**20
"""Bytes of the vectors that are computed in one call: at least one worker's.

glibc keeps no freed block above 32 MiB: its pages come anew, and zeroed, at the next call. A round of 500
workers, 55,000 parameters, takes 121 ms of a core with this, and 162 ms with twice as much.
"""

Found = TypeVar("Found")


class BatchedOracle(TaskOracle):
    """A :class:`TaskOracle` that computes for several of its workers when the first is asked for.

    The minibatches are the same; losses, gradients and models after local steps differ from separate
    computations in the last bits, since a batched product adds in another order.

    Args:
        memory: bytes of vectors that are computed in one call.

    Raises:
        TaskError: if the workers' minibatches differ in size.
    """

    def __init__(
        self,
        task: Task,
        vector: ParameterVector,
        data: Mapping[int, WorkerData],
        randomness: SharedRandomness,
        *,
        memory: int = MEMORY,
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
        self._asked: Sequence[int] = tuple(data)
        self._at_once = min(max(memory // (4 * vector.dim), 1), len(data))
        self._rows = torch.empty((self._at_once, vector.dim), dtype=torch.float32, device=self._device)
        self._trained = {
            name: parameter for name, parameter in self._lossy.named_parameters() if parameter.requires_grad
        }
        self._gradients: _Ahead[tuple[float, Tensor]] = _Ahead()
        self._updates: _Ahead[LocalUpdate | NonFiniteError] = _Ahead()
        self._losses: _Ahead[float] = _Ahead()
        measured = {self._drawn_from(worker, Purpose.LOSS_MINIBATCH).batch_size for worker in data}
        self._measures_together = len(measured) == 1
        one = grad_and_value(self._loss, has_aux=True)
        self._at_one_model = vmap(one, in_dims=(None, 0, 0), randomness="different")
        self._at_own_models = vmap(one, in_dims=(0, 0, 0), randomness="different")
        self._without_gradient = vmap(self._loss, in_dims=(None, 0, 0), randomness="different")

    def announce(self, workers: Sequence[int]) -> None:
        """Compute for these alone, and for those of them together that lie beside each other; anew, since the
        model may be another in a round that comes again."""
        self._asked = tuple(workers)
        for ahead in (self._gradients, self._updates, self._losses):
            ahead.forget()

    def _beside(self, worker: int) -> Sequence[int]:
        first = self._asked.index(worker) // self._at_once * self._at_once
        return self._asked[first : first + self._at_once]

    def _gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        loss, gradient = self._gradients.of(
            worker, round_, lambda: self._compute(self._beside(worker), round_)
        )
        return loss, self.batch_size(worker), Weighted([gradient], [len(gradient)], scale)

    def _compute(self, workers: Sequence[int], round_: int) -> dict[int, tuple[float, Tensor]]:
        buffers = self._stacked_buffers(workers)
        losses, gradients, buffers = self._backward(workers, round_, buffers)
        self._unstack_buffers(workers, buffers)
        rows = self._rows[: len(workers)]
        torch.cat([gradient.flatten(1) for gradient in gradients], dim=1, out=rows)
        return dict(zip(workers, zip(losses.tolist(), rows, strict=True), strict=True))

    def local_steps(self, worker: int, model: LocalModel, steps: LocalSteps) -> LocalUpdate:  # noqa: ARG002
        """In lockstep with the workers beside it, each from the model as it is to its own."""
        with ending_forks(), self._spent:
            made = self._updates.of(worker, steps, lambda: self._walk(self._beside(worker), steps))
        if isinstance(made, NonFiniteError):
            raise made
        return made

    def _walk(self, workers: Sequence[int], steps: LocalSteps) -> dict[int, LocalUpdate | NonFiniteError]:
        models = self._vector.values.repeat(len(workers), 1)
        parts = [
            part.view(len(workers), *parameter.shape)
            for part, parameter in zip(
                torch.split(models, list(self._vector.tensors), dim=1), self._trained.values(), strict=True
            )
        ]
        snapshot: Tensor | None = None
        buffers = self._stacked_buffers(workers)
        losses: list[Tensor] = []
        failed: dict[int, NonFiniteError] = {}
        for taken, (update, eta) in enumerate(zip(steps.updates, steps.etas, strict=True)):
            loss, gradients, buffers = self._backward(workers, update, buffers, parts if taken else None)
            if steps.weight_decay:
                models.mul_(1.0 - eta * steps.weight_decay)
            self._step(parts, gradients, eta)
            losses.append(loss.double())
            sums = models.sum(dim=1) + loss
            for row in torch.isfinite(sums).logical_not_().nonzero().flatten().tolist():
                if row not in failed and (error := _failure(loss, gradients, models, row)) is not None:
                    failed[row] = error
            if taken + 1 == steps.snapshot_at:
                snapshot = models if taken + 1 == len(steps.updates) else models.clone()
        fine = [row for row in range(len(workers)) if row not in failed]
        self._unstack_buffers(
            [workers[row] for row in fine], {name: buffer[fine] for name, buffer in buffers.items()}
        )
        size, means = self.batch_size(workers[0]), torch.stack(losses).mean(dim=0).tolist()
        ends = models.cpu().numpy()
        snapshots = [None] * len(workers) if snapshot is None else snapshot.cpu().numpy()
        made: dict[int, LocalUpdate | NonFiniteError] = {
            worker: LocalUpdate(mean, size * len(losses), end, noted)
            for worker, mean, end, noted in zip(workers, means, ends, snapshots, strict=True)
        }
        return made | {workers[row]: error for row, error in failed.items()}

    def _step(self, parts: Sequence[Tensor], gradients: Sequence[Tensor], eta: float) -> None:
        """Move each worker's model by its own gradient."""
        if self._clip_norm is None:
            for part, gradient in zip(parts, gradients, strict=True):
                part.add_(gradient, alpha=-eta)
            return
        squares = [
            torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64).square()
            for gradient in gradients
        ]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        factors = (eta * (self._clip_norm / norms).clamp(max=1.0)).float()
        for part, gradient in zip(parts, gradients, strict=True):
            part.addcmul_(gradient, factors.view(-1, *[1] * (part.dim() - 1)), value=-1.0)

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        """With those of the workers beside it, where all held-out minibatches have one size."""
        if not self._measures_together:
            return super().loss(worker, round_)
        with ending_forks(), self._spent:
            loss = self._losses.of(worker, round_, lambda: self._measure(self._beside(worker), round_))
        return loss, self._drawn_from(worker, Purpose.LOSS_MINIBATCH).batch_size

    def _measure(self, workers: Sequence[int], round_: int) -> dict[int, float]:
        buffers = self._stacked_buffers(workers)
        self._seed(Purpose.TASK_IN_LOSS, workers[0], round_)
        module = self.module(workers[0], training=False)
        batches = [self.minibatch(worker, round_, Purpose.LOSS_MINIBATCH) for worker in workers]
        with torch.no_grad(), self.calls.of(module, batches[0]):
            losses, _ = self._without_gradient(self._shared(), dict(buffers), _stacked(batches))
        return dict(zip(workers, losses.tolist(), strict=True))

    def _shared(self) -> dict[str, Tensor]:
        """The parameters of the model as it is."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    def _backward(
        self,
        workers: Sequence[int],
        round_: int,
        buffers: Mapping[str, Tensor],
        own: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor], Mapping[str, Tensor]]:
        """The losses of a round, ``[n]``; the gradients by parameter, ``[n, ...]``; and the buffers after it.

        Args:
            own: each worker's values of the parameters; ``None`` for the model as it is.
        """
        self._seed(Purpose.TASK_IN_GRADIENT, workers[0], round_)
        module = self.module(workers[0], training=True)
        batches = [self.augmented(worker, round_) for worker in workers]
        with self.calls.of(module, batches[0]):
            batch = _stacked(batches)
            if own is None:
                gradients, (losses, changed) = self._at_one_model(self._shared(), dict(buffers), batch)
            else:
                trained = {
                    name: values.to(parameter.dtype)
                    for (name, parameter), values in zip(self._trained.items(), own, strict=True)
                }
                gradients, (losses, changed) = self._at_own_models(trained, dict(buffers), batch)
        return losses, [gradients[name] for name in self._trained], {name: changed[name] for name in buffers}

    def _stacked_buffers(self, workers: Sequence[int]) -> Mapping[str, Tensor]:
        buffers = self._vector.buffers
        # Integers alone, such as indices, are more use to the module's code as they are.
        stacked = buffers.stacked(workers) if buffers.has_floats else {}
        return {f"module.{name}": buffer for name, buffer in stacked.items()}

    def _unstack_buffers(self, workers: Sequence[int], stacked: Mapping[str, Tensor]) -> None:
        named = {name.removeprefix("module."): buffer for name, buffer in stacked.items()}
        self._vector.buffers.unstack(workers, named)

    def _loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the buffers after it."""
        own = dict(buffers)
        return functional_call(self._lossy, (parameters, own), (batch,)), own


def _stacked(batches: Sequence[Batch]) -> Batch:
    return mapped(lambda *tensors: torch.stack(tensors), *batches)


def _failure(loss: Tensor, gradients: Sequence[Tensor], models: Tensor, row: int) -> NonFiniteError | None:
    """What is not finite after a worker's step; ``None`` if only a sum of what is overflows."""
    try:
        finite_loss(loss[row].item())
    except NonFiniteError as error:
        return error
    if not all(is_finite(gradient[row].float().flatten()) for gradient in gradients):
        return NonFiniteError(NOT_FINITE)
    return None if is_finite(models[row]) else NonFiniteError(LEFT_RANGE)


class _Ahead(Generic[Found]):
    """What is computed for several workers when the first of them is asked for, until others' is."""

    def __init__(self) -> None:
        self._of: Hashable = None
        self._found: Mapping[int, Found] = {}

    def of(self, worker: int, what: Hashable, compute: Callable[[], Mapping[int, Found]]) -> Found:
        """A worker's, of a round or the like."""
        if what != self._of or worker not in self._found:
            self.forget()
            self._found, self._of = compute(), what
        return self._found[worker]

    def forget(self) -> None:
        """Compute for whoever is asked for next."""
        self._found, self._of = {}, None


class LossModule(nn.Module):
    """The task's loss as a module, whose parameters a functional call may replace."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return scalar(type(self._task).__name__, self._task.loss(self.module, batch)).reshape(())
