"""Means of finite numbers are finite, though their sums need not be. Pure, from plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence


def settled(mean: float, values: Sequence[float]) -> float:
    """``mean`` as it was computed; where the sum in it has overflowed, the mean that the values have.

    Args:
        values: finite, and at least one.
    """
    if math.isfinite(mean):
        return mean
    half = math.fsum(value / (2 * len(values)) for value in values)
    # Rounding must not lead out of the values' own range.
    return min(max(2 * half, min(values)), max(values))
