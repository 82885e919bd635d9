"""How a copy of the model, the server's or a worker process's, steps along D: the same bits at every copy.

In round t, each operation on a coordinate rounded to float32, in this order; eta is eta_w of the round, and
``D`` the decoded update::

    weight decay:  w <- w * f(1 - eta lambda)
    sgd:           w <- w - f(eta) D
    momentum:      v <- f(b1) v + D;  w <- w - f(eta) v
    adam:          m <- f(b1) m + f(1 - b1) D;  v <- f(b2) v + f(1 - b2) (D D)
                   w <- w - f(eta c2 / c1) (m / (sqrt(v) + f(epsilon c2)))

and where the final model is the mean over the last n of T rounds, in each of them, with k = t - T + n, from
mean = 0 on::

    mean <- mean + f(1 / k) (w - mean);  at t = T:  w <- mean

with f rounding to float32 what is computed in float64, ``c1 = 1 - b1^t`` and ``c2 = sqrt(1 - b2^t)``: Adam's
bias correction (Kingma, Ba 2015, end of section 2, whose epsilon is then that of algorithm 1). A sum or
difference is of two rounded numbers, never a fused multiply-add.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.compressors import Compressed, Realization
from afl.core.vectors import BLOCK, scale
from afl.errors import ProtocolError


class Optimizer:
    """SGD, and what the others have in common.

    Attributes:
        state: what it keeps from round to round, float32 ``[slots, dim]`` where the model lies; with one
            vector more, the last, for the mean of models if the final one is to be that.
    """

    slots = 0

    def __init__(self, settings: AlgorithmSettings, dim: int, device: torch.device | str = "cpu") -> None:
        self._settings = settings
        self._choice = settings.optimizer
        vectors = self.slots + (settings.mean_of_last > 0)
        self.state = torch.zeros((vectors, dim), dtype=torch.float32, device=device)

    def step(self, round_: int, params: Tensor, realization: Realization, update: Compressed) -> None:
        """Move ``params`` (float32 ``[dim]``) by D_t, and the state with it."""
        eta = self._settings.eta_w_of(round_)
        if self._settings.weight_decay:
            scale(params, 1.0 - eta * self._settings.weight_decay, out=params)
        # What leaves float32's range makes the next loss infinite, which stops the run by name.
        with np.errstate(over="ignore", invalid="ignore"):
            self._move(round_, eta, params, realization, update)
            self._take_mean(round_, params)

    def _move(self, _: int, eta: float, params: Tensor, realization: Realization, update: Compressed) -> None:
        realization.step(params, update, eta)

    def _take_mean(self, round_: int, params: Tensor) -> None:
        last, rounds = self._settings.mean_of_last, self._settings.rounds
        since = round_ - max(0, rounds - last)
        if not last or since < 1:
            return
        mean, share = self.state[-1], float(np.float32(1.0 / since))
        for vectors in _blocks(params, mean):
            w, m = vectors
            change = w - m
            change *= share
            m += change
        if round_ == rounds:
            params.copy_(mean)

    @property
    def nbytes(self) -> int:
        """The length of :meth:`content`."""
        return self.state.numel() * 4

    def content(self) -> bytes:
        """The state as it travels: float32, little-endian."""
        return self.state.cpu().numpy().astype("<f4", copy=False).tobytes()

    def load(self, content: bytes | memoryview) -> None:
        """Go on from a :meth:`content`, whose length is this one's.

        Raises:
            ProtocolError: if a value is not finite.
        """
        values = np.frombuffer(content, dtype="<f4").astype(np.float32).reshape(tuple(self.state.shape))
        if not np.isfinite(values).all():
            raise ProtocolError("an optimizer's state with a value that is not finite")
        self.state.copy_(torch.from_numpy(values))


class _Dense(Optimizer):
    """An optimizer that moves all coordinates, also where D is zero."""

    def _move(
        self, round_: int, eta: float, params: Tensor, realization: Realization, update: Compressed
    ) -> None:
        constants = [float(np.float32(constant)) for constant in self._constants(round_, eta)]
        decoded = realization.decode(update).to(params.device)
        for vectors in _blocks(params, decoded, *self.state[: self.slots]):
            self._move_block(constants, *vectors)

    @abc.abstractmethod
    def _constants(self, round_: int, eta: float) -> Sequence[float]:
        """What the round's operations take, before it is rounded to float32."""

    @abc.abstractmethod
    def _move_block(self, constants: Sequence[float], w: Any, d: Any, *state: Any) -> None:
        """Move a part of the model and of the state in place; ``d``, D's, is free to change."""


class Momentum(_Dense):
    """Heavy ball: the state is v."""

    slots = 1

    def _constants(self, round_: int, eta: float) -> Sequence[float]:  # noqa: ARG002  # every round alike
        return self._choice.beta_1, eta

    def _move_block(self, constants: Sequence[float], w: Any, d: Any, *state: Any) -> None:
        (v,), (beta, eta) = state, constants
        v *= beta
        v += d
        d[:] = v
        d *= eta
        w -= d


class Adam(_Dense):
    """Adam: the state is m and v."""

    slots = 2

    def _constants(self, round_: int, eta: float) -> Sequence[float]:
        beta_1, beta_2 = self._choice.beta_1, self._choice.beta_2
        root = math.sqrt(1.0 - power(beta_2, round_))
        step = eta * root / (1.0 - power(beta_1, round_))
        return beta_1, 1.0 - beta_1, beta_2, 1.0 - beta_2, self._choice.epsilon * root, step

    def _move_block(self, constants: Sequence[float], w: Any, d: Any, *state: Any) -> None:
        (m, v), (beta_1, rest_1, beta_2, rest_2, epsilon, step) = state, constants
        m *= beta_1
        m += d * rest_1
        d *= d
        d *= rest_2
        v *= beta_2
        v += d
        d[:] = np.sqrt(v) if isinstance(v, np.ndarray) else v.sqrt()
        d += epsilon
        change = m / d
        change *= step
        w -= change


_KINDS = {"sgd": Optimizer, "momentum": Momentum, "adam": Adam}


def create_optimizer(settings: AlgorithmSettings, dim: int, device: torch.device | str = "cpu") -> Optimizer:
    """The run's, before the first round."""
    return _KINDS[settings.optimizer.name](settings, dim, device)


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: a mathematical library's ``pow`` is not the same everywhere."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _blocks(*vectors: Tensor) -> Iterator[tuple[Any, ...]]:
    """The vectors, to be changed in place: in host memory as numpy's, block by block, so that a block is in
    cache for all operations on it; elsewhere whole, as torch's."""
    if vectors[0].device.type != "cpu":
        yield vectors
        return
    arrays = [vector.numpy() for vector in vectors]
    for start in range(0, len(arrays[0]), BLOCK):
        yield tuple(array[start : start + BLOCK] for array in arrays)
