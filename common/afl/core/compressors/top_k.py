"""Top-k (paper, appendix B.1): the k coordinates of largest absolute value, by a total order."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.compressors.base import Compressed, RatioCompressor, Realization, Selection
from afl.core.messages import Encoding
from afl.core.randomness import Stream
from afl.core.vectors import BLOCK, take_out

_SAMPLED = 61
"""One value of so many: a prime, so that layers with sizes of powers of two do not bias the sample."""


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
        values = vector.numpy()
        places = _candidates(values, count)
        if len(places) < count:
            return torch.from_numpy(_first(values, count))
        return torch.from_numpy(places[_first(values[places], count)])
    magnitude = vector.abs()
    threshold_value = torch.topk(magnitude, count, sorted=False).values.min()
    mask = magnitude >= threshold_value
    surplus = int(mask.sum()) - count
    if surplus:
        mask[torch.nonzero(magnitude == threshold_value).flatten()[-surplus:]] = False
    return torch.nonzero(mask).flatten()


def _candidates(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Places, ascending, that hold the first ``count`` if they are as many: those of the values from a bound
    on that a sample suggests. One pass instead of a partition of all; none where that would gain little."""
    sample = np.abs(values[::_SAMPLED])
    expected = count / len(values) * len(sample)
    # Four standard deviations more than it should take, so that they are too few once in many rounds.
    rank = int(expected + 4 * math.sqrt(expected) + 1)
    if 3 * rank > len(sample):
        return np.zeros(0, dtype=np.int64)
    bound = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    scratch, found = np.empty(BLOCK, dtype=np.float32), []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        found.append(np.flatnonzero(np.abs(block, out=scratch[: len(block)]) >= bound) + start)
    return np.concatenate(found)


def _first(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Where the first ``count`` by the order of :func:`largest` are, ascending."""
    # Magnitudes of finite floats order as their bits do; integers partition faster than floats.
    bits = values.view(np.int32) & np.int32(0x7FFFFFFF)
    threshold = np.partition(bits, len(bits) - count)[len(bits) - count]
    chosen = bits >= threshold
    surplus = int(np.count_nonzero(chosen)) - count
    if surplus:
        chosen[np.flatnonzero(bits == threshold)[-surplus:]] = False
    return np.flatnonzero(chosen)
