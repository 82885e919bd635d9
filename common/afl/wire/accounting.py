"""Byte accounting, exact: what crossed the wire, what it was, and what the paper would charge for it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from afl.core.codecs.payload import codec_of
from afl.core.messages import PayloadHeader, Role, ValueType

GRPC_PREFIX_BYTES = 5
"""gRPC puts a flag and a 32-bit length before each message in the HTTP/2 DATA payload."""


class Direction(enum.StrEnum):
    """The direction of a frame: up from the workers, or down to them."""

    UPLINK = "uplink"
    DOWNLINK = "downlink"


class Traffic(enum.StrEnum):
    """What a frame is for."""

    GRADIENT = "gradient"
    MODEL = "model"
    EVALUATION = "evaluation"
    CONTROL = "control"


class Part(enum.StrEnum):
    """What the bytes of a frame are."""

    VALUES = "values"
    INDICES = "indices"
    SCALARS = "scalars"
    ENVELOPE = "envelope"


@dataclass(frozen=True)
class FrameContent:
    """What one frame holds besides its envelope, in bytes."""

    traffic: Traffic
    values: int = 0
    indices: int = 0
    scalars: int = 0


@dataclass
class WireCount:
    """Running totals of one direction. The sums of ``wire`` and ``parts`` are equal: the envelope is what is
    left."""

    wire: dict[Traffic, int] = field(default_factory=lambda: dict.fromkeys(Traffic, 0))
    parts: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    frames: int = 0
    float_equivalents: float = 0.0

    def copied(self) -> WireCount:
        """A copy that later frames do not change."""
        return replace(self, wire=dict(self.wire), parts=dict(self.parts))

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> WireCount:
        """From what ``dataclasses.asdict`` makes of one, also by way of JSON."""
        return cls(
            {kind: values["wire"][kind] for kind in Traffic},
            {part: values["parts"][part] for part in Part},
            values["frames"],
            values["float_equivalents"],
        )

    def add(self, length: int, content: FrameContent, times: int = 1) -> None:
        """Count a frame of ``length`` bytes (without gRPC's prefix), or several that are alike."""
        total = length + GRPC_PREFIX_BYTES
        self.frames += times
        self.wire[content.traffic] += times * total
        self.parts[Part.VALUES] += times * content.values
        self.parts[Part.INDICES] += times * content.indices
        self.parts[Part.SCALARS] += times * content.scalars
        self.parts[Part.ENVELOPE] += times * (total - content.values - content.indices - content.scalars)

    @property
    def total(self) -> int:
        """Bytes of all frames, with gRPC's prefixes."""
        return sum(self.wire.values())


def saved_bytes(header: PayloadHeader) -> int:
    """How much longer the whole vector of float32 values is than the payload that stands for it."""
    if header.value_type is ValueType.BYTES:
        return 0
    return 4 * header.dim - header.total_bytes


def float_equivalents(header: PayloadHeader) -> float:
    """What the paper charges for a payload (section 4.2): values, and ``ceil(log2 d) / 32`` an index.

    What it has no charge for counts as its codec says. Buffers are part of an evaluation, which is free.
    """
    if header.role is Role.BUFFERS:
        return 0.0
    if header.value_type is ValueType.BYTES:
        return header.value_bytes / 4
    return codec_of(header).float_equivalents(header)
