r"""``synthetic``: a smooth nonconvex problem whose constants are known, and whose gradients are reproducible.

For ``d = dim`` and worker ``i`` with centre ``c``::

    R_i(w)   = scale / d * sum_j rho(w_j - c_j)            rho(u) = u^2 / (1 + u^2)
    l(w; z)  = R_i(w) + noise_q * zeta + noise_w / d * sum_j v_j s(w_j)      s(u) = u / (1 + u^2)

with ``z = (zeta, v)``, ``zeta`` and every ``v_j`` one of -1 and +1. A worker's training examples come in
antithetic pairs ``z, -z``, so their mean loss is ``R_i`` exactly, and likewise the gradient.

The constants of the paper's assumptions (section "Problem Setup"), with minibatches drawn from the
worker's training examples:

- ``L = 2 scale / d``. The Hessian of ``R_i`` is diagonal with ``scale / d * rho''(w_j - c_j)``;
  ``rho''(u) = (2 - 6 u^2) / (1 + u^2)^3`` lies between -1/2 (at 1) and 2 (at 0).
- ``G = 3 sqrt(3) / 8 * scale / sqrt(d)``. ``|rho'(u)| = 2 |u| / (1 + u^2)^2`` is largest at
  ``u = 1 / sqrt(3)``, where it is ``3 sqrt(3) / 8``; ``d`` coordinates multiply it by ``sqrt(d) / d``.
- ``sigma_w = noise_w / sqrt(d)``. The gradient's noise has coordinates ``noise_w / d * v_j s'(w_j)`` and
  ``s'(u) = (1 - u^2) / (1 + u^2)^2`` lies between -1/8 and 1. The bound holds for each example.
- ``sigma_q = noise_q + noise_w / 2``. ``|s| <= 1/2``, so the loss noise of each example lies within
  ``+-sigma_q``; being centred, it is sub-Gaussian with that parameter by Hoeffding's lemma.

A single example's loss is less smooth than ``R_i``: ``|s''| <= 1.46`` adds up to ``1.46 noise_w / d``. The
assumptions ask nothing of it. With the theorem's step sizes a coordinate moves by
``rho' / (16 T^(3/4))`` a round, whatever ``d`` and ``scale`` are: that is why the sum is divided by ``d``.

Order of operations. All in float64, on ``w`` and ``c`` converted from float32; vectors elementwise; each
operation rounded by itself; ``zeta`` and ``v`` first averaged over the batch (an exact integer sum, one
division by the batch size)::

    a = scale / d               b = noise_w / d
    u = w - c                   p = u * u        q = 1 + p
    x = w * w                   y = 1 + x
    loss     = a * H(p / q) + noise_q * zeta + b * H(v * (w / y))         left to right
    gradient = float32(a * ((u + u) / (q * q)) + b * (v * ((1 - x) / (y * y))))

``H`` sums a vector by folding it: while its length ``n`` is above 1, the last ``floor(n / 2)`` elements are
added to the first ``floor(n / 2)``, and a middle element of an odd length is kept as the last one.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from afl.core.randomness import Purpose
from afl.tasks.base import Batch, Task, TaskContext, WorkerData
from afl.tasks.initialization import require_memory
from afl.tasks.options import TaskOptions, parse_options

_INITIAL = 0.1


class SyntheticOptions(TaskOptions):
    """Options of ``synthetic``."""

    dim: int = Field(default=100, ge=1, le=2**31 - 1)
    """number of parameters d"""
    examples: int = Field(default=256, ge=2, le=2**31 - 2, multiple_of=2)
    """training examples of each worker, in antithetic pairs"""
    scale: float = Field(default=1.0, gt=0)
    """upper bound of each worker's risk R_i"""
    spread: float = Field(default=1.0, ge=0)
    """centres are uniform in [-spread, spread)^d"""
    centres: int | None = Field(default=None, ge=1)
    """how many centres differ: workers beyond share the last one, so that the worst risk does not depend on
    how many they are; by default each worker has its own"""
    noise_w: float = Field(default=0.5, ge=0)
    """gradient noise: sigma_w is noise_w / sqrt(dim)"""
    noise_q: float = Field(default=0.1, ge=0)
    """loss noise beside that of the gradient"""


class Point(nn.Module):
    """A model that is its parameter ``w``: float32 ``[dim]``, 0.1 in every coordinate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # Registered before it is filled: what this machine has no memory for is refused in between.
        self.w = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        nn.init.constant_(self.w, _INITIAL)

    def forward(self) -> Tensor:
        """The parameters w, float32 ``[dim]``."""
        return self.w


class Synthetic(Task):
    """Quadratic risks with known constants; the module's docstring has the formulas."""

    def __init__(self, **options: object) -> None:
        self.options = given = parse_options(SyntheticOptions, options)
        self.smoothness = 2 * given.scale / given.dim
        """``L`` of every worker's risk."""
        self.lipschitz = 3 * math.sqrt(3) / 8 * given.scale / math.sqrt(given.dim)
        """``G``, a bound on the norm of every worker's risk's gradient."""
        self.sigma_w = given.noise_w / math.sqrt(given.dim)
        """A bound on the standard deviation of a stochastic gradient (Euclidean norm)."""
        self.sigma_q = given.noise_q + given.noise_w / 2
        """The sub-Gaussian parameter of a stochastic loss."""

    def model(self) -> nn.Module:
        """A :class:`Point`."""
        return Point(self.options.dim)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        """The worker's examples: ``(centre, zeta, v)``.

        ``centre`` is float32 ``[n, dim]``, the same in every row (one row in memory), so that the loss
        needs no other state; ``zeta`` is int8 ``[n]``, ``v`` int8 ``[n, dim]``. The test part is one
        antithetic pair: its mean loss is ``R_i`` exactly.

        Drawn from the worker's stream for synthetic data: ``dim`` uniforms ``U`` make the centre
        ``float32(spread * (2 U - 1))``; with the option ``centres``, worker ``centres - 1`` makes that of
        all workers beyond. Then whole words make bits, lowest first, 1 for +1 and 0 for -1;
        each pair takes ``dim + 1`` of them, ``zeta`` first. Pair ``k`` is the examples ``2k`` and ``2k + 1``.
        """
        assert 0 <= worker < context.workers
        require_memory(f"{type(self).__name__}.data({worker})", self.options.examples * self.options.dim)
        dim, pairs = self.options.dim, self.options.examples // 2
        centre = torch.from_numpy(self.centre(worker, context))
        stream = context.randomness.stream(Purpose.SYNTHETIC_DATA, worker=worker)
        stream.words(dim)
        bits = pairs * (dim + 1)
        words = stream.words(-(-bits // 64)).astype("<u8")
        unpacked = np.unpackbits(words.view(np.uint8), count=bits, bitorder="little")
        positive = torch.from_numpy(unpacked).to(torch.int8).mul_(2).sub_(1).view(pairs, 1, dim + 1)
        signs = torch.cat([positive, -positive], dim=1).view(2 * pairs, dim + 1)
        zeta, v = signs[:, 0].contiguous(), signs[:, 1:].contiguous()
        return WorkerData(
            train=(centre.expand(2 * pairs, dim), zeta, v),
            test=(centre.expand(2, dim), zeta[:2], v[:2]),
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean of ``l(w; z)`` over the batch: float64 ``[]``, with the gradient documented above."""
        centre, zeta, v = batch
        size = len(zeta)
        return cast(
            "Tensor",
            _Loss.apply(
                model(),
                centre[0].double(),
                zeta.sum(dtype=torch.int64).double() / size,
                v.sum(dim=0, dtype=torch.int64).double() / size,
                self.options.scale / self.options.dim,
                self.options.noise_w / self.options.dim,
                self.options.noise_q,
            ),
        )

    def centre(self, worker: int, context: TaskContext) -> NDArray[np.float32]:
        """``c`` of a worker: float32 ``[dim]``."""
        maker = worker if self.options.centres is None else min(worker, self.options.centres - 1)
        stream = context.randomness.stream(Purpose.SYNTHETIC_DATA, worker=maker)
        uniform = 2 * stream.uniform(self.options.dim) - 1
        return (self.options.spread * uniform).astype(np.float32)


class _Loss(torch.autograd.Function):
    """The loss with its gradient written out, so that the order of operations is ours and not autograd's."""

    # Lets torch.func take the gradients of several workers in one call.
    generate_vmap_rule = True

    @staticmethod
    def forward(  # noqa: PLR0917
        w: Tensor, centre: Tensor, zeta: Tensor, v: Tensor, a: float, b: float, noise_q: float
    ) -> Tensor:
        w = w.double()
        u = w - centre
        p = u * u
        y = 1 + w * w
        return a * _fold(p / (1 + p)) + noise_q * zeta + b * _fold(v * (w / y))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        w, centre, _, v, a, b, _ = inputs
        ctx.save_for_backward(w, centre, v)
        ctx.factors = a, b

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        parameter, centre, v = ctx.saved_tensors
        a, b = ctx.factors
        w = parameter.double()
        u = w - centre
        q = 1 + u * u
        x = w * w
        y = 1 + x
        gradient = a * ((u + u) / (q * q)) + b * (v * ((1 - x) / (y * y)))
        return (upstream * gradient).to(parameter.dtype), None, None, None, None, None, None


def _fold(values: Tensor) -> Tensor:
    """``H`` of the module's docstring: ``[n]`` to ``[]``."""
    while len(values) > 1:
        half = len(values) // 2
        middle = values[half : len(values) - half]
        values = torch.cat([values[:half] + values[len(values) - half :], middle])
    return values[0]
