"""What a compressor is: ``C_t`` of the paper (Definitions 3 and 4), with one realization a round."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.errors import ConfigError
from afl.messages import Encoding
from afl.randomness import Stream

_STEP_BLOCK = 1 << 16
"""256 kB a block: within the second-level cache of current CPUs."""


@dataclass(frozen=True)
class Compressed:
    """A compressed vector in the form that travels.

    Attributes:
        values: float32 ``[count]``, on the host.
        indices: ascending int64 ``[count]`` where they travel (``Encoding.INDEXED``), else ``None``.
    """

    values: NDArray[np.float32]
    indices: NDArray[np.int64] | None = None


class Compressor(abc.ABC):
    """A compressor over vectors of one dimension.

    Subclass it, and register the class in the entry point group ``afl.compressors``.

    Args:
        dim: d.
        options: what the configuration gives besides the name.

    Raises:
        ConfigError: if an option is unknown or out of bounds.
    """

    name: ClassVar[str]
    encoding: ClassVar[Encoding]
    additive_idempotent: ClassVar[bool]
    """Whether it is in the class C_AI for each realization: then values can be summed as they are, and
    with shared randomness the downlink loses nothing (paper, section 3.2, key observation)."""

    lossless: ClassVar[bool] = False
    """Whether ``C(x) = x``: no residual is kept then."""

    def __init__(self, dim: int, options: Mapping[str, Any]) -> None:
        assert dim >= 1
        self.dim = dim
        self.options = dict(options)

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many values travel."""

    @property
    @abc.abstractmethod
    def delta(self) -> float:
        """The contraction: ``E ||C(x) - x||^2 <= (1 - delta) ||x||^2``."""

    @abc.abstractmethod
    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:
        """The round's realization, drawn from the round's stream; it depends on nothing else."""


class Realization(abc.ABC):
    """A compressor with its randomness fixed: a deterministic operator."""

    @abc.abstractmethod
    def split(self, vector: Tensor) -> Compressed:
        """Take ``C(vector)`` out of ``vector``, which keeps the residual ``vector - C(vector)``.

        Args:
            vector: float32 ``[dim]``, finite; changed in place.
        """

    @abc.abstractmethod
    def indices(self, compressed: Compressed) -> Tensor | None:
        """The coordinates that ``compressed.values`` are for, int64 ``[count]``; ``None`` for all."""

    def add_to(self, total: Tensor, compressed: Compressed) -> None:
        """``total += C(x)``, rounded once a coordinate; float32 ``[dim]``."""
        values = torch.from_numpy(writable(compressed.values)).to(total.device)
        indices = self.indices(compressed)
        if indices is None:
            total.add_(values)
        else:
            places = indices.to(total.device)
            total.index_copy_(0, places, total.index_select(0, places).add_(values))

    def step(self, params: Tensor, compressed: Compressed, eta: float) -> None:
        """``params -= eta C(x)``: a multiplication, then a subtraction, each rounded to float32.

        No fused multiply-add, so that every CPU and GPU gets the same bits (AFL-Com, line 13).
        """
        indices = self.indices(compressed)
        # A step beyond float32 makes the next loss infinite, which stops the run by name.
        with np.errstate(over="ignore", invalid="ignore"):
            self._step(params, compressed, indices, np.float32(eta))

    @staticmethod
    def _step(params: Tensor, compressed: Compressed, indices: Tensor | None, eta: np.float32) -> None:
        if indices is None and params.device.type == "cpu":
            _step_all(params.numpy(), compressed.values, eta)
            return
        change = torch.from_numpy(compressed.values * eta).to(params.device)
        if indices is None:
            params.sub_(change)
        else:
            places = indices.to(params.device)
            params.index_copy_(0, places, params.index_select(0, places).sub_(change))

    @abc.abstractmethod
    def digest_material(self) -> bytes:
        """Bytes that determine the realization, for the handshake's digest; empty where it has none."""


def _step_all(params: NDArray[np.float32], values: NDArray[np.float32], eta: np.float32) -> None:
    """``params -= eta values`` in blocks that stay in cache: a new vector a round costs page faults."""
    scratch = np.empty(min(len(params), _STEP_BLOCK), dtype=np.float32)
    for start in range(0, len(params), _STEP_BLOCK):
        block = params[start : start + _STEP_BLOCK]
        change = scratch[: len(block)]
        np.multiply(values[start : start + _STEP_BLOCK], eta, out=change)
        np.subtract(block, change, out=block)


def writable(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values, copied only if they share read-only memory, which torch does not take."""
    return values if values.flags.writeable else values.copy()


def ratio_option(name: str, options: Mapping[str, Any]) -> float:
    """The one option ``ratio`` of a sparsifier, in (0, 1].

    Raises:
        ConfigError: if it is missing, out of bounds, or not alone.
    """
    unknown = set(options) - {"ratio"}
    if unknown:
        raise ConfigError(f"{name}: unknown option {sorted(unknown)[0]!r}; it takes only `ratio`, in (0, 1]")
    ratio = options.get("ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"{name}: ratio is {ratio!r}; it must be a number in (0, 1]")
    return float(ratio)


def kept(ratio: float, dim: int) -> int:
    """k = max(1, round(ratio * d)); never 0, however small the model."""
    return max(1, round(ratio * dim))
