"""Random rank-r orthogonal projection (paper, appendix B.1): onto a uniformly random subspace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afl.core.compressors.base import LinearRealization, RatioCompressor, Realization
from afl.core.messages import Encoding
from afl.core.randomness import Stream
from afl.errors import ConfigError

LARGEST = 1 << 22
"""The most d * r: 32 MB a realization, of which a few are kept, and 0.3 s to draw one (measured)."""


class Projection(RatioCompressor):
    """``C(x) = U U^T x``, U of d x r uniform among the matrices with orthonormal columns (Haar); delta = r/d
    in expectation over U.

    The r coefficients ``U^T x`` travel, since U follows from the shared randomness. Drawing U and applying it
    take O(d r), so it is for small d; ``dct-projection`` is for any.

    Raises:
        ConfigError: if ``d * r`` is above ``LARGEST``.
    """

    name = "projection"
    encoding = Encoding.SEEDED
    additive_idempotent = True

    def __init__(self, dim: int, options: Mapping[str, Any]) -> None:
        super().__init__(dim, options)
        if self.dim * self.count > LARGEST:
            raise ConfigError(
                f"projection: a matrix of {dim} x {self.count} has more than 2^22 = {LARGEST} numbers; "
                "take a smaller ratio, or dct-projection, which needs no matrix"
            )

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:  # noqa: ARG002
        """Draw the matrix U."""
        return _Frame(stream, self.dim, self.count)


class _Frame(LinearRealization):
    """U as a product of Householder reflections (Stewart, "The efficient generation of random orthogonal
    matrices with an application to condition estimators", 1980).

    It is the Q of the QR decomposition, with a positive diagonal of R, of a d x r matrix of independent
    standard normal numbers. Its j-th reflection turns the first axis of the last d - j coordinates into a
    direction that is uniform among them: a vector of d - j normal numbers. Neither U nor R need be computed.

    All sums are numpy's own, whose order depends on nothing but their length, and no linear algebra library
    has a part in them.
    """

    def __init__(self, stream: Stream, dim: int, rank: int) -> None:
        self._dim = dim
        self._reflectors: list[NDArray[np.float64]] = []
        self._signs = np.empty(rank)
        numbers = normal(stream, dim * rank - rank * (rank - 1) // 2)
        start = 0
        for j in range(rank):
            direction = numbers[start : start + dim - j]
            start += dim - j
            # v = x + sign(x_0) ||x|| e_0 takes x to -sign(x_0) ||x|| e_0 without cancellation.
            norm, sign = math.sqrt((direction * direction).sum()), math.copysign(1.0, direction[0])
            direction[0] += sign * norm
            direction *= math.sqrt(2.0 / (direction * direction).sum())
            self._reflectors.append(direction)
            self._signs[j] = -sign

    def analyse(self, vector: NDArray[np.float32]) -> NDArray[np.float64]:
        image = vector.astype(np.float64)
        for j, reflector in enumerate(self._reflectors):
            _reflect(image[j:], reflector)
        return image[: len(self._signs)] * self._signs

    def synthesise(self, coefficients: NDArray[np.float32]) -> NDArray[np.float64]:
        image = np.zeros(self._dim)
        image[: len(self._signs)] = coefficients * self._signs
        for j in reversed(range(len(self._reflectors))):
            _reflect(image[j:], self._reflectors[j])
        return image

    def digest_material(self) -> bytes:
        """The first reflection, of d numbers, rounded so that no two machines' arithmetic differs."""
        return np.rint(self._reflectors[0] * 2.0**20).astype("<i4").tobytes()


def _reflect(vector: NDArray[np.float64], reflector: NDArray[np.float64]) -> None:
    """``vector -= reflector <reflector, vector>``; a reflection, since ``||reflector||^2 = 2``."""
    vector -= reflector * (reflector * vector).sum()


def normal(stream: Stream, count: int) -> NDArray[np.float64]:
    """Independent standard normal numbers, float64 ``[count]``.

    By the ratio of uniforms (Kinderman and Monahan, 1977): a pair u in (0, 1], v in [0, 1) gives
    ``x = sqrt(8 / e) (v - 1/2) / u``, which is taken if ``x^2 <= -4 ln u`` (73 % are). So a number comes from
    the machine's arithmetic alone; the logarithm, which a library may round in its own way, only decides.
    """
    numbers = np.empty(0)
    while len(numbers) < count:
        pairs = stream.uniform(2 * (int(1.4 * (count - len(numbers))) + 16)).reshape(-1, 2)
        u = 1.0 - pairs[:, 0]
        x = math.sqrt(8.0 / math.e) * (pairs[:, 1] - 0.5) / u
        numbers = np.concatenate((numbers, x[x * x <= -4.0 * np.log(u)]))
    return numbers[:count]
