"""Where evaluations fall between two restarts of the dual weights.

From a restart on the weights move from uniform towards the workers that are served worst, and the model
follows: how the worst worker is served depends on the rounds since the restart. Evaluations that all come
equally long after one show that moment of a block alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Final

FEWEST_PHASES: Final = 4
"""Places in a block that evaluations should fall on, so that their mean is one over the block."""

SPREAD_EVALUATIONS: Final = 40
"""About how many a run has with ``evaluation.every: auto``."""


def rounds_since_restart(round_: int, block: int) -> int:
    """How many rounds of its block are behind the model after an update round: from 1 to B, which is just
    before the weights restart."""
    return (round_ - 1) % block + 1


def phases_seen(every: int, block: int) -> int:
    """On how many places of a block evaluations fall, if there are enough of them: evenly spread ones."""
    return block // math.gcd(every, block)


def sees_few_phases(rounds: int, every: int, block: int) -> bool:
    """Whether the evaluations of a run miss most of a block; a block of few rounds has nothing to miss.

    Args:
        block: B; 0 where weights never restart.
    """
    is_sampled = FEWEST_PHASES <= block < rounds and rounds // every >= 2
    return is_sampled and phases_seen(every, block) < FEWEST_PHASES


def spread_spacing(rounds: int, block: int) -> int:
    """``evaluation.every: auto``: the whole number nearest to T/40 (of two, the smaller) that has no factor
    in common with B and is at least B/6 away from all multiples of B; T/40 itself where no weights restart.

    So evaluations come to fall on every place of a block, and the next is never close to the last.
    """
    near = max(1, (rounds + SPREAD_EVALUATIONS // 2) // SPREAD_EVALUATIONS)
    if not 1 < block < rounds:
        return near
    candidates = (near + sign * offset for offset in itertools.count() for sign in (-1, 1))
    return next(
        every
        for every in candidates
        if every > 0 and math.gcd(every, block) == 1 and 6 * _step(every, block) >= block
    )


def unaliased_spacing(most: int, rounds: int, block: int) -> int:
    """The largest number of rounds up to ``most`` with which a few evaluations in a row fall on places of a
    block that differ: four at least come before one is repeated, and the next is not close to the last (B/6
    away, or as far as evaluations are apart). So there are no fewer evaluations than with ``most``."""
    if not 1 < block < rounds:
        return most
    return next(
        every
        for every in range(most, 0, -1)
        if phases_seen(every, block) >= min(block, FEWEST_PHASES)
        and 6 * _step(every, block) >= min(block, 6 * every)
    )


def _step(every: int, block: int) -> int:
    """How far the next evaluation's place in a block is from the last one's, either way."""
    rest = every % block
    return min(rest, block - rest)
