"""What every algorithm gives the round engine (server) and the participant (worker): pure state machines."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afl.messages import Payload, PayloadHeader, Position, Report


class ServerAlgorithm(abc.ABC):
    """The server's half. The engine drives it: reports in, then :meth:`close` at the end of a phase.

    One call at a time; no call blocks but on arithmetic.
    """

    @abc.abstractmethod
    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:
        """What a worker's report at ``position`` carries. Index sections are bounded, not fixed:
        ``index_bytes`` is then the most that is accepted."""

    @abc.abstractmethod
    def add_loss(self, worker: int, loss: float) -> None:
        """A worker's finite loss for the open phase."""

    @abc.abstractmethod
    def received(self, worker: int) -> int:
        """Bytes of the worker's payload that are already in the sum and cannot be taken back."""

    @abc.abstractmethod
    def add_piece(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """The next bytes of the worker's payload, in order, without gaps.

        Raises:
            NonFiniteError: if a value is not finite; nothing of this piece was taken.
            ProtocolError: if the bytes are not what the header says.
        """

    @abc.abstractmethod
    def drop(self, worker: int) -> None:
        """Forget what has come of an unfinished payload, as far as it is not in the sum."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget the open phase's sum and losses; all workers report again."""

    @property
    @abc.abstractmethod
    def waiting_bytes(self) -> int:
        """Bytes held for workers whose turn in the sum has not come."""

    @abc.abstractmethod
    def would_wait(self, worker: int) -> bool:
        """Whether a piece of ``worker`` that came now would be held rather than summed."""

    @abc.abstractmethod
    def streamed_header(self) -> PayloadHeader | None:
        """The downlink payload's header if it can be sent while the uplink still comes, else ``None``."""

    @abc.abstractmethod
    def streamed(self) -> memoryview:
        """The bytes of the downlink payload that are final so far (its beginning)."""

    @abc.abstractmethod
    def close(self) -> Payload:
        """All workers have reported: make the downlink payload and the next dual weights.

        The payload's buffers stay valid until :meth:`settle`.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """Move the server's own model by what :meth:`close` made; idempotent. Off the critical path."""

    @property
    @abc.abstractmethod
    def dual_weights(self) -> NDArray[np.float64]:
        """q for the open round, ``[m]``."""


class Replica(abc.ABC):
    """A copy of the model that follows the run by what the server broadcasts."""

    @abc.abstractmethod
    def apply(self, position: Position, params: Tensor, header: PayloadHeader, data: memoryview) -> None:
        """Move ``params`` (float32 ``[dim]``) by the payload of the step at ``position``.

        Raises:
            ProtocolError: if the payload is not what the algorithm sends.
        """


class WorkerAlgorithm(abc.ABC):
    """One worker's half."""

    @abc.abstractmethod
    def report(
        self, position: Position, weight: float, loss: float, examples: int, gradient: Tensor
    ) -> tuple[Report, list[Payload]]:
        """The answer to a training step.

        Args:
            weight: this worker's dual weight.
            gradient: float32 ``[dim]``, finite; may be changed.
        """
