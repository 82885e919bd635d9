"""Every compressor in plain numpy, from the paper and the documented formulas alone: x to C(x), dense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
from core_philox import subset, words
from numpy.typing import NDArray

from afl.core.algorithms.settings import CompressorChoice
from afl.core.randomness import Purpose

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def compressed(
    choice: CompressorChoice, x: Floats, seed: int, round_: int, purpose: int = Purpose.COMPRESSOR
) -> Floats:
    """C_t(x), float32."""
    dim = len(x)
    k = max(1, round(choice.options.get("ratio", 1.0) * dim))
    stream = words(seed, purpose, round_, 0)
    match choice.name:
        case "identity":
            return x.copy()
        case "top-k":
            kept = np.lexsort((np.arange(dim), -np.abs(x)))[:k]
        case "rand-k":
            kept = np.array(subset(stream, dim, k))
        case "scaled-sign":
            return sign(x)
        case "projection":
            return through(haar(stream, dim, k).T, x)
        case "dct-projection":
            return through(sampled_dct(stream, dim, k), x)
    result = np.zeros_like(x)
    result[kept] = x[kept]
    return result


def sign(x: Floats) -> Floats:
    """The scale from the exact sum; sign(0) = 0."""
    scale = np.float32(math.fsum(map(abs, x.tolist())) / len(x))
    return np.where(x > 0, scale, np.where(x < 0, -scale, np.float32(0)))


def through(rows: Doubles, x: Floats) -> Floats:
    """``Q^T (Q x)`` of orthonormal rows; the coefficients and the result are rounded to float32."""
    coefficients = (rows @ x.astype(np.float64)).astype(np.float32)
    return (rows.T @ coefficients.astype(np.float64)).astype(np.float32)


def sampled_dct(stream: Iterator[int], dim: int, k: int) -> Doubles:
    """``S C D`` as a matrix ``[k, dim]``: signs from the words' bits, the DCT-II, the rows S."""
    bits = [word >> place & 1 for word in islice(stream, -(-dim // 64)) for place in range(64)]
    signs = np.array([-1.0 if bit else 1.0 for bit in bits[:dim]])
    return dct_matrix(dim)[subset(stream, dim, k)] * signs


def dct_matrix(dim: int) -> Doubles:
    """``C[j, n] = sqrt(2/d) cos(pi (2n + 1) j / 2d)``, the first row by ``sqrt(1/2)`` less."""
    j, n = np.mgrid[:dim, :dim]
    matrix = np.sqrt(2 / dim) * np.cos(np.pi * (2 * n + 1) * j / (2 * dim))
    matrix[0] /= np.sqrt(2)
    return matrix


def haar(stream: Iterator[int], dim: int, k: int) -> Doubles:
    """U, ``[dim, k]``: the product of the reflections that the normal vectors of lengths d, d - 1, ... give,
    each as a whole matrix, and the signs of a QR decomposition whose R has a positive diagonal."""
    numbers = iter(normal(stream, dim * k - k * (k - 1) // 2))
    product, signs = np.eye(dim), np.zeros(k)
    for j in range(k):
        v = np.zeros(dim)
        v[j:] = list(islice(numbers, dim - j))
        signs[j] = -1.0 if v[j] >= 0 else 1.0
        v[j] -= signs[j] * np.linalg.norm(v)
        product = product @ (np.eye(dim) - 2 * np.outer(v, v) / (v @ v))
    return product[:, :k] * signs


def normal(stream: Iterator[int], count: int) -> list[float]:
    """Kinderman and Monahan's ratio of uniforms, a pair of words at a time."""
    numbers: list[float] = []
    while len(numbers) < count:
        u = 1 - (next(stream) >> 11) * 2.0**-53
        v = (next(stream) >> 11) * 2.0**-53
        x = math.sqrt(8 / math.e) * (v - 0.5) / u
        if x * x <= -4 * math.log(u):
            numbers.append(x)
    return numbers
