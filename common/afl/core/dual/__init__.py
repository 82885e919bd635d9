"""The dual weights q on the simplex, and the rules that move them, by name: the built-in ones, and users' in
the entry point group ``afl.dual_rules``."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Final

from afl.core.dual.ascent import Cvar, DualWeights, FixedShare, ProjectedAscent
from afl.core.dual.regularized import KlRegularized
from afl.core.dual.rule import DUAL_OPTIONS, DualRule
from afl.core.installed import Installed

__all__ = [
    "DUAL_OPTIONS",
    "Cvar",
    "DualRule",
    "DualWeights",
    "FixedShare",
    "KlRegularized",
    "ProjectedAscent",
    "is_rule",
    "rule_named",
    "rule_names",
]


def _rule(found: object) -> type[DualRule] | None:
    if not (isinstance(found, type) and issubclass(found, DualRule)):
        return None
    return None if inspect.isabstract(found) or not hasattr(found, "name") else found


_RULES: Final[Installed[type[DualRule]]] = Installed(
    "dual rule",
    "afl.dual_rules",
    (DualWeights, ProjectedAscent, Cvar, FixedShare, KlRegularized),
    _rule,
    base="subclass of afl.DualRule with a name and an update",
    shared=DUAL_OPTIONS,
    taken=DUAL_OPTIONS | {"name", "workers"},
    needed_by="the server",
)

rule_names = _RULES.names
is_rule = _RULES.__contains__
rule_named = cache(_RULES.named)
