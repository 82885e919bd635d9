"""The server's half where each worker sends one message a round, and all copies of the model step by what the
server makes of their sum."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.aggregation import IntegerSum, ModularSum, sum_of
from afl.core.algorithms.base import Arrays, ServerAlgorithm
from afl.core.algorithms.realizations import Realizations
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.payload import expected, pack, unpack
from afl.core.compressors import Compressed
from afl.core.dual import DualRule
from afl.core.grid import IntegerRound, counted_integers
from afl.core.messages import Payload, PayloadHeader, Position, Report
from afl.core.randomness import SharedRandomness
from afl.core.secrecy.fixed_point import BITS
from afl.core.secrecy.hidden_weights import SHARE_COUNT, HiddenWeights, share_header
from afl.core.sums import Sum
from afl.core.vectors import norm
from afl.errors import NonFiniteError

_INTEGERS, _SHARES = "integers", "shares"
"""The names of what :meth:`UpdateServer.unsent` has of them."""


class UpdateServer(ServerAlgorithm):
    """One round t: sum the workers' messages c_i, make D_t of the sum (:meth:`update`), move the dual weights
    by the losses, and step ``w_{t+1} = w_t - eta_w D_t`` (or as another of
    :mod:`afl.core.algorithms.optimizers` does), as the workers do.

    A subclass that keeps something from round to round adds it to :meth:`state` and :meth:`restore`, and
    takes it from the payload, or from :meth:`unsent`, in :meth:`replay`.

    Args:
        params: w_1, float32 ``[dim]`` on the CPU; moved in place, by :meth:`settle` only.
        dual: q_1 and its rule.
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        params: Tensor,
        randomness: SharedRandomness,
        dual: DualRule,
    ) -> None:
        self.settings = settings
        self.params = params
        self.round = 1
        self.dual = dual
        self.realizations = Realizations(settings, len(params), randomness)
        uplink = self.realizations.uplink
        self.sum: Sum = sum_of(uplink, settings.workers, lambda: self.realizations.of_uplink(self.round))
        self._hidden = dual if isinstance(dual, HiddenWeights) else None
        self._shares = None
        if self._hidden is not None:
            self._shares = ModularSum(SHARE_COUNT, 0, BITS, settings.workers)
        self._losses = np.full(settings.workers, np.nan)
        self._expected = expected(uplink)
        self.grid = self.realizations.grid
        self.companions = self.realizations.companions
        self._down_count = self.realizations.downlink.count
        self._share_sums: NDArray[Any] | None = None
        """Of the last closed round."""
        self._seen: NDArray[np.int64] | None = None
        """Of the integers that the last closed round rounded: as :attr:`IntegerSum.seen`."""

    @abc.abstractmethod
    def update(self, total: NDArray[Any]) -> Compressed:
        """D_t, in the form of the downlink's compressor, from the sum of all messages as :attr:`sum` has it;
        it may share the sum's memory."""

    @property
    def keeps_residuals(self) -> bool:
        """Whether the uplink's compressor loses something, so that workers keep a residual."""
        return not self.realizations.uplink.lossless

    @property
    def dual_weights(self) -> NDArray[np.float64]:
        """q_t for the open round."""
        return self.dual.weights

    @property
    def told_weights(self) -> NDArray[np.float64]:
        """q_t, or the sum that each worker divides its own by."""
        if self._hidden is None:
            return self.dual.weights
        return np.full(self.settings.workers, self._hidden.total)

    @property
    def mean_loss(self) -> float | None:
        """Where losses are hidden."""
        return None if self._hidden is None else self._hidden.mean_loss

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:  # noqa: ARG002
        """One update, in the uplink compressor's form; and, where losses are hidden, a share."""
        return (self._expected,) if self._shares is None else (self._expected, share_header())

    def update_norm(self, header: PayloadHeader, data: bytes | bytearray) -> float:
        """Of the vector of d that the message stands for."""
        vector = torch.zeros(len(self.params))
        with np.errstate(over="ignore", invalid="ignore"):
            self.realizations.of_uplink(self.round).add_to(vector, unpack(header, data))
        return norm(vector)

    def open_report(self, report: Report) -> None:
        """Its update stands for as many workers as the report."""
        self.sum.expect(report.worker, len(report.workers))

    @property
    def sums(self) -> Sequence[Sum]:
        """Of the workers' updates; and of their shares, where there are any."""
        return (self.sum,) if self._shares is None else (self.sum, self._shares)

    def add_loss(self, worker: int, loss: float) -> None:
        """Record l_i of the open round."""
        self._losses[worker] = loss

    def reset(self) -> None:
        """Begin the open round again."""
        super().reset()
        self._losses.fill(np.nan)

    def close(self) -> Payload:
        """D_t and q_{t+1}.

        Raises:
            NonFiniteError: if the sum, or what is made of it, leaves its type's range.
        """
        assert self._pending is None
        assert not np.isnan(self._losses).any()
        total = self.sum.checked(f"round {self.round}", "updates")
        downlink = self.update(total)
        if downlink.values is not total and not np.isfinite(downlink.values).all():
            raise NonFiniteError(
                f"round {self.round}: the update made from the workers' updates overflows float32"
            )
        payload = pack(self.realizations.down_form, downlink)
        if isinstance(self.sum, IntegerSum):
            self._seen = self.sum.seen.copy()
        elif self.grid is not None:
            self._seen = self._seen_in(downlink.values[: self._down_count], self.grid.limit)
        self._describe(payload.header)
        if self._shares is not None:
            self._take_shares(self._shares.total.copy())
        self._step(self._losses, downlink)
        return payload

    def _take_shares(self, sums: NDArray[Any]) -> None:
        assert self._hidden is not None
        self._hidden.take(sums)
        self._share_sums = sums

    def _seen_in(self, values: NDArray[Any], limit: int) -> NDArray[np.int64]:
        """What D's integers tell, where the workers' are masked, or float32."""
        is_modular = isinstance(self.sum, ModularSum)
        counted = counted_integers(values, limit * (self.settings.workers if is_modular else 1))
        return np.append(counted, self._expected.value_bytes if is_modular else 0)

    def unsent(self) -> Arrays:
        """What the integers were like, which only metrics need; and the sum of the shares."""
        seen: Arrays = {} if self._seen is None else {_INTEGERS: self._seen}
        return seen if self._share_sums is None else {**seen, _SHARES: self._share_sums}

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:
        """Close round t again, from D_t instead of reports."""
        assert self._pending is None
        self._seen = unsent.get(_INTEGERS)
        self._describe(payload.header)
        if self._shares is not None:
            self._take_shares(unsent[_SHARES])
        self._step(losses, unpack(payload.header, payload.data))
        self.settle()

    def _describe(self, header: PayloadHeader) -> None:
        """Say what round t's integers were like, before its update moves the grid."""
        if self.grid is None or self._seen is None:
            self.integers = None
            return
        values, zeros, at_limit, sent = self._seen.tolist()
        exponents = self.grid.exponents
        self.integers = IntegerRound(
            uplink_bits=8 * sent / values if sent else None,
            downlink_bits=8 * header.value_bytes / self._down_count,
            zeros=zeros / values,
            at_limit=at_limit / values,
            smallest_exponent=int(exponents.min()),
            largest_exponent=int(exponents.max()),
            of_update=not isinstance(self.sum, IntegerSum),
        )

    def _step(self, losses: NDArray[np.float64], downlink: Compressed) -> None:
        self.dual.factor = self.settings.eta_q_factor(self.round)
        self.dual.update(self.round, losses)
        self._losses.fill(np.nan)
        self._pending = (self.round, downlink)
        self.round += 1

    def settle(self) -> None:
        """Step the server's own copy; then the sum is free for the next round."""
        if self._pending is None:
            return
        t, downlink = self._pending
        self.realizations.apply(t, self.params, downlink)
        self._pending = None
        for total in self.sums:
            total.reset()

    def state(self) -> Arrays:
        """q_t, the grid's ranges where there is one, and the optimizer's state where it keeps one."""
        assert self._pending is None
        optimizer = self.realizations.optimizer.state.numpy()
        return {
            **self.dual.state(),
            **({} if self.grid is None else {"grid": self.grid.ranges.copy()}),
            **({"optimizer": optimizer} if optimizer.size else {}),
        }

    def restore(self, state: Arrays, position: Position) -> None:
        """Begin round t."""
        self.round = position.round
        self.dual.restore(state)
        if self.grid is not None:
            self.grid.ranges = state["grid"].copy()
        if "optimizer" in state:
            self.realizations.optimizer.state.copy_(torch.from_numpy(state["optimizer"].copy()))

    def digest_material(self) -> bytes:
        """What the compressors draw in round 1."""
        return self.realizations.digest_material()
