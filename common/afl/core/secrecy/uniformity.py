"""Whether residues look as if drawn uniformly, each by itself, as they do under masks that nobody knows.

A run whose masks are right fails with a probability of :data:`FALSE_ALARM`. The reverse is no proof: to
whoever knows the masks the residues are no secret, and they look just the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

FALSE_ALARM = 1e-6
"""Of all tests of a run together."""

CELL_BITS = 8
"""A histogram has at most 2^8 cells."""

LEAST_EXPECTED = 32
"""In a cell of a histogram, so that chi-square's distribution holds far out in its tail; the residues that
tests of single bits need."""

HIGHEST, LOWEST, STEP = "highest bits", "lowest bits", "change since the last message"
SINGLE = "share of ones at each bit"


class Uniformity:
    """Histograms of residues modulo ``2^bits``, message by message.

    Attributes:
        count: residues.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._cell_bits = min(bits, CELL_BITS)
        self._histograms = {
            name: np.zeros(1 << self._cell_bits, dtype=np.int64) for name in (HIGHEST, LOWEST, STEP)
        }
        self._ones = np.zeros(bits, dtype=np.int64)
        self._last: NDArray[np.unsignedinteger] | None = None
        self.count = 0

    def add(self, residues: NDArray[np.unsignedinteger]) -> None:
        """Count a message: unsigned ``[n]``, each below ``2^bits``."""
        kind = residues.dtype.type
        shift, low = kind(self._bits - self._cell_bits), kind((1 << self._cell_bits) - 1)
        self._count(HIGHEST, residues >> shift)
        self._count(LOWEST, residues & low)
        if self._last is not None and len(self._last) == len(residues):
            # Of one mask used twice, only the difference of the two messages is left. The differences of
            # independent uniform residues are independent and uniform too.
            largest = kind((1 << self._bits) - 1)
            self._count(STEP, ((residues - self._last) & largest) >> shift)
        self._ones += [int((residues >> kind(place) & kind(1)).sum()) for place in range(self._bits)]
        self._last = residues
        self.count += len(residues)

    def probabilities(self) -> Mapping[str, float]:
        """By test, how likely uniform residues are to look as uneven as these; without the tests for which
        there are too few."""
        found = {}
        for name, histogram in self._histograms.items():
            (counts,) = _coarsened(name, [histogram])
            if len(counts) > 1:
                expected = counts.sum() / len(counts)
                found[name] = _tail(float(((counts - expected) ** 2).sum()) / expected, len(counts) - 1)
        if self.count >= LEAST_EXPECTED:
            deviations = (2 * self._ones - self.count) ** 2 / self.count
            found[SINGLE] = _tail(float(deviations.sum()), self._bits)
        return found

    def compared(self, other: Uniformity) -> Mapping[str, float]:
        """By test, how likely two draws from one distribution are to differ as much as these."""
        found = {}
        for name, histogram in self._histograms.items():
            ours, theirs = _coarsened(name, [histogram, other._histograms[name]])
            if len(ours) > 1:
                ratio = math.sqrt(theirs.sum() / ours.sum())
                both = np.maximum(ours + theirs, 1)
                found[name] = _tail(float(((ours * ratio - theirs / ratio) ** 2 / both).sum()), len(ours) - 1)
        return found

    def _count(self, name: str, cells: NDArray[np.unsignedinteger]) -> None:
        histogram = self._histograms[name]
        histogram += np.bincount(cells.astype(np.int64), minlength=len(histogram))


def _coarsened(name: str, histograms: Sequence[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
    """With as many cells as the smallest has residues for; one cell where it has too few."""
    size = len(histograms[0])
    least = min(int(histogram.sum()) for histogram in histograms)
    cells = min(size, 1 << max(0, (least // LEAST_EXPECTED).bit_length() - 1))
    for histogram in histograms:
        if name == LOWEST:
            yield histogram.reshape(size // cells, cells).sum(axis=0)
        else:
            yield histogram.reshape(cells, size // cells).sum(axis=1)


def _tail(chi_square: float, freedom: int) -> float:
    """The probability of this value or more."""
    half = torch.tensor([freedom, chi_square], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
