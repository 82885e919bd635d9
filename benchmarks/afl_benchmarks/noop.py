"""A task whose gradient costs next to nothing: what is left of a round is the system's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from afl.core.randomness import Purpose
from afl.tasks.base import Batch, Task, TaskContext, WorkerData


class Noop(Task):
    """One parameter vector; every gradient is the same fixed vector, every loss the same number.

    Args:
        dim: the number of parameters.
    """

    def __init__(self, dim: int = 1000) -> None:
        self._dim = dim
        self._gradient: Tensor | None = None

    def model(self) -> nn.Module:
        """A vector of zeros."""
        return _Vector(self._dim)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        """One example for each purpose; the gradient is drawn from the worker's stream."""
        words = context.randomness.stream(Purpose.SYNTHETIC_DATA, worker=worker).words(-(-self._dim // 2))
        halves = torch.from_numpy(words.view("<i4")[: self._dim].copy())
        self._gradient = halves.to(torch.float32).mul_(2.0**-31)
        one = (torch.zeros(1),)
        return WorkerData(one, one)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:  # noqa: ARG002
        """A constant whose gradient is the fixed vector."""
        assert isinstance(model, _Vector)
        if self._gradient is None or not torch.is_grad_enabled():
            return torch.ones(())
        loss: Tensor = _Fixed.apply(model.values, self._gradient)
        return loss


class _Vector(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(dim))


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG004
        ctx.gradient = gradient
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None
