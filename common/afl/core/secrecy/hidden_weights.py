"""KL mirror ascent of which nobody sees all: each worker keeps its own dual weight, and the server learns the
sum that they are divided by (equation 3 of the paper, with its restarts or a fixed share of uniform
weights)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from afl.core.dual import DualRule
from afl.core.messages import PayloadHeader, Role
from afl.core.secrecy.fixed_point import fixed, mean_of, numbers, signed_sums
from afl.errors import DivergedError, NonFiniteError, PeerError

FRACTION_BITS = 40
"""Of u: a dual weight is known to 1e-12."""

MOST_GAIN = (62 - FRACTION_BITS) * math.log(2)
"""The largest ``eta_q l``: since the weights add up to 1, the sum of all u is then below 2^62."""

LARGEST_TOTAL = 2.0 ** (63 - FRACTION_BITS)
"""Of all u: what can be read of their sum."""

SHARE_COUNT = 2
"""Numbers in a worker's share: u and its loss."""


def share_header() -> PayloadHeader:
    """The header of a worker's share."""
    return numbers(SHARE_COUNT, Role.WEIGHT)


class OwnWeight:
    """One worker's dual weight.

    ``u_i = q_i exp(eta_q l_i)`` is told under a mask; once the server has said ``Z = sum_i u_i``, the next
    weight is ``u_i / Z``, or 1/m after a restart; or ``(1 - uniform) u_i / Z + uniform / m``.

    Args:
        workers: m.
        eta_q: dual step size of a round, 1-based.
        block: B; ``None`` for no restarts.
        uniform: the share of uniform weights (:class:`afl.core.dual.FixedShare`).
    """

    def __init__(
        self, workers: int, eta_q: Callable[[int], float], block: int | None, uniform: float = 0.0
    ) -> None:
        self._workers = workers
        self._eta_q = eta_q
        self._block = block
        self._uniform = uniform
        self.begin_anew()

    def begin_anew(self) -> None:
        """At 1/m, as in round 1."""
        self._told = (0, 0)
        """The last round of which u was told, and u in fixed point."""

    def of_round(self, round_: int, total: float) -> float:
        """q_t.

        Args:
            round_: t, 1-based.
            total: Z of the round before, as the server has told it; of no use in a round after a restart.

        Raises:
            PeerError: if it is less than this worker's own part of it.
        """
        told, u = self._told
        restarts = self._block is not None and (round_ - 1) % self._block == 0
        if restarts or told != round_ - 1 or total <= 0:
            # Who has lost what it told begins at 1/m: Z makes all weights add up to 1 again.
            return 1.0 / self._workers
        own = math.ldexp(u, -FRACTION_BITS) / total
        if own > 1.0:
            raise PeerError(
                f"the server says that all workers' unnormalized weights add up to {total:.6g}, which is "
                "less than this worker's alone"
            )
        return (1.0 - self._uniform) * own + self._uniform / self._workers

    def share(self, round_: int, weight: float, loss: float) -> tuple[int, int]:
        """u and the loss of a round, in fixed point.

        Raises:
            NonFiniteError: if ``eta_q`` times the loss is too large for u.
        """
        eta_q = self._eta_q(round_)
        gain = eta_q * loss
        if gain > MOST_GAIN:
            raise NonFiniteError(
                f"algorithm.eta_q times the loss is {gain:.4g} ({eta_q:g} times {loss:.4g}); with "
                f"losses: hidden it must be at most {MOST_GAIN:.4g}: lower eta_q, or scale the loss"
            )
        u = round(math.ldexp(weight * math.exp(gain), FRACTION_BITS))
        self._told = round_, u
        return u, fixed(loss, "the loss")

    def state(self) -> NDArray[np.int64]:
        """What :meth:`restore` takes, int64 ``[2]``."""
        return np.array(self._told, dtype=np.int64)

    def restore(self, state: NDArray[np.int64]) -> None:
        """Continue from a :meth:`state`."""
        round_, u = state.tolist()
        self._told = round_, u


class HiddenWeights(DualRule):
    """What the server has of them.

    Attributes:
        weights: NaN ``[m]``: nobody knows them all.
        total: Z of the last closed round.
        mean_loss: of that round's minibatches, ``None`` before the first.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.weights = np.full(workers, np.nan)
        self.total = 0.0
        self.mean_loss: float | None = None

    def take(self, sums: NDArray[np.uint64]) -> None:
        """The sum of all workers' shares of a round, uint64 ``[SHARE_COUNT]``.

        Raises:
            DivergedError: if no shares add up to it.
        """
        total, losses = signed_sums(sums)
        if not 0 <= total < 1 << 63:
            raise DivergedError("the workers' shares of the dual weights do not add up; one of them is wrong")
        self.total = math.ldexp(total, -FRACTION_BITS)
        self.mean_loss = mean_of(losses, len(self.weights))

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Z, which the workers are told again."""
        return {"dual_total": np.array([self.total])}

    def restore(self, state: dict[str, NDArray[np.float64]]) -> None:  # type: ignore[override]
        """Continue from a :meth:`state`."""
        self.total = float(state["dual_total"][0])

    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        """Nothing: :meth:`take` has it all."""
