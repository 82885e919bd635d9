"""The nearest points of the simplex, and of that part of it where no weight is above a cap."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def project_below_cap(log_weights: NDArray[np.float64], largest: float) -> NDArray[np.float64]:
    """The nearest point of the simplex with no weight above ``largest``, in Kullback-Leibler divergence.

    It is ``min(c q_i, largest)`` for the one c for which it sums to 1 (Herbster, Warmuth 2001): the largest
    weights are capped, as few as will do, and the others keep their ratios.

    Args:
        log_weights: of a point of the simplex, as logarithms, finite float64 ``[m]``.
        largest: above 1/m, at most 1.

    Returns:
        The logarithms of the nearest point, ``[m]``.
    """
    order = np.argsort(-log_weights, kind="stable")
    descending = log_weights[order]
    ratios = np.exp(np.diff(descending)).tolist()
    # Of weight k and those behind it, in units of weight k: no logarithm is so low that their count is lost.
    sums = [1.0]
    for ratio in reversed(ratios):
        sums.append(1.0 + ratio * sums[-1])
    left = 1.0 - largest * np.arange(len(order))
    # Where one more cap's worth is left, rounding must not take it for two.
    fits = (left <= largest + 1e-12) | (left <= largest * np.array(sums[::-1]))
    capped = int(np.argmax(fits))
    raised = math.log(left[capped] / sums[len(order) - 1 - capped])
    projected: NDArray[np.float64] = log_weights - descending[capped] + raised
    projected[order[:capped]] = math.log(largest)
    return np.minimum(projected, math.log(largest))


def project_to_simplex(point: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest point of the simplex in the Euclidean norm; finite float64 ``[m]``.

    By sorting (Held, Wolfe, Crowder 1974; Duchi et al. 2008): ``max(x - theta, 0)`` for the one theta
    for which it sums to 1.
    """
    # Only the distances to the largest matter; from there the sums are exact where the answer is not zero.
    with np.errstate(over="ignore"):
        below = point - point.max()
        descending = np.sort(below)[::-1]
        excess = np.cumsum(descending) - 1.0
        counts = np.arange(1, len(point) + 1)
        positive = int(np.flatnonzero(descending * counts > excess)[-1])
    theta = excess[positive] / counts[positive]
    projected: NDArray[np.float64] = np.maximum(below - theta, 0.0)
    projected /= projected.sum()
    return projected
