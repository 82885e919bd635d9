r"""How far a model is from stationary, measured: ``||grad Phi_{1/(2L)}(w)||`` with a certified error.

``Phi(w) = max_i R_i(w)`` is the worst risk (a maximum over the simplex of dual weights is one over its
corners), and its Moreau envelope and that one's gradient are (paper, Definition 1 and Lemma 2)::

    Phi_{1/(2L)}(w) = min_u Phi(u) + L ||u - w||^2,   grad Phi_{1/(2L)}(w) = 2L (w - prox(w)),

``prox(w)`` being the minimizer. With ``h_i(u) = R_i(u) + L ||u - w||^2``, which is L-strongly convex and
3L-smooth since ``R_i`` is L-smooth, ``prox(w)`` minimizes ``max_i h_i``.

Method. At ``u``, each ``h_i`` is replaced by ``h_i(u) + <g_i, v> + 3L/2 ||v||^2``, which is nowhere
below it. The minimizer of the maximum of these over ``v`` is ``v = -sum_i q_i g_i / (3L)``, with ``q`` on the
simplex from a quadratic program that an active-set method solves. The next ``u`` is ``u + v``. What the worst
``h_i`` is above its minimum falls by a third or more at every step.

Certificate. Take any ``u``, any ``q`` on the simplex, ``v = sum_i q_i g_i`` and
``s = max_i h_i(u) - sum_i q_i h_i(u)``, and let ``D`` be the distance of ``u`` from ``prox(w)``. By strong
convexity::

    max_i h_i(u) - L/2 D^2 >= max_i h_i(prox(w)) >= sum_i q_i h_i(u) - ||v|| D + L/2 D^2

so ``L D^2 - ||v|| D - s <= 0``, and the reported norm is wrong by
``2 L D <= ||v|| + sqrt(||v||^2 + 4 L s)`` at most, whatever happened on the way to ``u`` and ``q``. Only the
float64 rounding of the ``h_i``, about 1e-16 of their size in ``s``, is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

MOST_STEPS = 500
"""Steps of one proximal problem at most. An excess falls to 1e-12 of what it was in 70."""

_RIDGE = 1e-15
"""Added to the diagonal of the active set's matrix, relative: equal gradients would make it singular."""


class Objective(Protocol):
    """L-smooth risks of m workers, ``R_1 .. R_m``, exactly."""

    @property
    def smoothness(self) -> float:
        """L, for every risk."""
        ...

    def values(self, w: Vector) -> Vector:
        """``R_i(w)``: ``[m]``."""
        ...

    def gradients(self, w: Vector) -> Vector:
        """The gradients at ``w``: ``[m, d]``."""
        ...


class BoundedObjective(Objective, Protocol):
    """Risks whose worst is known to be nowhere below something."""

    def lower_bound(self, weights: Vector) -> float:
        """What no ``max_i R_i(w)`` is below; any weights on the simplex, ``[m]``, make a valid one."""
        ...


@dataclass(frozen=True)
class Measurement:
    """The proximal point of one model.

    Attributes:
        norm: ``||grad Phi_{1/(2L)}(w)||``.
        error: what ``norm`` is wrong by, at most.
        envelope: an upper bound of ``Phi_{1/(2L)}(w)``, by ``error^2 / (4L)`` at most too large.
        point: ``prox(w)``, ``[d]``.
        weights: the dual weights that the proximal point balances, ``[m]``, on the simplex.
    """

    norm: float
    error: float
    envelope: float
    point: Vector
    weights: Vector


class Meter:
    """Measures models one after the other; each starts from the last one's solution.

    Args:
        tolerance: what a norm may be wrong by, in its own units (those of a gradient).
    """

    def __init__(self, objective: Objective, tolerance: float) -> None:
        assert tolerance > 0
        self._objective = objective
        self._tolerance = tolerance
        self._point: Vector | None = None
        self._active: list[int] = []

    def measure(self, w: NDArray[np.floating]) -> Measurement:
        """The measurement at ``w``, ``[d]``.

        Raises:
            ArithmeticError: if the tolerance is not reached, such as one below what float64 resolves.
        """
        model = w.astype(np.float64)
        point = model if self._point is None else self._point
        smoothness = self._objective.smoothness
        for _ in range(MOST_STEPS):
            away = point - model
            values = self._objective.values(point) + smoothness * float(away @ away)
            gradients = self._objective.gradients(point) + 2 * smoothness * away
            if not self._active:
                self._active = [int(values.argmax())]
            weights, self._active = _balance(values, gradients, 3 * smoothness, self._active)
            direction = weights @ gradients
            slack = max(0.0, float(values.max() - weights @ values))
            length = float(np.linalg.norm(direction))
            error = length + math.sqrt(length**2 + 4 * smoothness * slack)
            if error <= self._tolerance:
                self._point = point
                norm = 2 * smoothness * float(np.linalg.norm(away))
                return Measurement(norm, error, float(values.max()), point, weights)
            point = point - direction / (3 * smoothness)
        raise ArithmeticError(
            f"after {MOST_STEPS} steps the norm is known to {error:.3g}, not to {self._tolerance:.3g}"
        )


@dataclass(frozen=True)
class MeanSquare:
    """The mean over rounds of ``||grad Phi_{1/(2L)}(w_t)||^2``, what the theorems bound in expectation.

    Attributes:
        value: the mean.
        highest: what it is at most, with the certified errors.
        norms: the norm of each round, ``[T]``.
        error: the largest certified error of a norm.
    """

    value: float
    highest: float
    norms: Vector
    error: float


def mean_square(
    objective: Objective, iterates: Iterable[NDArray[np.floating]], tolerance: float
) -> MeanSquare:
    """Measure a run's models ``w_1 .. w_T``, each ``[d]``.

    Raises:
        ArithmeticError: as :meth:`Meter.measure`.
    """
    meter = Meter(objective, tolerance)
    measured = [(one.norm, one.error) for one in map(meter.measure, iterates)]
    assert measured
    norms, errors = np.array(measured).T
    return MeanSquare(
        float((norms**2).mean()), float(((norms + errors) ** 2).mean()), norms, float(errors.max())
    )


def delta_phi(
    objective: BoundedObjective, w: NDArray[np.floating], tolerance: float, steps: int = 50
) -> float:
    """``Delta_Phi = Phi_{1/(2L)}(w) - Phi_*`` or a little more: certified from above.

    ``Phi_*`` is bounded from below by the objective, with the weights of a point that repeated proximal
    steps from ``w`` reach.

    Args:
        steps: proximal steps at most; they end where a model is stationary to ten times the tolerance.

    Raises:
        ArithmeticError: as :meth:`Meter.measure`.
    """
    meter = Meter(objective, tolerance)
    first = last = meter.measure(w)
    for _ in range(steps):
        if last.norm <= 10 * tolerance:
            break
        last = meter.measure(last.point)
    lowest = max(objective.lower_bound(one.weights) for one in (first, last))
    return max(0.0, first.envelope - lowest)


def _balance(
    values: Vector, gradients: Vector, curvature: float, active: list[int]
) -> tuple[Vector, list[int]]:
    """``q`` on the simplex that minimizes ``||sum_i q_i g_i||^2 / (2 curvature) - sum_i q_i h_i``.

    A primal active-set method: minimize over the active workers with ``sum q = 1``; where that leaves
    the simplex, stop at its border and drop the worker met there; else add the worker that gains most,
    until none does.

    Args:
        values: ``h``, ``[m]``.
        gradients: ``g``, ``[m, d]``.
        active: workers to start from, at least one.

    Returns:
        ``q``, ``[m]``, and its active workers. Where rounding stops the method early ``q`` is still on the
        simplex, and the caller's certificate says what it is worth.
    """
    active = list(active)
    share = np.full(len(active), 1 / len(active))
    scale = max(float(np.abs(values).max()), np.finfo(np.float64).tiny)
    for _ in range(4 * len(values) + 20):
        chosen = gradients[active]
        best, level = _on_face(values[active], chosen @ chosen.T / curvature)
        outside = best < 0
        if outside.any():
            steps = np.full(len(best), np.inf)
            steps[outside] = share[outside] / (share[outside] - best[outside])
            share = share + steps.min() * (best - share)
            stays = steps > steps.min()
            share, active = share[stays], [worker for worker, stay in zip(active, stays, strict=True) if stay]
            share = share.clip(min=0) / share.clip(min=0).sum()
            continue
        share = best / best.sum()
        gain = values - gradients @ (share @ chosen) / curvature
        newcomer = int(gain.argmax())
        if gain[newcomer] <= level + 1e-14 * scale or newcomer in active:
            break
        active.append(newcomer)
        share = np.append(share, 0.0)
    weights = np.zeros(len(values))
    weights[active] = share
    return weights, active


def _on_face(values: Vector, gram: Vector) -> tuple[Vector, float]:
    """The minimizer with ``sum q = 1`` of ``q gram q / 2 - q values``, and its multiplier."""
    count = len(values)
    bordered = np.ones((count + 1, count + 1))
    bordered[:count, :count] = gram
    bordered[count, count] = 0
    bordered[range(count), range(count)] += _RIDGE * (
        float(gram.trace()) / count + float(np.abs(values).max())
    )
    solution = np.linalg.solve(bordered, np.append(values, 1.0))
    return solution[:count], float(solution[count])
