"""What happens to a federation: each event is plain data, so that a sequence of them can be written down.

``member`` is a stream's number (:class:`afl_server.federation.members.Member`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, dataclass_transform

from afl.core.messages import NOWHERE, Kind, Position, Report
from afl.core.secrecy.keys import NO_KEYS, KeyOffer
from afl.errors import ExitCode
from afl.security.identity import Permission
from afl.wire.accounting import FrameContent, Traffic
from afl.wire.frames import PROTOCOL

Artifact: TypeAlias = Literal["outcome", "checkpoint", "metrics", "model"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Event:
    """Something that happens; a subclass's annotations are its fields.

    None is ever changed. Python does not enforce it, which would double what making one costs.
    """

    def __init_subclass__(cls) -> None:
        dataclass(cls)


# What members do.


class MemberEvent(Event):
    """Something that happens on a member's stream."""

    member: int


class Opened(MemberEvent):
    """A stream has opened."""

    peer: str
    permission: Permission


class FrameCame(MemberEvent):
    """A frame has come, before the events of what it holds.

    Attributes:
        size: in bytes, without gRPC's prefix.
        content: ``GRADIENT`` stands for whatever the open step is for, which only the federation knows.
        has_join: whether it holds a :class:`Joined`, as the first of a stream must.
    """

    size: int
    content: FrameContent = FrameContent(Traffic.CONTROL)
    has_join: bool = False


class Joined(MemberEvent):
    """A process asks to take part.

    Attributes:
        incarnation: drawn when the process started.
        run_id: the run that it has a model of; empty if it has none.
        applied: the position of the last step applied to that model.
        layout_hash: of a model that it has built; empty if it has built none.
        task: the one that it was started for; empty for whatever the run's is.
        sites: what the workers' sites call themselves, one for each; or none.
        oldest_protocol: that it speaks, where ``protocol`` is the newest.
    """

    workers: tuple[int, ...]
    incarnation: bytes
    protocol: int
    package_version: str
    run_id: str = ""
    applied: Position = NOWHERE
    layout_hash: bytes = b""
    task: str = ""
    sites: tuple[str, ...] = ()
    oldest_protocol: int = PROTOCOL


@dataclass(frozen=True)
class PartialStep:
    """What a process holds of a step whose session was cut: ``offset`` bytes of payload number ``payload``,
    and all of those before it.

    Attributes:
        digest: of these bytes, as :meth:`afl_server.federation.broadcast.Broadcast.begins_with` takes it.
    """

    position: Position = NOWHERE
    kind: Kind = Kind.TRAIN
    payload: int = 0
    offset: int = 0
    digest: bytes = b""


NO_STEP: Final = PartialStep()


class Ready(MemberEvent):
    """A process has its task, data and model.

    Attributes:
        dim: d, of its model.
        realization_digest: of the first round's shared randomness as it draws it.
        reported: of each of its workers, the position of its last report.
        partial: the step that it has a part of; at no position where it has none.
        keys: of its workers, with secure aggregation.
        frozen_digest: of the parameters that are not trained, where each site has its own; else empty.
    """

    layout_hash: bytes
    dim: int
    realization_digest: bytes
    reported: tuple[tuple[int, Position], ...]
    partial: PartialStep = NO_STEP
    keys: KeyOffer = NO_KEYS
    frozen_digest: str = ""


class ReportBegan(MemberEvent):
    """A report's opening; its payloads follow in pieces."""

    report: Report


class Piece(MemberEvent):
    """The next bytes of a payload."""

    worker: int
    payload: int
    offset: int
    data: bytes | memoryview


class FailureTold(MemberEvent):
    """A worker could not do a step; ``cause`` is a :class:`afl.core.messages.FailureCause`, if known."""

    worker: int
    position: Position
    cause: int
    message: str
    traceback: str


class GoodbyeSaid(MemberEvent):
    """The process ends of itself."""

    reason: str


class Malformed(MemberEvent):
    """A frame that says nothing this protocol knows; its ``size``, or 0 after a :class:`FrameCame`."""

    reason: str
    size: int = 0


class PermissionChanged(MemberEvent):
    """The peer's token means something else than before."""

    permission: Permission


class NotReading(MemberEvent):
    """The peer takes nothing of what it is sent."""


class Left(MemberEvent):
    """The stream has ended."""


# What the machine around it does.


class Started(Event):
    """The server listens."""


class TimerFired(Event):
    """The time of a :class:`afl_server.federation.effects.Timer` has come."""

    name: str
    member: int = 0


class EngineDone(Event):
    """A :class:`afl_server.federation.effects.Compute` has ended.

    Attributes:
        result: what the call returned.
        error: what it raised instead.
    """

    result: Any = field(default=None, compare=False)
    error: Exception | None = field(default=None, compare=False)


class Written(Event):
    """An outcome is durable, or the arrays of a checkpoint may change again.

    Attributes:
        checkpoint_due: whether a checkpoint should follow the outcome.
    """

    checkpoint_due: bool = False


class ModelWritten(Event):
    """``model-NAME.safetensors`` is on the disk."""

    name: str


class WriteFailed(Event):
    """Something could not be written.

    Attributes:
        code: ``STORAGE`` if it is the disk's fault, else ``INTERNAL``.
        error: for the log.
        is_final: the run directory is gone, so that nothing can be resumed.
    """

    what: Artifact
    reason: str
    code: ExitCode = ExitCode.STORAGE
    error: Exception | None = field(default=None, compare=False)
    is_final: bool = False


class StopAsked(Event):
    """This process is to end.

    Attributes:
        is_final: the run ends at once and for good; else it can be resumed where it is durable.
    """

    reason: str
    code: ExitCode = ExitCode.INTERRUPTED
    is_final: bool = False


class QuarantineChanged(Event):
    """The operator has written other worker ids into the run directory's file; ``text`` is all of it, or
    ``None`` if it cannot be read."""

    text: str | None


class Faulted(Event):
    """The loop around the machine, or the writer of a stream, has failed; ``error`` is for the log."""

    error: Exception | None = field(default=None, compare=False)
