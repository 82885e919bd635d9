"""How much a compressor may drop without slowing AFL-BR's rate (paper, remarks to Theorems 2 and 3)."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

CompressorClass: TypeAlias = Literal["contractive", "additive-idempotent"]
"""Any delta-approximate compressor (Definition 3), or one of the class C_AI used with shared randomness
(Definition 4)."""


def theory_ratio(compressor_class: CompressorClass, workers: int) -> float:
    """The smallest delta = k/d, up to a constant, that keeps AFL-BR's rate with m workers.

    ``(ln m)^(-1/4)`` for contractive compressors such as Top-k (Theorem 2), ``(ln m)^(-1/2)`` for
    additive and idempotent ones such as Rand-k with shared randomness (Theorem 3). The paper gives the order,
    ``k = Theta(d (log m)^(-1/4))``; the constant taken here is 1. At most 1, which it is for ``m <= e``.
    """
    assert workers >= 1
    if workers == 1:
        return 1.0
    root = math.sqrt(math.log(workers))
    if compressor_class == "additive-idempotent":
        return min(1.0, 1.0 / root)
    assert compressor_class == "contractive"
    return min(1.0, 1.0 / math.sqrt(root))
