"""What server and workers say to each other, as plain values; :mod:`afl.wire` turns them into bytes."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EVALUATION_PHASE = 255
"""The phase of the evaluation that follows a round."""

BUFFERS_PHASE = 254
"""The phase before it in which the workers' buffers are averaged, where the task wants their mean; an
algorithm's own phases are below it."""


MAX_METRICS = 64
"""The most, in one report."""

METRIC_NAMES = "a metric's name has 1 to 64 of the characters A-Z a-z 0-9, space and _-.,:;/@%+=*#()[]"

_METRIC_NAME = re.compile(r"[A-Za-z0-9 _\-.,:;/@%+=*#()\[\]]{1,64}")


def is_metric_name(name: object) -> bool:
    """Whether a task's metric may be called so: it is kept, drawn and shown wherever a run is."""
    return isinstance(name, str) and _METRIC_NAME.fullmatch(name) is not None


MOST_JOINED = 1024
"""The most workers that one joint report stands for: what it tells of each stays small beside its payload."""

BITS = "bits"
"""A compressor's option: how many bits hold each of its values, as an integer on a grid."""

BIT_WIDTHS = range(2, 25)
"""From -1 to 1, to what float32 holds exactly."""


class Position(NamedTuple):
    """A point of the conversation, ordered; ``round`` is 1-based, ``(0, 0)`` means none yet."""

    round: int
    phase: int


NOWHERE = Position(0, 0)


class Kind(enum.IntEnum):
    """What a step asks for; the numbers are those of the protocol."""

    TRAIN = 1
    EVALUATE = 2
    MODEL = 3
    LOSS = 4
    BUFFERS = 5

    @property
    def is_of_evaluation(self) -> bool:
        """Whether it belongs to an evaluation: all workers answer, and the algorithm has no part in it."""
        return self in {Kind.EVALUATE, Kind.BUFFERS}


class Role(enum.IntEnum):
    """What a payload is; the numbers are those of the protocol."""

    UPDATE = 1
    MODEL = 2
    FROZEN = 3
    SNAPSHOT = 4
    BUFFERS = 6
    ITERATE = 7
    GRID = 8
    WEIGHT = 9
    METRICS = 10
    OPTIMIZER = 11


class Encoding(enum.IntEnum):
    """The form of a payload; the numbers are those of the protocol."""

    DENSE = 1
    INDEXED = 2
    SEEDED = 3
    SIGNS = 4


class ValueType(enum.IntEnum):
    """The type of a payload's values; the numbers are those of the protocol."""

    FLOAT32 = 1
    BYTES = 2
    MODULAR = 3
    INTEGER = 4


@dataclass(frozen=True)
class PayloadHeader:
    """Describes a payload before its bytes come.

    Attributes:
        dim: the dimension d of the vector it stands for.
        count: how many values travel (``SIGNS``: how many signs, after their one scale).
        index_coding: how the indices are coded; 0 where none travel.
        index_parameter: the coding's parameter.
        index_bytes: the length of the coded indices, which come first.
        value_bytes: the length of the values.
        bits: of integers: the width that holds each of them, with its sign, or the logarithm of their
            modulus; else 0.
    """

    role: Role
    encoding: Encoding
    dim: int
    count: int
    value_bytes: int
    value_type: ValueType = ValueType.FLOAT32
    index_coding: int = 0
    index_parameter: int = 0
    index_bytes: int = 0
    bits: int = 0

    @property
    def total_bytes(self) -> int:
        """The payload's length in bytes: indices and values."""
        return self.index_bytes + self.value_bytes

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> PayloadHeader:
        """From what ``dataclasses.asdict`` makes of one, also by way of JSON."""
        return cls(
            **{
                **values,
                "role": Role(values["role"]),
                "encoding": Encoding(values["encoding"]),
                "value_type": ValueType(values["value_type"]),
            }
        )


@dataclass(frozen=True)
class Payload:
    """A payload and its bytes: the coded indices (perhaps empty), then the values.

    Attributes:
        sections: the buffers that, end to end, are the payload; together ``header.total_bytes`` long.
    """

    header: PayloadHeader
    sections: tuple[memoryview, ...]

    @property
    def data(self) -> memoryview:
        """All bytes: of one section without a copy."""
        return self.sections[0] if len(self.sections) == 1 else memoryview(b"".join(self.sections))

    def copied(self) -> Payload:
        """A copy in memory of its own."""
        return Payload(self.header, tuple(memoryview(bytes(section)) for section in self.sections))


@dataclass(frozen=True)
class Step:
    """The opening of a step: what to apply and what to do then."""

    position: Position
    kind: Kind
    payloads: tuple[PayloadHeader, ...] = ()


@dataclass(frozen=True)
class CommittedStep:
    """A step whose closing part has come.

    Attributes:
        payloads: the bytes of each of ``step.payloads``.
        dual_weights: of the hosted workers, by worker id; empty where the algorithm tells none.
        participants: the hosted workers that answer; ``None`` for all.
    """

    step: Step
    payloads: tuple[memoryview, ...]
    dual_weights: Mapping[int, float]
    participants: frozenset[int] | None = None


@dataclass(frozen=True)
class Share:
    """What is told of one more worker of a joint report; the fields are those of :class:`Report`."""

    worker: int
    loss: float
    examples: int


@dataclass(frozen=True)
class Report:
    """What one worker answers to one step; or, in one joint report, several workers of one process.

    Attributes:
        loss: the mean loss of the minibatch (training) or of the test data (evaluation), else 0.
        examples: how many examples it is the mean of; 0 where there is no loss.
        metrics: means over the test data, by name (evaluation).
        model_digest: of the parameters the worker holds (evaluation), else empty.
        weight: how much the report counts in a mean over workers, where the algorithm takes one that the
            workers weigh (FedAvg by samples: their number of training examples), else 0.
        missing: why the worker has nothing to report for this step, which is then all there is; else empty.
        residual_norm: the Euclidean norm of the worker's residual (evaluation), 0 if it keeps none; nothing
            is computed from it.
        tensor_residual_norms: those of its parts by parameter tensor, in order, where messages are integers
            and a residual is kept (evaluation); else empty.
        others: of a joint report, the other workers that it stands for, ascending and after ``worker``: the
            payloads are the sums of all these workers' integers.
        history: of a masked message, the epoch of keys and a digest of all that its worker was shown in it up
            to now, which the mask is drawn from; it does not travel.
    """

    worker: int
    position: Position
    loss: float
    examples: int
    payloads: tuple[PayloadHeader, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    model_digest: bytes = b""
    weight: float = 0.0
    missing: str = ""
    residual_norm: float = 0.0
    others: tuple[Share, ...] = ()
    tensor_residual_norms: tuple[float, ...] = ()
    history: bytes = b""

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers that it stands for, in its order."""
        return (self.worker, *[share.worker for share in self.others])

    def of_each(self) -> Iterator[Report]:
        """One report for each worker that it stands for; the first's is this one, with the payloads."""
        yield self
        for share in self.others:
            yield Report(share.worker, self.position, share.loss, share.examples, missing=self.missing)


class AckStatus(enum.IntEnum):
    """What became of a report; the numbers are those of the protocol."""

    ACCEPTED = 1
    DUPLICATE = 2
    LATE = 3
    REFUSED = 4


@dataclass(frozen=True)
class Ack:
    """The server's answer to a report; ``others`` are the other workers of a joint one."""

    worker: int
    position: Position
    status: AckStatus
    reason: str = ""
    others: tuple[int, ...] = ()

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers whose report it answers."""
        return (self.worker, *self.others)


class GoodbyeStatus(enum.IntEnum):
    """Why a session ends; the numbers are those of the protocol."""

    FINISHED = 1
    REFUSED = 2
    TRY_LATER = 3
    ABORTED = 4
    LEAVING = 5
    OTHER_VERSION = 6


class FailureCause(enum.IntEnum):
    """Why a worker could not do a step; the numbers are those of the protocol."""

    TASK = 1
    NON_FINITE = 2
    OUT_OF_MEMORY = 3
    HELPER_KILLED = 4
    INTERNAL = 5
