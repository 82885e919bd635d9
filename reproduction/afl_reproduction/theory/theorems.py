"""The right-hand sides of the paper's convergence theorems, term by term.

All bound ``E ||grad Phi_{1/(2L)}(w_r)||^2`` for r uniform on 1..T, with the step sizes and block length of
:mod:`afl.theory`: Theorem 1 for AFL-BR, Theorem 2 for AFL-Com with any delta-approximate compressor,
Theorem 3 for AFL-Com with an additive and idempotent one and shared randomness. With
``Gamma_w^2 = G^2 + sigma_w^2``, T4 for ``T^(1/4)``, and the compression factor c of the theorem::

    32 L Delta_Phi / T4 + 4 c G Gamma_w / T4 + 16 L sigma_q sqrt(ln m) / T4
        + 10 Gamma_w^2 / T^(1/2) + r G Gamma_w / T^(3/4) + Gamma_w^2 / (2 T^(3/4))

    Theorem 1: c = 1, r = 0
    Theorem 2: c = (16 + 4 delta - delta^2) / delta^2, r = 3 (8 + 2 delta - delta^2) / delta^2
    Theorem 3: c = 4 / delta, r = 6 / delta

Theorems 2 and 3 do not become Theorem 1 at delta = 1: their proofs bound the residuals by
``(2 - delta) / delta`` and more, which is not zero there. With delta = 1 use Theorem 1.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from afl.theory import fourth_root


@dataclass(frozen=True)
class Constants:
    """What a problem brings into the bounds (paper, section "Problem Setup").

    Attributes:
        smoothness: L, of every worker's risk.
        gradient_bound: G, on the norm of every risk's gradient.
        sigma_w: the standard deviation of a stochastic gradient (Euclidean norm), at most.
        sigma_q: the sub-Gaussian parameter of a stochastic loss.
        delta_phi: ``Phi_{1/(2L)}(w_1) - Phi_*``: how far the first model's envelope is above the least
            worst risk, in the loss's units.
    """

    smoothness: float
    gradient_bound: float
    sigma_w: float
    sigma_q: float
    delta_phi: float

    def __post_init__(self) -> None:
        assert self.smoothness > 0
        assert min(self.gradient_bound, self.sigma_w, self.sigma_q, self.delta_phi) >= 0

    @property
    def gamma_w(self) -> float:
        """``Gamma_w = sqrt(G^2 + sigma_w^2)``: bounds the second moment of a stochastic gradient."""
        return math.hypot(self.gradient_bound, self.sigma_w)


class Theorem(enum.IntEnum):
    """The paper's convergence theorems."""

    AFL_BR = 1
    AFL_COM = 2
    AFL_COM_AI = 3


@dataclass(frozen=True)
class Term:
    """One summand of a bound.

    Attributes:
        name: what it comes from, in a word or two.
        formula: as in the theorem, with T, m, L, G and so on.
    """

    name: str
    formula: str
    value: float


@dataclass(frozen=True)
class Bound:
    """The right-hand side of a theorem.

    Attributes:
        trivial: ``G^2``, which no squared norm is above, whatever the algorithm does (paper, Lemma 2).
    """

    theorem: Theorem
    delta: float
    terms: tuple[Term, ...]
    trivial: float

    @property
    def value(self) -> float:
        """The sum of the terms: bounds the mean over rounds of the squared norm."""
        return math.fsum(term.value for term in self.terms)


def bound(theorem: Theorem, constants: Constants, *, workers: int, rounds: int, delta: float = 1.0) -> Bound:
    """A theorem's bound for m workers and T rounds.

    The theorems assume ``m >= 2`` and ``T >= 9``; the formulas are defined for any ``m, T >= 1``.

    Args:
        delta: the compressor's contraction, in (0, 1]; 1 with Theorem 1.
    """
    assert workers >= 1
    assert rounds >= 1
    assert 0 < delta <= 1
    assert theorem is not Theorem.AFL_BR or delta == 1
    smoothness, gradient, gamma = constants.smoothness, constants.gradient_bound, constants.gamma_w
    root4, root2 = fourth_root(rounds), math.sqrt(rounds)
    drift, drift_formula, residual, residual_formula = _compression(theorem, delta)
    terms = [
        Term("start", "32 L Delta_Phi / T^(1/4)", 32 * smoothness * constants.delta_phi / root4),
        Term("drift", drift_formula, drift * gradient * gamma / root4),
        Term(
            "dual weights",
            "16 L sigma_q sqrt(ln m) / T^(1/4)",
            16 * smoothness * constants.sigma_q * math.sqrt(math.log(workers)) / root4,
        ),
        Term("restarts", "10 Gamma_w^2 / T^(1/2)", 10 * gamma**2 / root2),
        Term("gradient noise", "Gamma_w^2 / (2 T^(3/4))", gamma**2 / (2 * root2 * root4)),
    ]
    if residual:
        terms.append(Term("residuals", residual_formula, residual * gradient * gamma / (root2 * root4)))
    return Bound(theorem, delta, tuple(terms), gradient**2)


def covering(uplink_delta: float, downlink_delta: float, *, downlink_loses: bool) -> tuple[Theorem, float]:
    """The theorem that speaks of a pair of compressors, and the delta to use in it.

    Theorem 3's proof needs no more than an uplink of contraction delta and a downlink residual of zero: that
    is an additive and idempotent compressor used both ways, or a downlink that sends whole vectors. In all
    other cases Theorem 2 holds with the smaller delta, which both compressors satisfy; its proof takes the
    downlink's randomness, if it has any, to be independent of what it compresses.

    Args:
        downlink_loses: whether the downlink keeps a residual.
    """
    if downlink_loses:
        return Theorem.AFL_COM, min(uplink_delta, downlink_delta)
    return (Theorem.AFL_BR, 1.0) if uplink_delta == 1 else (Theorem.AFL_COM_AI, uplink_delta)


def _compression(theorem: Theorem, delta: float) -> tuple[float, str, float, str]:
    """Factors and formulas of the two terms that depend on the compressor."""
    if theorem is Theorem.AFL_BR:
        return 4.0, "4 G Gamma_w / T^(1/4)", 0.0, ""
    if theorem is Theorem.AFL_COM_AI:
        return (16 / delta, "16 G Gamma_w / (delta T^(1/4))", 6 / delta, "6 G Gamma_w / (delta T^(3/4))")
    return (
        4 * (16 + 4 * delta - delta**2) / delta**2,
        "4 G Gamma_w (16 + 4 delta - delta^2) / (delta^2 T^(1/4))",
        3 * (8 + 2 * delta - delta**2) / delta**2,
        "3 G Gamma_w (8 + 2 delta - delta^2) / (delta^2 T^(3/4))",
    )
