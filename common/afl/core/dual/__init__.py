"""The dual weights q on the simplex, and the rules that move them, each registered once by its name."""

from afl.core.dual.ascent import Cvar, DualWeights, FixedShare, ProjectedAscent
from afl.core.dual.regularized import KlRegularized
from afl.core.dual.rule import DUAL_OPTIONS, DualRule

__all__ = [
    "DUAL_OPTIONS",
    "Cvar",
    "DualRule",
    "DualWeights",
    "FixedShare",
    "KlRegularized",
    "ProjectedAscent",
]
