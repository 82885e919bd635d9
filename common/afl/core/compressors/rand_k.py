"""Unscaled Rand-k (paper, appendix B.1): k coordinates, uniform among all k-subsets, the same for all."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.compressors.base import Compressed, RatioCompressor, Realization, Selection
from afl.core.messages import Encoding
from afl.core.randomness import Stream
from afl.core.vectors import put_at, take_out


class RandK(RatioCompressor):
    """``C(x) = P_S x``; delta = k/d in expectation over S.

    Only values travel, since S follows from the shared randomness.
    """

    name = "rand-k"
    encoding = Encoding.SEEDED
    additive_idempotent = True
    in_coordinates = True

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:
        """Draw the subset S of k coordinates."""
        return _Support(self.dim, torch.from_numpy(stream.subset(self.dim, self.count)).to(device))


class _Support(Selection):
    def __init__(self, dim: int, support: Tensor) -> None:
        super().__init__(dim)
        self._support = support

    def split(self, vector: Tensor) -> Compressed:
        return Compressed(take_out(vector, self._support))

    def indices(self, compressed: Compressed) -> Tensor:  # noqa: ARG002
        return self._support

    def values(self, vector: Tensor) -> NDArray[np.float32]:
        if vector.device.type != "cpu":
            return vector.index_select(0, self._support).cpu().numpy()
        return vector.numpy().take(self._support.numpy())

    def subtract(self, vector: Tensor, values: NDArray[np.float32], sent: NDArray[np.float32]) -> None:
        # The vector is not read again.
        put_at(vector, self._support, values - sent)

    def counts(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.diff(np.searchsorted(self._support.cpu().numpy(), offsets))

    def digest_material(self) -> bytes:
        return self._support.cpu().numpy().astype("<i8", copy=False).tobytes()
