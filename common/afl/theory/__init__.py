"""What the paper proves, as numbers: step sizes, bounds, complexities, and how much may be dropped.

Pure functions of a run's size and of the constants of the paper's assumptions (section "Problem Setup").
"""

from afl.theory.bounds import Bound, Constants, Term, Theorem, bound, covering, rounds_needed
from afl.theory.complexity import Complexity, Order, complexities
from afl.theory.sparsity import CompressorClass, theory_ratio
from afl.theory.steps import (
    FEWEST_ROUNDS,
    FEWEST_WORKERS,
    block_length,
    dual_step,
    is_covered,
    primal_step,
)

__all__ = [
    "FEWEST_ROUNDS",
    "FEWEST_WORKERS",
    "Bound",
    "Complexity",
    "CompressorClass",
    "Constants",
    "Order",
    "Term",
    "Theorem",
    "block_length",
    "bound",
    "complexities",
    "covering",
    "dual_step",
    "is_covered",
    "primal_step",
    "rounds_needed",
    "theory_ratio",
]
