"""What the paper's convergence theorems set: step sizes, block length, how much a compressor may drop.

Theorem 1 (AFL-BR), Theorem 2 (AFL-Com with a general contractive compressor) and Theorem 3 (AFL-Com with
an additive and idempotent compressor and shared randomness) all set the same three values::

    B = ceil(sqrt T),   eta_w = 1 / (8 L T^{3/4}),   eta_q = 2 sqrt(ln m) / (sigma_q T^{1/4})

for a horizon of T rounds, m workers, L-smooth losses, and minibatch losses whose noise is sub-Gaussian with
parameter sigma_q. The theorems assume ``m >= 2`` and ``T >= 9``; the formulas are defined below that too.

Powers of T are taken by square roots, which IEEE 754 rounds correctly, so that they are the same number on
every machine; a mathematical library's ``pow`` is not.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, get_args

__all__ = [
    "FEWEST_ROUNDS",
    "FEWEST_WORKERS",
    "CompressorClass",
    "block_length",
    "dual_step",
    "is_covered",
    "primal_step",
    "theory_ratio",
]

CompressorClass: TypeAlias = Literal["contractive", "additive-idempotent"]
"""Any delta-approximate compressor (Definition 3), or one of the class C_AI used with shared randomness
(Definition 4)."""

FEWEST_ROUNDS: Final = 9
"""The least T that the theorems speak of."""

FEWEST_WORKERS: Final = 2
"""The least m that the theorems speak of."""


def block_length(rounds: int) -> int:
    """B: update rounds between two restarts of the dual weights, ``ceil(sqrt T)``, exact for any T >= 1."""
    return math.isqrt(rounds - 1) + 1


def primal_step(rounds: int, smoothness: float) -> float:
    """eta_w, the step on the parameters, for the smoothness constant L of the losses (L > 0)."""
    return 1.0 / (8.0 * smoothness * math.sqrt(rounds) * fourth_root(rounds))


def dual_step(rounds: int, workers: int, sigma_q: float) -> float:
    """eta_q, the step on the dual weights; sigma_q > 0 bounds the noise of minibatch losses, in their units.

    Zero for one worker, whose weight is always 1.
    """
    return 2.0 * math.sqrt(math.log(workers)) / (sigma_q * fourth_root(rounds))


def fourth_root(rounds: int) -> float:
    """``T^(1/4)``."""
    return math.sqrt(math.sqrt(rounds))


def is_covered(rounds: int, workers: int) -> bool:
    """Whether the theorems speak of a run of this size."""
    return rounds >= FEWEST_ROUNDS and workers >= FEWEST_WORKERS


def theory_ratio(compressor_class: CompressorClass, workers: int) -> float:
    """The smallest delta = k/d, up to a constant, that keeps AFL-BR's rate with m workers.

    ``(ln m)^(-1/4)`` for contractive compressors such as Top-k (Theorem 2), ``(ln m)^(-1/2)`` for
    additive and idempotent ones such as Rand-k with shared randomness (Theorem 3). The paper gives the order,
    ``k = Theta(d (log m)^(-1/4))``; the constant taken here is 1. At most 1, which it is for ``m <= e``.
    """
    assert workers >= 1
    assert compressor_class in get_args(CompressorClass)
    if workers == 1:
        return 1.0
    root = math.sqrt(math.log(workers))
    return min(1.0, 1.0 / (root if compressor_class == "additive-idempotent" else math.sqrt(root)))
