"""The grid that integer messages lie on: a step for each group of values, which all copies of the model
derive alike from what was applied, so that no message says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.vectors import BLOCK
from afl.errors import ProtocolError

FIRST_RANGE = 0.05
"""The largest value of the first round's grid."""

WIDE = 15
"""From this L on, each value that does not fit asks for a larger range: clipping delays the largest values,
and with large steps a run then diverges (docs/decisions.md). With a smaller L, steps that reach all values
would be too coarse for most."""

WIDE_FIRST = 32.0
"""There, the first range is so many times :data:`FIRST_RANGE`: one that is too large is halved in each round
whose values are all 0, and one that is too small clips, which some models do not bear."""

FAR, FAR_SMALL = 2.5, 8.0
"""With a smaller L, a value of more than so many ranges asks for a larger one. What lies between is clipped,
and the rest of it sent with the next message that has the coordinate. Small groups get the finer steps of a
smaller range: they cost little. Sixteen ranges, at four bits, are clipped for so long that the residual grows
without end (docs/decisions.md)."""

SMALL_SHARE = 0.25
"""The smallest groups, as far as they have no more than this share of all values together, are small."""

GROWTH = 2.0
"""A range in which somebody has such a value is so much larger in the next round."""

DECAY = 0.95
"""A range in which nobody has one becomes so much of itself in the next round."""

EMPTY_DECAY = 0.5
"""The same, where all values were rounded to zero."""

DEEPEST = 2.0**-20
"""The smallest range, as a part of the largest group's: values that come back after a long silence are then
within the grid's reach after twenty rounds."""

LEAST_EXPONENT, MOST_EXPONENT = -126, 90
"""A step and its inverse are normal numbers in float32, and sums of integers times a step are finite."""

_EXACT = 24
"""Bits of a float32's significand."""


class Grid:
    """Steps ``2^s_l`` by group l; a worker's message has integers from ``-L`` to ``L`` times a step.

    s_l is the least with ``L 2^s_l >= R_l``. Behind its k integers a message has one more for each group: 1
    if a value of the group is far beyond its range, else 0. In the sum, these say in which groups somebody
    needs a larger range, which :meth:`move` follows; every copy of the model applies the same sums.

    Args:
        sizes: how many values each group has; each value belongs to one.
        bits: of an integer with its sign; ``L = 2^(bits - 1) - 1``.
        shared_by: how many workers' integers must add up to one of so many bits: L is that part of it.

    Attributes:
        ranges: R, float64 ``[groups]``: all that the grid's future depends on.
        limit: L.
        far: beyond which integer, before it is clipped, a value asks for a larger range; float64
            ``[groups]``.
    """

    def __init__(self, sizes: Sequence[int], bits: int, shared_by: int = 1) -> None:
        self.limit = ((1 << (bits - 1)) - 1) // shared_by
        assert self.limit >= 1
        self.ranges: NDArray[np.float64] = np.full(len(sizes), FIRST_RANGE)
        self._bounds = self.limit * 2.0**LEAST_EXPONENT, self.limit * 2.0**MOST_EXPONENT
        self.far: NDArray[np.float64] = np.full(len(sizes), float(self.limit))
        if self.limit >= WIDE:
            self.ranges *= WIDE_FIRST
        else:
            ascending = np.argsort(sizes, kind="stable")
            is_small = np.empty(len(sizes), dtype=np.bool_)
            is_small[ascending] = np.cumsum(np.array(sizes)[ascending]) <= SMALL_SHARE * sum(sizes)
            self.far = self.limit * np.where(is_small, FAR_SMALL, FAR)

    @property
    def nbytes(self) -> int:
        """The length of :meth:`content`."""
        return self.ranges.nbytes

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
            sums: integers ``[sum of counts + groups]``, group after group, then one for each group.
            counts: how many values each group has, int64 ``[groups]``; one without any keeps its range.
        """
        sent = counts > 0
        starts = (np.cumsum(counts) - counts)[sent]
        is_empty = np.bitwise_or.reduceat(sums[: -len(counts)], starts) == 0
        is_far = sums[-len(counts) :][sent] > 0
        self.ranges[sent] *= np.where(is_far, GROWTH, np.where(is_empty, EMPTY_DECAY, DECAY))
        np.maximum(self.ranges, DEEPEST * self.ranges.max(), out=self.ranges)
        # Where steps go no further, ranges must not either: a model at rest for a thousand rounds would have
        # ranges of zero, and each round of it would take another to come back.
        self.ranges.clip(*self._bounds, out=self.ranges)


@dataclass(frozen=True)
class IntegerRound:
    """What the integer messages of a round were like.

    The shares are of what was rounded: the workers' values or, where only the downlink has integers, D's; of
    D's too where the workers' are masked, although those were what was rounded and clipped. The
    groups' own integers are not counted, but the bits that they take are.

    Attributes:
        uplink_bits: a value of the workers' messages, as sent; ``None`` where those are float32.
        downlink_bits: a value of D, as sent.
        zeros: the share of integers that are 0.
        at_limit: the share that are L or -L, most of them clipped.
        smallest_exponent: s of the finest group; its step is ``2^s``.
        largest_exponent: of the coarsest.
        of_update: whether the shares are D's.
    """

    uplink_bits: float | None
    downlink_bits: float
    zeros: float
    at_limit: float
    smallest_exponent: int
    largest_exponent: int
    of_update: bool = False


def integer_type(bits: int) -> type[np.signedinteger[Any]]:
    """The narrowest type that holds integers of ``bits`` bits."""
    return next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if bits <= 8 * kind().itemsize)


def counted_integers(integers: NDArray[Any], limit: int) -> NDArray[np.int64]:
    """How many integers there are, how many of them are 0, and how many are ``limit`` or ``-limit``."""
    zeros = at_limit = 0
    for start in range(0, len(integers), BLOCK):
        block = integers[start : start + BLOCK]
        zeros += len(block) - int(np.count_nonzero(block))
        at_limit += int(np.count_nonzero(block == limit) + np.count_nonzero(block == -limit))
    return np.array([len(integers), zeros, at_limit])


def rounded(
    values: NDArray[np.float32],
    exponents: NDArray[np.int32],
    counts: NDArray[np.int64],
    limit: int,
    far: NDArray[np.float64],
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The integers i nearest to ``p / 2^s`` within ``-limit..limit``, ties to even, and behind them the
    groups' own, in their :func:`integer_type`, ``[k + groups]``; and c = ``i 2^s``, float32 ``[k]``.

    ``p - c`` is a float32 itself wherever ``|p| <= 2^23 L 2^s``. To that end i is rounded towards zero, to a
    multiple of p's last place, where that is coarser than the grid. Beyond, c is ``L 2^s`` and not as much as
    p's last place, so that the difference is rounded, once.

    Args:
        values: p, finite float32 ``[k]``.
        exponents: s by group.
        counts: how many values each group has.
        far: beyond which integer, before it is clipped, a value makes its group's own integer 1.
    """
    integers = np.empty(len(values) + len(counts), dtype=integer_type(limit.bit_length() + 1))
    is_far = integers[len(values) :]
    is_far.fill(0)
    sent = np.empty_like(values)
    for group, start, stop, exponent in _runs(exponents, counts):
        block = values[start:stop]
        with np.errstate(over="ignore"):
            scaled = block * np.float32(2.0**-exponent)
        np.rint(scaled, out=scaled)
        peak = max(scaled.max(), -scaled.min())
        if peak > limit:
            is_far[group] |= peak > far[group]
            scaled.clip(-limit, limit, out=scaled)
            if peak >= 1 << _EXACT:
                _keep_exact(scaled, block, exponent, limit)
        integers[start:stop] = scaled
        np.multiply(scaled, np.float32(2.0**exponent), out=sent[start:stop])
    return integers, sent


def _keep_exact(scaled: NDArray[np.float32], values: NDArray[np.float32], exponent: int, limit: int) -> None:
    _, magnitudes = np.frexp(values)
    coarser = magnitudes - exponent - _EXACT
    # Of zero, frexp says the exponent of 1.
    far = np.flatnonzero((coarser > 0) & (values != 0))
    shift = coarser[far].clip(max=limit.bit_length())
    largest = limit >> shift << shift
    scaled[far] = np.copysign(np.where(largest > 0, largest, limit), values[far])


def on_grid(
    integers: NDArray[Any], exponents: NDArray[np.int32], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """``i 2^s`` in float32 ``[k]``: exact up to 24 bits, else i is rounded first.

    Args:
        integers: ``[k + groups]``, those of the groups at the end.
    """
    values = np.empty(len(integers) - len(counts), dtype=np.float32)
    for _, start, stop, exponent in _runs(exponents, counts):
        block = values[start:stop]
        block[...] = integers[start:stop]
        block *= np.float32(2.0**exponent)
    return values


def _runs(exponents: NDArray[np.int32], counts: NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """A block of one group: which, where it begins and ends, and the exponent."""
    start = 0
    for group, (exponent, count) in enumerate(zip(exponents.tolist(), counts.tolist(), strict=True)):
        for begin in range(start, start + count, BLOCK):
            yield group, begin, min(begin + BLOCK, start + count), exponent
        start += count
