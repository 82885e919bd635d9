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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import (
    Arrays,
    LocalModel,
    Replica,
    ServerAlgorithm,
    WorkerAlgorithm,
    finite_gradient,
)
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.payload import VALUE_BYTES, bytes_of, check_header, expected, pack, unpack, values_of
from afl.core.compressors import Compressed, Compressor, Realization, create
from afl.core.dual import DualRule, DualWeights
from afl.core.feedback import ErrorFeedback
from afl.core.messages import BUFFERS_PHASE, Payload, PayloadHeader, Position, Report
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.sums import OrderedSum
from afl.core.vectors import is_finite, norm, overwrite
from afl.errors import NonFiniteError


class Realizations:
    """The compressors' realizations by round, each drawn once while it is needed.

    The realization of a round depends on nothing before it, so :meth:`prepare` may draw the next one
    while others wait for the network.
    """

    _KEPT = 4

    def __init__(
        self,
        settings: AlgorithmSettings,
        dim: int,
        randomness: SharedRandomness,
        device: torch.device | str = "cpu",
    ) -> None:
        self.uplink = create(settings.uplink.name, dim, settings.uplink.options)
        self.downlink = (
            self.uplink
            if settings.downlink == settings.uplink
            else create(settings.downlink.name, dim, settings.downlink.options)
        )
        self._randomness = randomness
        self._device = device
        self._drawn: dict[tuple[int, bool], Realization] = {}

    def of_uplink(self, round_: int) -> Realization:
        """C_t of the workers."""
        return self._draw(self.uplink, round_)

    def of_downlink(self, round_: int) -> Realization:
        """C_t of the server: the same object where the compressors are the same."""
        return self._draw(self.downlink, round_)

    def prepare(self, round_: int) -> None:
        """Draw a round's realizations now."""
        self.of_uplink(round_)
        self.of_downlink(round_)

    def digest_material(self) -> bytes:
        """What a worker must agree on with the server before the first round."""
        stream = self._randomness.stream(Purpose.COMPRESSOR, 1)
        return b"".join(
            (
                stream.words(4).astype("<u8").tobytes(),
                self.of_uplink(1).digest_material(),
                self.of_downlink(1).digest_material(),
            )
        )

    def _draw(self, compressor: Compressor, round_: int) -> Realization:
        key = (round_, compressor is self.uplink)
        if key not in self._drawn:
            # Room is made first: the round asked for may be the oldest of all.
            while len(self._drawn) >= self._KEPT:
                del self._drawn[min(self._drawn)]
            # A downlink of its own is independent of what it compresses, as Theorem 2's proof has it.
            purpose = Purpose.COMPRESSOR if compressor is self.uplink else Purpose.DOWNLINK_COMPRESSOR
            stream = self._randomness.stream(purpose, round_)
            self._drawn[key] = compressor.realize(stream, self._device)
        return self._drawn[key]


def update_round(position: Position) -> int:
    """The round t whose D_t a step at ``position`` carries."""
    return position.round if position.phase >= BUFFERS_PHASE else position.round - 1


class AflComServer(ServerAlgorithm):
    """The server's half.

    Args:
        params: w_1, float32 ``[dim]`` on the CPU; moved in place, by :meth:`settle` only.
        dual: q_1 and its rule; by default KL mirror ascent with restarts.
        forward: whether to forward the sum where the key observation allows it; ``False`` runs step 3 as
            it is written, which gives the same bits (projections: the same but for rounding).
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        params: Tensor,
        randomness: SharedRandomness,
        dual: DualRule | None = None,
        *,
        forward: bool = True,
    ) -> None:
        self.settings = settings
        self.params = params
        self.round = 1
        self.dual = dual or DualWeights(settings.workers, settings.eta_q, settings.block)
        self.realizations = Realizations(settings, len(params), randomness)
        uplink = self.realizations.uplink
        self._sums_values = uplink.additive_idempotent
        self._forwards = forward and self._sums_values and self.realizations.downlink is uplink
        self._losses = np.full(settings.workers, np.nan)
        self._expected = expected(uplink)
        self._sum = (
            OrderedSum(settings.workers, uplink.count)
            if self._sums_values
            else _OrderedMessages(settings.workers, len(params), self.realizations)
        )
        self._feedback = None if self._forwards else ErrorFeedback(len(params))
        self._pending: tuple[int, Compressed] | None = None

    @property
    def keeps_residuals(self) -> bool:
        """Unless the uplink loses nothing."""
        return not self.realizations.uplink.lossless

    @property
    def downlink_residual(self) -> NDArray[np.float32]:
        """e_hat; zeros where the sum is forwarded."""
        if self._feedback is None:
            return np.zeros(len(self.params), dtype=np.float32)
        array: NDArray[np.float32] = self._feedback.residual.numpy()
        return array

    @property
    def residual_norm(self) -> float | None:
        """Of e_hat, where there is one."""
        return None if self._feedback is None else norm(self._feedback.residual)

    @property
    def dual_weights(self) -> NDArray[np.float64]:
        """q_t for the open round."""
        return self.dual.weights

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:  # noqa: ARG002
        """One update, in the uplink compressor's form."""
        return (self._expected,)

    def add_loss(self, worker: int, loss: float) -> None:
        """l_i of the open round."""
        self._losses[worker] = loss

    def received(self, worker: int, payload: int) -> int:  # noqa: ARG002  # there is one
        """Bytes already summed or held for the sum."""
        if not isinstance(self._sum, OrderedSum) or self._pending is not None:
            return 0
        return self._sum.received(worker) * VALUE_BYTES

    def add_piece(
        self,
        worker: int,
        payload: int,  # noqa: ARG002  # there is one
        header: PayloadHeader,
        data: bytes | memoryview,
    ) -> None:
        """Fold the next bytes of c_i."""
        self.settle()
        if isinstance(self._sum, OrderedSum):
            self._sum.add(worker, values_of(data))
        else:
            self._sum.add(worker, self.round, header, data)

    def drop(self, worker: int) -> None:
        """Forget an unfinished message that is not in the sum."""
        if isinstance(self._sum, _OrderedMessages):
            self._sum.drop(worker)

    def reset(self) -> None:
        """Begin the open round's sum again."""
        self.settle()
        self._sum.reset()
        self._losses.fill(np.nan)

    def leave_out(self, absent: Sequence[int]) -> None:
        """D_t is made of the others' messages."""
        self.settle()
        self._sum.leave_out(absent)

    @property
    def waiting_bytes(self) -> int:
        """Bytes held out of order."""
        return self._sum.waiting_bytes

    def would_wait(self, worker: int) -> bool:
        """Whether a worker before this one is still missing."""
        return self._sum.would_wait(worker)

    def streamed_header(self) -> PayloadHeader | None:
        """The header of D_t before it is complete, where the sum is forwarded."""
        return self._expected if self._forwards else None

    def streamed(self) -> memoryview:
        """The final beginning of D_t."""
        assert isinstance(self._sum, OrderedSum)
        if self._pending is not None:
            return bytes_of(self._sum.total[:0])
        return bytes_of(self._sum.total[: self._sum.done])

    def close(self) -> Payload:
        """Step 3: D_t, e_hat and q_{t+1}.

        Raises:
            NonFiniteError: if the sum leaves float32's range.
        """
        assert self._pending is None
        assert not np.isnan(self._losses).any()
        realizations, t = self.realizations, self.round
        if not is_finite(torch.from_numpy(self._sum.total)):
            raise NonFiniteError(f"round {t}: the sum of the workers' updates overflows float32")
        if self._forwards:
            downlink = Compressed(self._sum.total)
        else:
            assert self._feedback is not None
            downlink = self._feedback.compress(self._dense_sum(), realizations.of_downlink(t))
        payload = pack(realizations.downlink, downlink)
        self._step(self._losses, downlink)
        return payload

    def unsent(self) -> Arrays:
        """e_hat, where there is one."""
        return {} if self._feedback is None else {"downlink_residual": self.downlink_residual}

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:
        """Steps 3 and 5 from D_t."""
        assert self._pending is None
        if self._feedback is not None:
            overwrite(self._feedback.residual, unsent["downlink_residual"])
        self._step(losses, unpack(payload.header, payload.data))
        self.settle()

    def _step(self, losses: NDArray[np.float64], downlink: Compressed) -> None:
        self.dual.update(self.round, losses)
        self._losses.fill(np.nan)
        self._pending = (self.round, downlink)
        self.round += 1

    def settle(self) -> None:
        """Step 5 for the server's own copy; then the sum is free for the next round."""
        if self._pending is None:
            return
        t, downlink = self._pending
        self.realizations.of_downlink(t).step(self.params, downlink, self.settings.eta_w)
        self._pending = None
        self._sum.reset()

    def state(self) -> Arrays:
        """q_t and e_hat."""
        assert self._pending is None
        return {**self.dual.state(), **self.unsent()}

    def restore(self, state: Arrays, position: Position) -> None:
        """Begin round t."""
        self.round = position.round
        self.dual.restore(state)
        if self._feedback is not None:
            overwrite(self._feedback.residual, state["downlink_residual"])

    def digest_material(self) -> bytes:
        """Of round 1's realizations."""
        return self.realizations.digest_material()

    def _dense_sum(self) -> Tensor:
        total = torch.from_numpy(self._sum.total)
        if not self._sums_values:
            return total
        dense = torch.zeros(len(self.params))
        self.realizations.of_uplink(self.round).add_to(dense, Compressed(self._sum.total))
        return dense


class _OrderedMessages:
    """The sum of whole messages, each added when its worker's turn has come."""

    def __init__(self, workers: int, dim: int, realizations: Realizations) -> None:
        self.total: NDArray[np.float32] = np.zeros(dim, dtype=np.float32)
        self._workers = workers
        self._realizations = realizations
        self._arriving: dict[int, bytearray] = {}
        self._waiting: dict[int, tuple[Compressed, int]] = {}
        self._left_out: frozenset[int] = frozenset()
        self._next = 0
        self.waiting_bytes = 0

    def reset(self) -> None:
        self.total.fill(0.0)
        self._arriving.clear()
        self._waiting.clear()
        self._left_out = frozenset()
        self._next = 0
        self.waiting_bytes = 0

    def leave_out(self, absent: Sequence[int]) -> None:
        self._left_out = frozenset(absent)

    def would_wait(self, worker: int) -> bool:
        return worker > self._next

    def add(self, worker: int, round_: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        buffer = self._arriving.setdefault(worker, bytearray())
        buffer += data
        self.waiting_bytes += len(data)
        if len(buffer) < header.total_bytes:
            return
        # Decoded before its turn: a bad message must be refused while its sender can still be told.
        self.drop(worker)
        message = unpack(header, buffer)
        self._waiting[worker] = (message, header.total_bytes)
        self.waiting_bytes += header.total_bytes
        realization = self._realizations.of_uplink(round_)
        total = torch.from_numpy(self.total)
        while self._next in self._waiting or self._next in self._left_out:
            if self._next in self._waiting:
                message, size = self._waiting.pop(self._next)
                realization.add_to(total, message)
                self.waiting_bytes -= size
            self._next += 1

    def drop(self, worker: int) -> None:
        self.waiting_bytes -= len(self._arriving.pop(worker, b""))


class AflComReplica(Replica):
    """Any copy of the model: step 5."""

    def __init__(self, settings: AlgorithmSettings, realizations: Realizations) -> None:
        self._settings = settings
        self._realizations = realizations
        self._expected = expected(realizations.downlink)

    def apply(self, position: Position, params: Tensor, header: PayloadHeader, data: memoryview) -> None:
        """``w <- w - eta_w D``."""
        check_header(header, self._expected)
        realization = self._realizations.of_downlink(update_round(position))
        realization.step(params, unpack(header, data), self._settings.eta_w)


class AflComWorker(WorkerAlgorithm):
    """One worker's half: step 2.

    A lossless compressor needs no residual: p is the weighted gradient and e stays zero. Only what was put
    back makes one, for one round: it goes with the next message.

    Args:
        resends: whether a report must stay as it is until the worker's next; otherwise p is made in the
            gradient's own memory where no residual is kept.
        keeps_old: whether a residual whose sum overflows must stay as it was.
    """

    def __init__(
        self,
        worker: int,
        realizations: Realizations,
        device: torch.device | str = "cpu",
        *,
        resends: bool = True,
        keeps_old: bool = False,
    ) -> None:
        super().__init__(worker)
        self._realizations = realizations
        dim, lossless = realizations.uplink.dim, realizations.uplink.lossless
        self._new_feedback = partial(ErrorFeedback, dim, device, keeps_old=keeps_old)
        self._feedback = None if lossless else self._new_feedback()
        self._message = torch.empty(dim, device=device) if lossless and resends else None

    @property
    def uplink_residual(self) -> Tensor:
        """e^(i), float32 ``[dim]``."""
        if self._feedback is None:
            return torch.zeros(self._realizations.uplink.dim)
        return self._feedback.residual

    def train(self, position: Position, weight: float, model: LocalModel) -> tuple[Report, list[Payload]]:
        """Weigh the gradient, compress it with error feedback, and pack."""
        loss, examples, weighted = finite_gradient(model, position.round, weight)
        if self._feedback is None:
            message = weighted if self._message is None else self._message.copy_(weighted)
            compressed = Compressed(message.cpu().numpy())
        else:
            realization = self._realizations.of_uplink(position.round)
            compressed = self._feedback.compress(weighted, realization)
            if self._realizations.uplink.lossless:
                self._feedback = None
        payload = pack(self._realizations.uplink, compressed)
        return Report(self.worker, position, loss, examples, (payload.header,)), [payload]

    @property
    def residual(self) -> Tensor | None:
        """e^(i), if there is one."""
        return None if self._feedback is None else self._feedback.residual

    def restore(self, residual: NDArray[np.float32]) -> None:
        """Go on with an e^(i)."""
        self._feedback = self._feedback or self._new_feedback()
        overwrite(self._feedback.residual, residual)

    def put_back(self, report: Report, payloads: Sequence[Payload]) -> None:
        """``e <- e + C_t(p)``: what was late goes with a later message."""
        if not report.payloads:
            return
        (payload,) = payloads
        feedback = self._feedback or self._new_feedback()
        message = unpack(payload.header, payload.data)
        feedback.put_back(message, self._realizations.of_uplink(report.position.round))
        self._feedback = feedback
