"""Top-k (paper, appendix B.1): the k coordinates of largest absolute value, by a total order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from afl.core.compressors.base import Compressed, RatioCompressor, Realization, Selection
from afl.core.messages import Encoding
from afl.core.randomness import Stream
from afl.core.vectors import take_out


class TopK(RatioCompressor):
    """The first k coordinates by (``|x|`` descending, index ascending); delta = k/d for every vector.

    The order is total, so that ties, devices and selection methods never change the result.
    """

    name = "top-k"
    encoding = Encoding.INDEXED
    additive_idempotent = False

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:  # noqa: ARG002
        """The same every round: Top-k has no randomness."""
        return _Largest(self.dim, self.count)


class _Largest(Selection):
    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim)
        self._count = count

    def split(self, vector: Tensor) -> Compressed:
        chosen = largest(vector, self._count)
        return Compressed(take_out(vector, chosen), chosen.cpu().numpy())

    def indices(self, compressed: Compressed) -> Tensor:
        assert compressed.indices is not None
        return torch.from_numpy(compressed.indices)


def largest(vector: Tensor, count: int) -> Tensor:
    """The indices of the first ``count`` by (``|x|`` descending, index ascending); ascending int64.

    Args:
        vector: float32 ``[dim]``, finite.
    """
    if count >= len(vector):
        return torch.arange(len(vector), device=vector.device)
    if vector.device.type == "cpu":
        # Magnitudes of finite floats order as their bits do; integers partition faster than floats.
        bits = vector.numpy().view(np.int32) & np.int32(0x7FFFFFFF)
        threshold = np.partition(bits, len(bits) - count)[len(bits) - count]
        chosen = bits >= threshold
        surplus = int(np.count_nonzero(chosen)) - count
        if surplus:
            chosen[np.flatnonzero(bits == threshold)[-surplus:]] = False
        return torch.from_numpy(np.flatnonzero(chosen))
    magnitude = vector.abs()
    threshold_value = torch.topk(magnitude, count, sorted=False).values.min()
    mask = magnitude >= threshold_value
    surplus = int(mask.sum()) - count
    if surplus:
        mask[torch.nonzero(magnitude == threshold_value).flatten()[-surplus:]] = False
    return torch.nonzero(mask).flatten()
