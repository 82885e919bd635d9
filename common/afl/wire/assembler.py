"""A step from its parts: opening, chunks, commit. A step without its commit was never there."""

from __future__ import annotations

import hashlib
from collections import deque

from afl.core.messages import CommittedStep, Kind, Step
from afl.errors import ProtocolError
from afl.v1 import federation_pb2 as pb
from afl.wire.fast_chunk import ChunkView
from afl.wire.frames import number, position_message, position_of, step_of

DIGEST_BYTES = 16


class StepAssembler:
    """Collects the parts of one step at a time, over any number of sessions of one process.

    Args:
        workers: the process's workers, in the order of its Join.
        largest: the most payload bytes a step may have; checked before anything is allocated.
        largest_weight: of what a worker is told of its dual weight.
    """

    def __init__(self, workers: tuple[int, ...], largest: int, largest_weight: float = 1.0) -> None:
        self._workers = workers
        self._largest = largest
        self._largest_weight = largest_weight
        self._step: Step | None = None
        self._buffers: list[bytes | memoryview | bytearray] = []
        self._filled: list[int] = []
        self._spare: deque[bytearray] = deque(maxlen=2)

    def feed(self, frame: pb.ServerFrame) -> CommittedStep | None:
        """The parts in one frame; the step if they complete one. Raises ProtocolError if a part does not fit
        what came before."""
        if frame.HasField("step"):
            self._open(step_of(frame.step), goes_on=frame.step.goes_on)
        for chunk in frame.chunks:
            self.add(chunk)
        return self._commit(frame.commit) if frame.HasField("commit") else None

    @property
    def arrived(self) -> int:
        """Payload bytes of a step that has come in part."""
        return sum(self._filled) if self._step is not None else 0

    def partial(self) -> pb.PartialStep | None:
        """What has come of a step whose session was cut; ``None`` where there is nothing to go on with."""
        if self._step is None or not any(self._filled):
            return None
        lengths = [header.total_bytes for header in self._step.payloads]
        index = next(
            (
                number_
                for number_, (filled, length) in enumerate(zip(self._filled, lengths, strict=True))
                if filled < length
            ),
            len(lengths) - 1,
        )
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for buffer, filled in zip(self._buffers, self._filled, strict=True):
            digest.update(memoryview(buffer)[:filled])
        return pb.PartialStep(
            position=position_message(self._step.position),
            kind=number(self._step.kind),
            payload=index,
            offset=self._filled[index],
            digest=digest.digest(),
        )

    def recycle(self, committed: CommittedStep) -> None:
        """The step has been applied: its large buffers may serve another."""
        for data in committed.payloads:
            if isinstance(data.obj, bytearray):
                self._spare.append(data.obj)

    def _open(self, step: Step, *, goes_on: bool) -> None:
        if goes_on:
            if step != self._step:
                raise ProtocolError("a step that goes on, of which no beginning has come")
            return
        total = sum(header.total_bytes for header in step.payloads)
        if total > self._largest:
            raise ProtocolError(f"a step of {total} bytes; {self._largest} are the most for this model")
        self._step = step
        self._buffers = [b"" for _ in step.payloads]
        self._filled = [0] * len(step.payloads)

    def add(self, chunk: pb.Chunk | ChunkView) -> None:
        """The next piece of one of the open step's payloads. Raises ProtocolError if it is not."""
        step, index, data = self._step, chunk.payload, chunk.data
        if step is None or index >= len(step.payloads):
            raise ProtocolError("a chunk that belongs to no step")
        total = step.payloads[index].total_bytes
        if not data or chunk.offset != self._filled[index] or chunk.offset + len(data) > total:
            raise ProtocolError(
                f"a chunk of {len(data)} bytes at byte {chunk.offset}; byte {self._filled[index]} of {total} "
                "comes next"
            )
        if len(data) == total:
            self._buffers[index] = data
        else:
            buffer = self._buffers[index] or self._take(total)
            assert isinstance(buffer, bytearray)
            buffer[chunk.offset : chunk.offset + len(data)] = data
            self._buffers[index] = buffer
        self._filled[index] += len(data)

    def _take(self, size: int) -> bytearray:
        for spare in list(self._spare):
            if len(spare) == size:
                self._spare.remove(spare)
                return spare
        return bytearray(size)

    def _commit(self, commit: pb.Commit) -> CommittedStep:
        step = self._step
        if step is None or position_of(commit.position) != step.position:
            raise ProtocolError("a commit that belongs to no step")
        for header, filled in zip(step.payloads, self._filled, strict=True):
            if filled != header.total_bytes:
                raise ProtocolError(f"a commit after {filled} of {header.total_bytes} payload bytes")
        weights = list(commit.dual_weights)
        if step.kind is Kind.TRAIN and weights:
            if len(weights) != len(self._workers):
                raise ProtocolError(f"{len(weights)} dual weights for {len(self._workers)} workers")
            if not all(0.0 <= weight <= self._largest_weight for weight in weights):
                raise ProtocolError(f"a dual weight outside [0, {self._largest_weight:g}]")
        asked = frozenset(commit.workers) or None
        if asked and not asked.issubset(self._workers):
            raise ProtocolError(f"a step for workers {sorted(asked)}, not all of this session")
        payloads = tuple(memoryview(buffer) for buffer in self._buffers)
        self._step, self._buffers = None, []
        return CommittedStep(step, payloads, dict(zip(self._workers, weights, strict=False)), asked)
