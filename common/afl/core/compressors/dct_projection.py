"""A random orthogonal projection in O(d log d): signs, cosine transforms, and a sample of coefficients."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from afl.core.compressors.base import LinearRealization, RatioCompressor, Realization
from afl.core.messages import Encoding
from afl.core.randomness import Stream

BLOCK = 1 << 14
"""Coordinates a transform: 128 kB of float64 stays in a second-level cache. One transform of length d takes
two or three times as long, and thirty times where d has a large prime factor (docs/decisions.md)."""


class DctProjection(RatioCompressor):
    """``C(x) = D C^T S^T S C D x``; delta = r/d in expectation, as S is uniform.

    D holds random signs, C is an orthonormal cosine transform (DCT-II), S takes r coefficients, uniform among
    all r-subsets. The r coefficients ``S C D x`` travel. C is one transform of length d below 2 ``BLOCK``;
    beyond, a transform for each block of ``BLOCK`` coordinates, the last of which takes what remains too.
    It works on the host; from other devices the vector is copied.
    """

    name = "dct-projection"
    encoding = Encoding.SEEDED
    additive_idempotent = True

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:  # noqa: ARG002
        """Draw the signs D, then the subset S."""
        words = stream.words(-(-self.dim // 64)).astype("<u8", copy=False)
        negative = np.unpackbits(words.view(np.uint8), count=self.dim, bitorder="little")
        return _Sampled(1 - 2 * negative.view(np.int8), stream.subset(self.dim, self.count))


class _Sampled(LinearRealization):
    def __init__(self, signs: NDArray[np.int8], sample: NDArray[np.int64]) -> None:
        self._signs = signs
        self._sample = sample
        self._blocks = [
            (slice(start, stop), slice(*np.searchsorted(sample, (start, stop))))
            for start, stop in blocks(len(signs))
        ]

    def analyse(self, vector: NDArray[np.float32]) -> NDArray[np.float64]:
        coefficients = np.empty(len(self._sample))
        for block, taken in self._blocks:
            transformed = dct(np.multiply(vector[block], self._signs[block], dtype=np.float64))
            coefficients[taken] = transformed[self._sample[taken] - block.start]
        return coefficients

    def synthesise(self, coefficients: NDArray[np.float32]) -> NDArray[np.float64]:
        vector = np.empty(len(self._signs))
        for block, taken in self._blocks:
            transformed = np.zeros(block.stop - block.start)
            transformed[self._sample[taken] - block.start] = coefficients[taken]
            np.multiply(inverse_dct(transformed), self._signs[block], out=vector[block])
        return vector

    def digest_material(self) -> bytes:
        return self._signs.tobytes() + self._sample.astype("<i8", copy=False).tobytes()


def blocks(dim: int) -> list[tuple[int, int]]:
    """Where each transform begins and ends."""
    starts = range(0, max(dim - BLOCK, 0) + 1, BLOCK)
    return list(zip(starts, [*starts[1:], dim], strict=True))


def dct(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """The orthonormal DCT-II, by one real Fourier transform of the same length (Makhoul, 1980); ``[n]``."""
    n = len(vector)
    mixed = np.concatenate((vector[::2], vector[1::2][::-1]))
    turned = np.fft.rfft(mixed) * _turns(n)
    return np.concatenate((turned.real, -turned.imag[(n - 1) // 2 : 0 : -1]))


def inverse_dct(coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    """What :func:`dct` takes to ``coefficients``; ``[n]``."""
    n = len(coefficients)
    turned = coefficients[: n // 2 + 1].astype(np.complex128)
    turned.imag[1:] = -coefficients[: (n - 1) // 2 : -1]
    mixed = np.fft.irfft(turned * _turns_back(n), n)
    vector = np.empty(n)
    vector[::2], vector[1::2] = mixed[: (n + 1) // 2], mixed[(n + 1) // 2 :][::-1]
    return vector


@lru_cache(maxsize=8)
def _turns(n: int) -> NDArray[np.complex128]:
    """``sqrt(2/n) exp(-i pi k / 2n)``, and ``sqrt(1/n)`` for k = 0; complex ``[n // 2 + 1]``."""
    turns: NDArray[np.complex128] = np.sqrt(2.0 / n) * np.exp(-0.5j * np.pi / n * np.arange(n // 2 + 1))
    turns[0] = np.sqrt(1.0 / n)
    return turns


@lru_cache(maxsize=8)
def _turns_back(n: int) -> NDArray[np.complex128]:
    return 1.0 / _turns(n)
