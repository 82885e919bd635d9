"""Scaled sign (paper, appendix B.1): a sign for each coordinate, and one scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.messages import Encoding
from afl.core.randomness import Stream
from afl.core.vectors import BLOCK
from afl.errors import ConfigError

_SMALLEST = np.float32(2.0**-149)
_SIGNS = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""The eight signs of each byte, +1 or -1; ``[256, 8]``."""


class ScaledSign(Compressor):
    """``C(x) = (||x||_1 / d) sign(x)`` with ``sign(0) = 0``; delta = 1/d in the worst case.

    For one vector it loses ``(1 - ||x||_1^2 / (d ||x||_2^2)) ||x||_2^2`` and, for each zero of x, one square
    of the scale less. It works on the host; from other devices the vector is copied.
    """

    name = "scaled-sign"
    encoding = Encoding.SIGNS
    additive_idempotent = False

    def __init__(self, dim: int, options: Mapping[str, Any]) -> None:
        super().__init__(dim, options)
        if options:
            raise ConfigError(f"scaled-sign: unknown option {sorted(options)[0]!r}; it takes none")

    @property
    def count(self) -> int:
        """A sign for each coordinate that is not zero: at most d."""
        return self.dim

    @property
    def delta(self) -> float:
        """1/d, which a vector with one coordinate that is not zero attains."""
        return 1.0 / self.dim

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:  # noqa: ARG002
        """The same every round: there is no randomness."""
        return _Signs(self.dim)


class _Signs(Realization):
    def __init__(self, dim: int) -> None:
        self._dim = dim

    def split(self, vector: Tensor) -> Compressed:
        array = vector.cpu().numpy()
        negative = array < 0.0
        zeros = np.flatnonzero(array == 0.0)
        if len(zeros):
            negative = np.delete(negative, zeros)
        compressed = Compressed(np.array([scale_of(array)]), zeros, np.packbits(negative, bitorder="little"))
        self.step(vector, compressed, 1.0)
        return compressed

    def decode(self, compressed: Compressed) -> Tensor:
        assert compressed.signs is not None
        assert compressed.indices is not None
        scaled = (_SIGNS * compressed.values[0]).astype(np.float32)
        count = self._dim - len(compressed.indices)
        signed = scaled[compressed.signs].reshape(-1)[:count]
        if count == self._dim:
            return torch.from_numpy(signed)
        dense = np.zeros(self._dim, dtype=np.float32)
        others = np.ones(self._dim, dtype=np.bool_)
        others[compressed.indices] = False
        dense[others] = signed
        return torch.from_numpy(dense)


def scale_of(array: NDArray[np.float32]) -> np.float32:
    """``||x||_1 / d`` rounded to float32; the same bits on every machine.

    The sum is in float64, which cannot overflow, in a fixed order: position j of ``BLOCK`` (2^15) partial
    sums takes x_j, x_{j + BLOCK}, ... in turn; then the partial sums' second half is added to their first
    until one is left. A scale that would round to zero though x is not zero is the smallest float32: no
    coordinate that is not zero is less, so that C still contracts.

    Args:
        array: float32 ``[dim]``, finite.
    """
    sums = np.zeros(min(BLOCK, len(array)))
    for start in range(0, len(array), BLOCK):
        block = np.abs(array[start : start + BLOCK])
        sums[: len(block)] += block
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        sums[: len(sums) - half] += sums[half:]
        sums = sums[:half]
    scale = np.float32(sums[0] / len(array))
    return max(scale, _SMALLEST) if sums[0] > 0.0 else scale
