"""Whose masks each worker's has: all others', or, of many workers, those near it on a ring that the roster
draws."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

COMPLETE_UP_TO = 64
"""Up to so many workers, each shares a mask with every other."""

COLLUDING_SHARE = 1 / 3
"""Of more workers, so many may tell the server all they know."""

SECURITY_BITS = 80
"""With a probability of more than ``1 - 2^-80`` over the drawing, the others' sum is then all that it learns.
Who offers its key last may try keys until the ring suits: so many tries are too many."""


def degree(workers: int) -> int:
    """How many neighbours each of m workers has.

    On a ring in random order, with the k/2 next on either side as neighbours (a Harary graph, as in Bell et
    al. 2020, section 3), the honest workers fall apart only where two runs of k/2 that follow each other all
    collude. There are fewer than m^2 / 2 such pairs, and each is all of colluders with a probability of at
    most gamma^k where a share gamma colludes; k is the least even number for which that is below 2^-80.
    """
    if workers <= COMPLETE_UP_TO:
        return workers - 1
    bits = SECURITY_BITS + 2 * math.log2(workers) - 1
    return 2 * math.ceil(bits / -math.log2(COLLUDING_SHARE) / 2)


def neighbours(worker: int, workers: int, public: bytes) -> Sequence[int]:
    """Those of a worker, ascending.

    Args:
        workers: m.
        public: what all know and nobody chooses alone, such as a digest of all public keys.
    """
    near = degree(workers)
    if near == workers - 1:
        return [other for other in range(workers) if other != worker]
    ring = _ring(workers, public)
    place = ring.index(worker)
    found = (ring[(place + step) % workers] for step in range(-(near // 2), near // 2 + 1) if step)
    return sorted(found)


@functools.lru_cache(maxsize=1)
def _ring(workers: int, public: bytes) -> Sequence[int]:
    """All workers in an order that the digest draws; a process asks for each of its workers."""
    return sorted(range(workers), key=lambda each: hashlib.sha256(public + each.to_bytes(4, "big")).digest())
