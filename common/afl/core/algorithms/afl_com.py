"""AFL-Com (Algorithm 2); AFL-BR (Algorithm 1) as AFL-Com with the identity compressor; AFL (SGDA) as AFL-BR
with projected ascent on the dual weights.

One round t:

1. worker i computes the loss l_i and the gradient g_i at w_t on its minibatch;
2. ``p = e_i + q_{t,i} g_i; c_i = C_t(p); e_i <- p - c_i``; it sends c_i and l_i;
3. server: ``s = e_hat + sum_i c_i; D = C_t(s); e_hat <- s - D``; q_{t+1} by the dual update;
4. the server broadcasts D, and q_{t+1,i} to worker i alone;
5. all: ``w_{t+1} = w_t - eta_w D``.

If the uplink and downlink compressors are the same and in C_AI, step 3 is ``D = sum_i c_i`` in the
compressor's own values: e_hat is zero (section 3.2, key observation), so the server forwards the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import (
    NOT_FINITE,
    Arrays,
    LocalModel,
    Replica,
    WorkerAlgorithm,
    WorkerSide,
    finite_loss,
)
from afl.core.algorithms.realizations import Realizations
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.algorithms.update_server import UpdateServer
from afl.core.codecs.modular import signed
from afl.core.codecs.payload import check_header, expected, pack, pack_to_add, unpack
from afl.core.compressors import Compressed
from afl.core.compressors.on_grid import OnGrid
from afl.core.dual import DualRule
from afl.core.error_feedback import ErrorFeedback, Spare
from afl.core.messages import BUFFERS_PHASE, Payload, PayloadHeader, Position, Report, Role, ValueType
from afl.core.randomness import SharedRandomness
from afl.core.secrecy.fixed_point import payload_of
from afl.core.secrecy.hidden_weights import OwnWeight
from afl.core.vectors import norm, overwrite
from afl.errors import NonFiniteError


def update_round(position: Position) -> int:
    """The round t whose D_t a step at ``position`` carries."""
    return position.round if position.phase >= BUFFERS_PHASE else position.round - 1


class AflComServer(UpdateServer):
    """The server's half: step 3, and step 5 for its own copy."""

    def __init__(
        self, settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness, dual: DualRule
    ) -> None:
        super().__init__(settings, params, randomness, dual)
        self._feedback = None if self.forwards else ErrorFeedback(len(params))

    @property
    def forwards(self) -> bool:
        """Whether the sum goes down as it is (key observation); e_hat is then zero and not kept."""
        uplink, downlink = self.realizations.uplink, self.realizations.downlink
        return uplink.additive_idempotent and downlink is uplink and self.sum.in_values

    @property
    def residual_norm(self) -> float | None:
        """The Euclidean norm of e_hat; ``None`` if the downlink loses nothing."""
        return None if self._feedback is None else norm(self._feedback.residual)

    def update(self, total: NDArray[Any]) -> Compressed:
        """D_t and e_hat."""
        if self._feedback is None:
            return Compressed(total)
        dense = self.sum.vector(self.realizations.of_uplink(self.round), len(self.params))
        factor = self.settings.residual_factor(self.round - 1, self.round)
        return self._feedback.compress(dense, self.realizations.of_downlink(self.round), factor)

    def streamed_header(self) -> PayloadHeader | None:
        """The header of D_t before it is complete, where the sum is forwarded in float32: how long integers
        are, only all of them say."""
        return self._expected if self.forwards and not self.sum.is_order_free else None

    def streamed(self) -> memoryview:
        """The final beginning of D_t."""
        return memoryview(b"") if self._pending is not None else self.sum.final()

    def unsent(self) -> Arrays:
        """e_hat too, where there is one."""
        return {**super().unsent(), **self._residual()}

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:
        """Steps 3 and 5 from D_t."""
        if self._feedback is not None:
            overwrite(self._feedback.residual, unsent["downlink_residual"])
        super().replay(losses, payload, unsent)

    def state(self) -> Arrays:
        """q_t and e_hat."""
        return {**super().state(), **self._residual()}

    def restore(self, state: Arrays, position: Position) -> None:
        """Begin round t."""
        super().restore(state, position)
        if self._feedback is not None:
            overwrite(self._feedback.residual, state["downlink_residual"])

    def _residual(self) -> Arrays:
        return {} if self._feedback is None else {"downlink_residual": self._feedback.residual.numpy()}


class AflComReplica(Replica):
    """Step 5: moves a copy of the model, a worker's or the server's, by D."""

    def __init__(self, realizations: Realizations) -> None:
        self._realizations = realizations
        self._expected = expected(realizations.down_form)

    def apply(self, position: Position, params: Tensor, header: PayloadHeader, data: memoryview) -> None:
        """``w <- w - eta_w D``, or what the run's optimizer makes of D."""
        check_header(header, self._expected)
        update = unpack(header, data)
        self._realizations.apply(update_round(position), params, update)


class AflComWorker(WorkerAlgorithm):
    """One worker's half: step 2.

    A lossless compressor needs no residual: p is the weighted gradient and e stays zero. Only what was put
    back makes one, for one round: it goes with the next message.

    Args:
        spare: what the workers of a process share to make p in.
        resends: whether a report must stay as it is until the worker's next; otherwise p is made in memory
            that the next gradient takes, where no residual is kept.
        joins: whether integers are added to other workers' before they are sent.
        own_weight: where the dual weight is the worker's own business.
    """

    def __init__(
        self,
        worker: int,
        settings: AlgorithmSettings,
        realizations: Realizations,
        device: torch.device | str,
        spare: Spare,
        *,
        resends: bool,
        joins: bool = False,
        own_weight: OwnWeight | None = None,
    ) -> None:
        super().__init__(worker)
        self._pack = pack_to_add if joins else pack
        self._settings = settings
        self._realizations = realizations
        dim, lossless = realizations.uplink.dim, realizations.uplink.lossless
        self._new_feedback = partial(ErrorFeedback, dim, device, spare)
        self._spare = spare
        self._message = torch.empty(dim, device=device) if lossless and resends else None
        self._own_weight = own_weight
        self._feedback: ErrorFeedback | None = None
        self._exponents: NDArray[np.int32] | None = None
        """Of the grid that the last message's integers lie on."""
        self._trained = 0
        """The round of the last message, in whose step size's units the residual is."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """As in round 1."""
        self._feedback = None if self._realizations.uplink.lossless else self._new_feedback()
        self._exponents, self._trained = None, 0
        if self._own_weight is not None:
            self._own_weight.begin_anew()

    def train(self, position: Position, weight: float, model: LocalModel) -> tuple[Report, list[Payload]]:
        """Weigh the gradient, compress it with error feedback, and pack.

        The loss reported is the gradient's minibatch's, or that of a minibatch of held-out records.
        """
        own = self._own_weight
        if own is not None:
            weight = own.of_round(position.round, weight)
        # Before the gradient, which is valid until the next call.
        held_out = model.loss(position.round)[0] if self._settings.dual_loss_held_out else None
        loss, examples, weighted = model.weighted_gradient(position.round, weight)
        loss = finite_loss(loss if held_out is None else held_out)
        # Before anything is taken out of the residual: it may be too large to be told.
        share = None if own is None else payload_of(own.share(position.round, weight, loss), Role.WEIGHT)
        if self._feedback is None:
            message = self._message
            if message is None:
                message = self._spare.vector_like(model.params)
            if not weighted.write(message):
                raise NonFiniteError(NOT_FINITE)
            compressed = Compressed(message.cpu().numpy())
        else:
            realization = self._realizations.of_uplink(position.round)
            try:
                factor = self._settings.residual_factor(self._trained, position.round)
                compressed = self._feedback.compress(weighted, realization, factor)
            except NonFiniteError as error:
                raise error if weighted.is_finite() else NonFiniteError(NOT_FINITE) from None
            if isinstance(realization, OnGrid):
                self._exponents = realization.exponents
            if self._realizations.uplink.lossless:
                self._feedback = None
        self._trained = position.round
        payload = self._pack(self._realizations.uplink, compressed)
        if share is None:
            return Report(self.worker, position, loss, examples, (payload.header,)), [payload]
        # How large the minibatch is may say how many records there are.
        return Report(self.worker, position, 0.0, 1, (payload.header, share.header)), [payload, share]

    @property
    def residual(self) -> Tensor | None:
        """e^(i), float32 ``[dim]``; ``None`` if the uplink loses nothing and nothing was put back."""
        return None if self._feedback is None else self._feedback.residual

    def state(self) -> Arrays:
        """e^(i), its units, and where the last message's integers lie."""
        own: Arrays = {} if self._exponents is None else {"exponents": self._exponents}
        if self._settings.rescales_residuals:
            own = {**own, "trained": np.array([self._trained])}
        if self._own_weight is not None:
            own = {**own, "share": self._own_weight.state()}
        return {**super().state(), **own}

    def restore(self, state: Arrays) -> None:
        """Continue with a stored :meth:`state`."""
        if "residual" in state:
            self._feedback = self._feedback or self._new_feedback()
            overwrite(self._feedback.residual, state["residual"])
        self._exponents = state.get("exponents")
        if "trained" in state:
            (self._trained,) = state["trained"].tolist()
        if self._own_weight is not None:
            self._own_weight.restore(state["share"])

    def put_back(self, report: Report, payloads: Sequence[Payload]) -> None:
        """``e <- e + C_t(p)``: what was late goes with a later message."""
        if not report.payloads:
            return
        payload = payloads[0]
        feedback = self._feedback or self._new_feedback()
        message = unpack(payload.header, payload.data)
        if payload.header.value_type is ValueType.MODULAR:
            message = Compressed(signed(message.values, payload.header.bits))
        feedback.put_back(message, self._realizations.of_uplink(report.position.round, self._exponents))
        self._feedback = feedback


def afl_com_side(
    settings: AlgorithmSettings,
    dim: int,
    randomness: SharedRandomness,
    workers: Sequence[int],
    device: torch.device | str,
    *,
    resends: bool,
) -> WorkerSide:
    """Steps 2 and 5; the arguments are those of :meth:`afl.core.algorithms.algorithm.Algorithm.worker`."""
    realizations, spare = Realizations(settings, dim, randomness, device), Spare()
    # A simulation, which sends nothing again, has each worker report alone.
    joins = resends and len(workers) > 1

    def eta_q(round_: int) -> float:
        return settings.eta_q * settings.eta_q_factor(round_)

    uniform = settings.dual.options.get("uniform", 0.0)
    block = None if uniform else settings.block

    def half(worker: int) -> AflComWorker:
        own = OwnWeight(settings.workers, eta_q, block, uniform) if settings.hides_losses else None
        return AflComWorker(
            worker, settings, realizations, device, spare, resends=resends, joins=joins, own_weight=own
        )

    halves = {worker: half(worker) for worker in workers}
    return WorkerSide(
        AflComReplica(realizations),
        halves,
        realizations.prepare,
        realizations.digest_material,
        realizations.grid,
        companions=realizations.companions,
        hides_losses=settings.hides_losses,
        hides_norms=settings.secure_aggregation,
    )
