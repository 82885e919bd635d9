"""A compressor of the class C_AI whose values are rounded to a grid that all share: integers travel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afl.core.compressors.base import Compressed, Realization
from afl.core.grid import Grid, on_grid, rounded
from afl.core.vectors import is_finite
from afl.errors import NonFiniteError


class OnGrid(Realization):
    """A realization with values in integers: the residual keeps what rounding and clipping take away.

    Args:
        inner: the compressor's own realization, in float32.
        lengths: how many values each group of the grid has, int64 ``[groups]``.
        grid: as it is now.
        exponents: the grid's of the round, int32 ``[groups]``.
        is_exact: whether each value is one coordinate's, so that the residual cannot overflow.
    """

    def __init__(
        self,
        inner: Realization,
        lengths: NDArray[np.int64],
        grid: Grid,
        exponents: NDArray[np.int32],
        *,
        is_exact: bool,
    ) -> None:
        self._inner = inner
        self.lengths = lengths
        self.exponents = exponents
        self._limit, self._far = grid.limit, grid.far
        self._is_exact = is_exact

    def split(self, vector: Tensor) -> Compressed:
        """The integers; the vector loses what they stand for."""
        values = self._inner.values(vector)
        integers, sent = rounded(values, self.exponents, self.lengths, self._limit, self._far)
        self._inner.subtract(vector, values, sent)
        if not self._is_exact and not is_finite(vector):
            raise NonFiniteError("the residual of the update overflows float32")
        return Compressed(integers)

    def decode(self, compressed: Compressed) -> Tensor:
        """What the integers stand for, float32 ``[dim]``."""
        return self._inner.decode(self._floats(compressed))

    def add_to(self, total: Tensor, compressed: Compressed) -> None:
        """``total += C(x)``."""
        self._inner.add_to(total, self._floats(compressed))

    def step(self, params: Tensor, compressed: Compressed, eta: float) -> None:
        """``params -= eta C(x)``."""
        self._inner.step(params, self._floats(compressed), eta)

    def digest_material(self) -> bytes:
        """That of the compressor's own realization."""
        return self._inner.digest_material()

    def _floats(self, compressed: Compressed) -> Compressed:
        integers: NDArray[Any] = compressed.values
        return Compressed(on_grid(integers, self.exponents, self.lengths))
