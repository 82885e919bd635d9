"""The grid that integer messages lie on: a step for each group of values, which all copies of the model
derive alike from what was applied, so that no message says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.vectors import BLOCK
from afl.errors import ProtocolError

FIRST_RANGE = 0.05
"""The largest value that the first round's grid holds."""

HEADROOM = 1.25
"""A range over the largest sum. Above 1, a range doubles as long as a single worker is clipped, whose sum
cannot exceed it."""

SHRINK = 0.7
"""What a range falls to in a round whose sums were all well below it."""

SHRINK_EMPTY = 0.5
"""What a range falls to in a round whose values were all rounded to zero."""

DEEPEST = 2.0**-20
"""The smallest range, as a part of the largest group's: values that come back after a long silence are then
within the grid's reach after twenty rounds."""

LEAST_EXPONENT, MOST_EXPONENT = -126, 90
"""A step and its inverse are normal numbers in float32, and sums of integers times a step are finite."""

_EXACT = 24
"""Bits of a float32's significand."""


class Grid:
    """Steps ``2^s_l`` by group l; integers from ``-L`` to ``L`` times a step are what a worker can send.

    s_l is the least with ``L 2^s_l >= R_l``. R_l follows the sums D_t that are applied: it is the largest of
    their values in the group with some headroom, but it falls slowly.

    Args:
        groups: how many; no value belongs to two.
        bits: of an integer with its sign; ``L = 2^(bits - 1) - 1``.

    Attributes:
        ranges: R, float64 ``[groups]``: all that the grid's future depends on.
    """

    def __init__(self, groups: int, bits: int) -> None:
        self.limit = (1 << (bits - 1)) - 1
        self.ranges: NDArray[np.float64] = np.full(groups, FIRST_RANGE)

    def content(self) -> bytes:
        """:attr:`ranges` as they travel, little-endian."""
        return self.ranges.astype("<f8").tobytes()

    def load(self, content: bytes | memoryview) -> None:
        """Go on from a :meth:`content`, whose length is this grid's.

        Raises:
            ProtocolError: if a range is no positive number.
        """
        ranges = np.frombuffer(content, dtype="<f8").astype(np.float64)
        if not (np.isfinite(ranges).all() and (ranges > 0).all()):
            raise ProtocolError("a grid with a range that is not a positive number")
        assert ranges.shape == self.ranges.shape
        self.ranges = ranges

    @property
    def exponents(self) -> NDArray[np.int32]:
        """s, int32 ``[groups]``."""
        fraction, exponents = np.frexp(self.ranges / self.limit)
        exponents -= fraction == 0.5
        return exponents.clip(LEAST_EXPONENT, MOST_EXPONENT)

    def move(self, sums: NDArray[Any], counts: NDArray[np.int64]) -> None:
        """Follow a round's D_t.

        Args:
            sums: integers ``[sum of counts]``, group after group.
            counts: how many of them each group has, int64 ``[groups]``; a group without any keeps its range.
        """
        sent = counts > 0
        starts = (np.cumsum(counts) - counts)[sent]
        peaks = np.maximum(np.maximum.reduceat(sums, starts), -np.minimum.reduceat(sums, starts))
        largest = np.ldexp(peaks.astype(np.float64), self.exponents[sent])
        before = self.ranges[sent]
        self.ranges[sent] = np.where(
            peaks > 0, np.maximum(HEADROOM * largest, SHRINK * before), SHRINK_EMPTY * before
        )
        np.maximum(self.ranges, DEEPEST * self.ranges.max(), out=self.ranges)


@dataclass(frozen=True)
class IntegerRound:
    """What the integer messages of a round were like.

    The shares are of what was rounded: the workers' messages or, where only the downlink has integers, D.

    Attributes:
        uplink_bits: a value of the workers' messages, as sent; ``None`` where those are float32.
        downlink_bits: a value of D, as sent.
        zeros: the share of integers that are 0.
        at_limit: the share that are L or -L: clipped, or only just not.
        smallest_exponent: s of the finest group; its step is ``2^s``.
        largest_exponent: of the coarsest.
    """

    uplink_bits: float | None
    downlink_bits: float
    zeros: float
    at_limit: float
    smallest_exponent: int
    largest_exponent: int


def counted_integers(integers: NDArray[Any], limit: int) -> NDArray[np.int64]:
    """How many integers there are, how many of them are 0, and how many are ``limit`` or ``-limit``."""
    zeros = at_limit = 0
    for start in range(0, len(integers), BLOCK):
        block = integers[start : start + BLOCK]
        zeros += len(block) - int(np.count_nonzero(block))
        at_limit += int(np.count_nonzero(block == limit) + np.count_nonzero(block == -limit))
    return np.array([len(integers), zeros, at_limit])


def rounded(
    values: NDArray[np.float32], exponents: NDArray[np.int32], counts: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The integers i nearest to ``p / 2^s`` within ``-limit..limit``, ties to even; and c = ``i 2^s``.

    ``p - c`` is a float32 whenever ``|p| < 2^24 L 2^s``. To that end i is rounded towards zero, to a multiple
    of p's last place, where that is coarser than the grid; beyond, c is ``L 2^s`` and less than half of it.

    Args:
        values: p, finite float32 ``[k]``.
        exponents: s by group.
        counts: how many values each group has.
    """
    integers = np.empty(len(values), dtype=np.int32)
    sent = np.empty_like(values)
    for start, stop, exponent in _runs(exponents, counts):
        block = values[start:stop]
        with np.errstate(over="ignore"):
            scaled = block * np.float32(2.0**-exponent)
        np.rint(scaled, out=scaled)
        peak = max(scaled.max(), -scaled.min())
        if peak > limit:
            scaled.clip(-limit, limit, out=scaled)
            if peak >= 1 << _EXACT:
                _keep_exact(scaled, block, exponent, limit)
        integers[start:stop] = scaled
        np.multiply(scaled, np.float32(2.0**exponent), out=sent[start:stop])
    return integers, sent


def _keep_exact(scaled: NDArray[np.float32], values: NDArray[np.float32], exponent: int, limit: int) -> None:
    _, magnitudes = np.frexp(values)
    coarser = magnitudes - exponent - _EXACT
    far = np.flatnonzero(coarser > 0)
    shift = coarser[far].clip(max=limit.bit_length())
    largest = limit >> shift << shift
    scaled[far] = np.copysign(np.where(largest > 0, largest, limit), values[far])


def on_grid(
    integers: NDArray[Any], exponents: NDArray[np.int32], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """``i 2^s`` in float32: exact up to 24 bits, else i is rounded first."""
    values = np.empty(len(integers), dtype=np.float32)
    for start, stop, exponent in _runs(exponents, counts):
        block = values[start:stop]
        block[...] = integers[start:stop]
        block *= np.float32(2.0**exponent)
    return values


def _runs(exponents: NDArray[np.int32], counts: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Where each block of one group begins and ends, and the group's exponent."""
    start = 0
    for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True):
        for begin in range(start, start + count, BLOCK):
            yield begin, min(begin + BLOCK, start + count), exponent
        start += count
