"""What a worker process has sent, taken apart: payloads whose values are masked, and everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from afl.core.codecs.payload import unpack
from afl.core.messages import Position, Report, Role, ValueType
from afl.core.secrecy.uniformity import Uniformity
from afl.errors import DataError, ProtocolError
from afl.v1 import federation_pb2 as pb
from afl.wire.capture import PREFIX_BYTES, captured
from afl.wire.frames import parse_worker_frame, report_of

OF_LOSSES: Final = frozenset(
    {"loss", "others.loss", "metrics.value", "residual_norm", "tensor_residual_norms", "weight"}
)
"""Fields of a report that tell what hidden losses keep back."""

MOST_VALUES: Final = 3
"""Different values of a field that are kept."""

_REPORTS: Final = "reports."
_DATA: Final = "chunks.data"


@dataclass
class Told:
    """What one field of the messages has told: how often, and its first different values."""

    times: int = 0
    values: list[str] = field(default_factory=list)

    def add(self, value: object) -> None:
        """Count a value; text and numbers are kept, of bytes their length."""
        self.times += 1
        shown = f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
        if shown not in self.values and len(self.values) <= MOST_VALUES:
            self.values.append(shown)


@dataclass
class Masked:
    """The payloads of one role and width."""

    uniformity: Uniformity
    messages: int = 0
    bytes: int = 0


@dataclass
class _Open:
    """A report whose payloads come, or came."""

    epoch: int
    report: Report
    payloads: list[bytearray]


class Sent:
    """What a process has sent.

    Attributes:
        frames: how many.
        bytes: with gRPC's prefixes.
        masked: by role and width in bits.
        told: what is in clear: by the field of ``WorkerFrame``.
        wrong: what should not have left so, each once.
        hides_losses: whether losses are sent as shares of a sum.
    """

    def __init__(self, frames: Iterable[bytes]) -> None:
        self.frames = 0
        self.bytes = 0
        self.masked: dict[tuple[Role, int], Masked] = {}
        self.told: dict[str, Told] = {}
        self.wrong: dict[str, None] = {}
        self.hides_losses = False
        self._epoch = 0
        self._open: dict[int, _Open] = {}
        for frame in frames:
            self.frames += 1
            self.bytes += PREFIX_BYTES + len(frame)
            self._take(parse_worker_frame(frame))

    @classmethod
    def of_file(cls, path: Path) -> Sent:
        """What a capture holds. Raises DataError if it is none."""
        try:
            return cls(captured(path))
        except ProtocolError as error:
            raise DataError(f"{path} is none that afl-worker --capture has written: {error}") from error

    @property
    def told_of_losses(self) -> list[str]:
        """The fields that have told losses, or what follows from them."""
        return [name for name in self.told if name.removeprefix(_REPORTS) in OF_LOSSES]

    def _take(self, frame: pb.WorkerFrame) -> None:
        size = frame.ByteSize()
        for name, value in _fields(frame):
            if name != _DATA:
                self.told.setdefault(name, Told()).add(value)
        if frame.HasField("ready"):
            self._epoch = frame.ready.keys.epoch
        for message in frame.reports:
            self._report(report_of(message))
        for chunk in frame.chunks:
            self._chunk(chunk)
        frame.DiscardUnknownFields()
        if frame.ByteSize() != size:
            self._is_wrong("a message has fields that this version does not know")

    def _report(self, report: Report) -> None:
        for header in report.payloads:
            if header.value_type is not ValueType.MODULAR:
                self._is_wrong(
                    f"{header.role.name} payloads are of type {header.value_type.name}, which can be read"
                )
            self.hides_losses |= header.role is Role.WEIGHT
        if not report.payloads:
            return
        before = self._open.get(report.worker)
        if before is not None and before.epoch == self._epoch and report.position <= before.report.position:
            if report.position < before.report.position:
                self._is_wrong(f"{_named(report.position)} comes after a later message under the same keys")
            elif (report.workers, report.payloads) == (before.report.workers, before.report.payloads):
                return
        self._open[report.worker] = _Open(self._epoch, report, [bytearray() for _ in report.payloads])

    def _chunk(self, chunk: pb.Chunk) -> None:
        sending = self._open.get(chunk.worker)
        headers = sending.report.payloads if sending else ()
        end = chunk.offset + len(chunk.data)
        if sending is None or chunk.payload >= len(headers) or end > headers[chunk.payload].total_bytes:
            self._is_wrong("bytes that no report announces")
            return
        header, data = headers[chunk.payload], sending.payloads[chunk.payload]
        again = len(data) - chunk.offset
        if again < 0 or data[chunk.offset : end] != chunk.data[:again]:
            self._is_wrong(
                f"two different messages for {_named(sending.report.position)} under the same keys: their "
                "difference can be read"
            )
            return
        if end <= len(data):
            return
        data += chunk.data[again:]
        if len(data) == header.total_bytes and header.value_type is ValueType.MODULAR:
            masked = self.masked.setdefault((header.role, header.bits), Masked(Uniformity(header.bits)))
            masked.uniformity.add(unpack(header, data).values)
            masked.messages += 1
            masked.bytes += len(data)

    def _is_wrong(self, what: str) -> None:
        self.wrong[what] = None


def _fields(message: Message, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that is set, by its path from the top."""
    for descriptor, value in message.ListFields():
        name = f"{path}{descriptor.name}"
        is_one = isinstance(value, str | bytes | Message) or not isinstance(value, Iterable)
        values: Iterable[Any] = (value,) if is_one else value
        for each in values:
            if isinstance(each, Message):
                yield from _fields(each, f"{name}.")
            else:
                yield name, each


def _named(position: Position) -> str:
    return f"round {position.round}, phase {position.phase}"
