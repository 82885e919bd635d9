"""Numbers as integers modulo 2^64, of which a sum can be read although none of them can."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs.modular import Modular, modular, signed
from afl.core.messages import MAX_METRICS, Encoding, Payload, PayloadHeader, Role
from afl.errors import NonFiniteError

BITS = 64

FRACTION_BITS = 28
"""Of a loss or a metric: it is told to 4e-9."""

LARGEST = 2.0**20
"""The largest loss or metric: the sum of 2^15 workers' fits."""

SHARPNESS = 50.0
"""beta: the smooth worst loss ``ln(sum_i exp(beta l_i)) / beta`` is above the worst by at most ln(m) / beta,
0.05 of ten workers."""

LARGEST_IN_WORST = 64.0
"""A loss above it counts as so much in the smooth worst loss."""

_EXPONENTIAL_BITS = 32
"""Behind the point of ``exp(beta l)``: a loss below -0.4 adds nothing to the smooth worst."""

_LIMB_BITS = 32
"""Of a long number, in each word: the sum of 2^32 workers' fits beside them."""

LIMBS = math.ceil((SHARPNESS * LARGEST_IN_WORST / math.log(2) + _EXPONENTIAL_BITS + 1) / _LIMB_BITS)
"""Words of ``exp(beta l)``."""


def numbers(count: int, role: Role) -> PayloadHeader:
    """The header of so many integers modulo 2^64."""
    return _CODEC.header(count, count, role)


def payload_of(words: Sequence[int], role: Role) -> Payload:
    """The payload of integers, of which only the rest modulo 2^64 is read."""
    residues: NDArray[Any] = np.array([word % (1 << BITS) for word in words], dtype=np.uint64)
    return _CODEC.whole(residues, role, len(words))


def signed_sums(residues: NDArray[np.uint64]) -> list[int]:
    """What integers that were added modulo 2^64 add up to, if that is below 2^63."""
    integers: list[int] = signed(residues, BITS).tolist()
    return integers


def fixed(value: float, what: str) -> int:
    """A loss or metric in fixed point.

    Raises:
        NonFiniteError: if it is too large, or not finite; ``what`` names it.
    """
    if not abs(value) <= LARGEST:
        raise NonFiniteError(f"{what} is {value}; with losses: hidden it must be within {LARGEST:g} of zero")
    return round(math.ldexp(value, FRACTION_BITS))


def mean_of(total: int, workers: int) -> float:
    """The mean of numbers in fixed point that add up to ``total``."""
    return math.ldexp(total / workers, -FRACTION_BITS)


def metrics_header() -> PayloadHeader:
    """The header of :func:`metrics_payload`."""
    return numbers(LIMBS + MAX_METRICS, Role.METRICS)


def metrics_payload(metrics: Mapping[str, float]) -> Payload:
    """A worker's metrics, ``loss`` among them: ``exp(beta loss)``, then each in the order of the names.

    Raises:
        NonFiniteError: if one is too large, or not finite.
    """
    told = [fixed(metrics[name], f"the metric {name}") for name in sorted(metrics)]
    rest = [0] * (MAX_METRICS - len(told))
    return payload_of([*_limbs(_exponential(metrics["loss"])), *told, *rest], Role.METRICS)


def means_of(sums: NDArray[np.uint64], names: Iterable[str], workers: int) -> tuple[dict[str, float], float]:
    """The means of all workers' metrics by name, and their smooth worst loss, from the sum of their payloads.

    Args:
        sums: uint64 ``[LIMBS + MAX_METRICS]``.
        names: of the metrics.
    """
    totals = signed_sums(sums[LIMBS:])
    means = {name: mean_of(total, workers) for name, total in zip(sorted(names), totals, strict=False)}
    exponentials = sum(limb << (_LIMB_BITS * place) for place, limb in enumerate(sums[:LIMBS].tolist()))
    if exponentials == 0:
        return means, means["loss"]
    # A logarithm of any whole number, also of one beyond a float's range.
    shift = max(0, exponentials.bit_length() - 64)
    logarithm = math.log(exponentials >> shift) + (shift - _EXPONENTIAL_BITS) * math.log(2)
    # Where losses are above what the smooth worst counts, the mean says more of the worst.
    return means, max(means["loss"], logarithm / SHARPNESS)


def _exponential(loss: float) -> int:
    """``exp(beta loss)`` with so many bits behind the point, also beyond a float's range."""
    powers = SHARPNESS * min(loss, LARGEST_IN_WORST) / math.log(2)
    whole = math.floor(powers)
    significand = int(math.ldexp(2.0 ** (powers - whole), 52))
    shift = whole + _EXPONENTIAL_BITS - 52
    return significand << shift if shift >= 0 else significand >> -shift


def _limbs(number: int) -> list[int]:
    return [number >> (_LIMB_BITS * place) & ((1 << _LIMB_BITS) - 1) for place in range(LIMBS)]


_CODEC: Modular = modular(Encoding.DENSE, BITS)
