"""What is sent to all sessions, serialized once: a step, followed by each at its own pace, and a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from afl.core.algorithms.base import Companion
from afl.core.algorithms.local_sgd import model_payload
from afl.core.messages import NOWHERE, Encoding, Payload, PayloadHeader, Position, Role, Step, ValueType
from afl.core.model.parameters import ParameterVector
from afl.core.rounds.results import Opening
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import DIGEST_BYTES
from afl.wire.fast_chunk import lone_chunk_of_server
from afl.wire.frames import (
    JOIN_BELOW_BYTES,
    Frame,
    chunk_frame,
    chunk_frames,
    commit_frame,
    joined,
    step_frame,
)
from afl_server.federation.events import PartialStep


class Broadcast:
    """The frames of one step, growing while the payload is still being summed.

    Only the federation changes it; streams read it.

    Attributes:
        step: what is broadcast.
        base: the position a model must be at for this step's payload to apply.
        participants: the workers that answer the step.
        left_out: those of them that need not, where their process has others that do.
        is_closed: whether all frames are there.
        is_abandoned: whether it will never close: a step without its commit was never there.
        dual_weights: ``[m]``, once closed; empty where workers are told none.
    """

    def __init__(
        self,
        step: Step,
        base: Position,
        participants: Sequence[int],
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self.step = step
        self.base = base
        self.participants = participants
        self.left_out = left_out
        self.frames: list[Frame] = [step_frame(step)]
        self.is_closed = self.is_abandoned = False
        self.dual_weights: Sequence[float] = ()
        self._sent_bytes = 0

    @classmethod
    def whole(
        cls, opening: Opening, base: Position, *, dual_weights: Sequence[float], chunk_bytes: int
    ) -> Broadcast:
        """A step whose payloads are complete."""
        broadcast = cls(opening.step, base, opening.participants, opening.left_out)
        for index, payload in enumerate(opening.payloads):
            broadcast.frames.extend(chunk_frames(pb.ServerFrame, payload, chunk_bytes, index=index))
        broadcast.close(dual_weights)
        return broadcast

    def is_for(self, workers: Iterable[int]) -> bool:
        """Whether one of the workers answers it."""
        return any(worker in self.participants for worker in workers)

    def asked_of(self, workers: Iterable[int]) -> list[int]:
        """The session's workers that are to answer. Where no answer would count these are all that take part,
        since a step that names nobody asks all."""
        answering = [worker for worker in workers if worker in self.participants]
        return [worker for worker in answering if worker not in self.left_out] or answering

    def begins_with(self, partial: PartialStep) -> bool:
        """Whether what a process holds of this step is its beginning, as far as it is framed."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for frame in self.frames:
            chunk = lone_chunk_of_server(frame.data)
            if chunk is None or (chunk.payload, chunk.offset) >= (partial.payload, partial.offset):
                continue
            digest.update(
                chunk.data if chunk.payload < partial.payload else chunk.data[: partial.offset - chunk.offset]
            )
        return digest.digest() == partial.digest

    def ending(self, sent: int, workers: Sequence[int], *, may_join: bool = True) -> list[Frame]:
        """What is left of a closed step for a session of these workers that was sent the first ``sent``
        frames; the commit is the last, or joined with the last of them if it ``may_join``."""
        weights = [self.dual_weights[worker] for worker in workers] if self.dual_weights else []
        asked = self.asked_of(workers)
        named = () if len(asked) == len(workers) else asked
        commit = commit_frame(self.step.position, self.step.kind, weights, named)
        rest = self.frames[sent:]
        if may_join and rest and len(rest[-1].data) < JOIN_BELOW_BYTES:
            commit = joined([rest.pop(), commit])
        return [*rest, commit]

    def extend(self, ready: memoryview, chunk_bytes: int, *, complete: bool) -> None:
        """Frame what is new in ``ready``, the final beginning of the payload, in whole chunks.

        Args:
            complete: whether ``ready`` is the whole payload, so that its end is framed too.
        """
        while self._sent_bytes < len(ready) and (complete or len(ready) - self._sent_bytes >= chunk_bytes):
            piece = ready[self._sent_bytes : self._sent_bytes + chunk_bytes]
            self.frames.append(chunk_frame(pb.ServerFrame, self.step.payloads[0], self._sent_bytes, piece))
            self._sent_bytes += len(piece)

    def close(self, dual_weights: Sequence[float]) -> None:
        """All frames are there; each session may be sent its commit."""
        if sum(len(frame.data) for frame in self.frames) < JOIN_BELOW_BYTES and self._sent_bytes == 0:
            self.frames = [joined(self.frames)]
        self.dual_weights = dual_weights
        self.is_closed = True

    def forget_payload(self) -> None:
        """Free the frames: whoever joins now is sent the model instead."""
        self.frames = []
        self.base = NOWHERE


def model_payloads(
    vector: ParameterVector, params: Tensor, companions: Mapping[Role, Companion]
) -> list[Payload]:
    """The trained parameters, as ``params`` has them, their companions, and, where there are any, the frozen
    parameters and the mean of the workers' buffers."""
    payloads = [model_payload(params.numpy(), Role.MODEL)]
    payloads += [_bytes_payload(role, companion.content()) for role, companion in companions.items()]
    frozen = vector.frozen_bytes()
    if frozen:
        payloads.append(_bytes_payload(Role.FROZEN, frozen))
    if vector.buffers.size:
        payloads.append(model_payload(vector.buffers.values(), Role.BUFFERS))
    return payloads


def _bytes_payload(role: Role, content: bytes) -> Payload:
    size = len(content)
    header = PayloadHeader(role, Encoding.DENSE, size, size, size, ValueType.BYTES)
    return Payload(header, (memoryview(content),))


class ModelCopy:
    """A model's parameters as they are now, apart from those that go on changing."""

    def __init__(self, vector: ParameterVector) -> None:
        self.dim = vector.dim
        self.buffers = vector.stored_buffers
        self.initial_digest, self.frozen_digest = vector.initial_digest, vector.frozen_digest
        self.tensors = {name: tensor.clone() for name, tensor in vector.named_values().items()}
