"""What a federation wants done: plain instructions, carried out in order by the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform

from afl.core.algorithms.base import Arrays
from afl.core.messages import GoodbyeStatus
from afl.core.rounds.results import Evaluation, Outcome, RoundSummary
from afl.daemon import events as log_events
from afl.errors import ExitCode
from afl.wire.frames import Frame
from afl_server.federation.broadcast import Broadcast, ModelCopy
from afl_server.federation.counters import Moment

ENGINE_PREFIX = "engine."
"""Of the engine's own arrays in a checkpoint."""


@dataclass_transform(frozen_default=True)
class Effect:
    """Something to be done, made as an :class:`afl_server.federation.events.Event` is."""

    def __init_subclass__(cls) -> None:
        dataclass(cls)


# To members.


class Send(Effect):
    """Queue a frame for a member."""

    member: int
    frame: Frame


class Heartbeat(Effect):
    """Queue a heartbeat, unless the peer has yet to take what is queued: it is alive or it is not."""

    member: int


class Follow(Effect):
    """Queue a step; its frames are sent as they come, until it is closed or abandoned.

    Attributes:
        first: the payload, and the byte of it, from which on the member is sent it; ``None`` for all of it.
    """

    member: int
    workers: tuple[int, ...]
    broadcast: Broadcast
    first: tuple[int, int] | None = None


class Announce(Effect):
    """A step that is followed has more frames, is closed, or is abandoned."""


class End(Effect):
    """Say goodbye and end the stream after what is queued has been sent."""

    member: int
    status: GoodbyeStatus
    reason: str


class HangUp(Effect):
    """Cut a peer off that takes nothing, not even a goodbye."""

    member: int
    peer: str


class Read(Effect):
    """Read a member, or read no more of it until it is to be read again: what it sends waits."""

    member: int
    is_wanted: bool


# Work; while one of these three is under way, the machine takes nothing else in hand.


class Compute(Effect):
    """Run a long calculation off the loop; :class:`afl_server.federation.events.EngineDone` answers."""

    call: Callable[[], Any]


class Append(Effect):
    """Make a closed step durable; :class:`afl_server.federation.events.Written` answers.

    Attributes:
        round: the synchronization round that is open now.
    """

    outcome: Outcome
    moment: Moment
    round: int


class Checkpoint(Effect):
    """Write down all that the open step begins with; ``Written`` answers.

    Attributes:
        values: for JSON; ``metrics_bytes`` is added.
        arrays: they stay as they are until the answer.
        round: the synchronization round that is open.
        waits: answer once the checkpoint is on the disk, rather than once its arrays are read.
    """

    values: Mapping[str, Any]
    arrays: Arrays
    round: int
    waits: bool


# Files, timers, words.


class Record(Effect):
    """A line of metrics.

    Attributes:
        closed: a round or an evaluation.
    """

    closed: RoundSummary | Evaluation
    moment: Moment


class SaveModel(Effect):
    """Write ``model-NAME.safetensors``; ``ModelWritten`` answers.

    Attributes:
        rounds_applied: how many update rounds it has behind it.
        is_salvage: of a run that is aborted: not where the run's directory is gone.
    """

    name: str
    model: ModelCopy
    rounds_applied: int
    is_salvage: bool = False


class Timer(Effect):
    """Let ``TimerFired`` come ``at`` a time of the monotonic clock, or not at all any more (``None``).

    One with the same name and member is replaced.
    """

    name: str
    at: float | None
    member: int = 0


class Log(Effect):
    """A line of the log.

    Attributes:
        level: as :mod:`logging` has it, such as ``INFO``.
        error: whose traceback belongs to it.
    """

    level: str
    message: str
    event: log_events.Event
    error: BaseException | None = None


class Finish(Effect):
    """The run, or this process's part of it, is over."""

    code: ExitCode
    reason: str


class Release(Effect):
    """Everybody has heard of the end who could: the server need not listen any more."""


_R = TypeVar("_R")

Job: TypeAlias = Generator[Effect, Any, _R]
"""Work that yields each effect whose answer it waits for, and returns its result: straight-line code for what
happens in several events. While one is under way, the machine takes nothing else in hand."""
