"""Philox4x64-10 and what is drawn from it, written from its publication and the documented rules alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

MASK = (1 << 64) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon, Moraes, Dror, Shaw, SC 2011: ten rounds on four 64-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & MASK, (left >> 64) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


def words(seed: int, purpose: int, round_: int, worker: int) -> Iterator[int]:
    """A stream: the counter is ``(1, purpose, round, worker)`` first and counts up in its lowest word."""
    for block in itertools.count(1):
        yield from philox((block, purpose, round_, worker), (seed & MASK, seed >> 64))


def integer(stream: Iterator[int], bound: int) -> int:
    bits = (bound - 1).bit_length()
    while True:
        value = next(stream) >> (64 - bits)
        if value < bound:
            return value


def candidates(stream: Iterator[int], population: int) -> Iterator[int]:
    if population > 1 << 32:
        bits = (population - 1).bit_length()
        yield from (word >> (64 - bits) for word in stream if word >> (64 - bits) < population)
    for word in stream:
        for half in (word & 0xFFFFFFFF, word >> 32):
            product = half * population
            if product & 0xFFFFFFFF >= (1 << 32) % population:
                yield product >> 32


def subset(stream: Iterator[int], population: int, size: int) -> list[int]:
    """The first ``size`` distinct candidates; above one half, what the complement leaves."""
    if 2 * size > population:
        left_out = set(subset(stream, population, population - size))
        return [value for value in range(population) if value not in left_out]
    chosen: set[int] = set()
    sequence = candidates(stream, population)
    while len(chosen) < size:
        chosen.add(next(sequence))
    return sorted(chosen)
