"""What the parts of a federation share: the run, the time of the event in hand, and what is to be done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

from afl.config import Config
from afl.core.engine import RoundEngine
from afl.core.randomness import SharedRandomness
from afl.core.secrecy.exchange import KeyExchange
from afl.daemon import events as log_events
from afl.errors import place
from afl.wire.frames import Frame
from afl.wire.settings import RunSettings
from afl_server.federation.counters import Counters, Incident
from afl_server.federation.effects import Compute, Effect, Job, Log, Send, Timer
from afl_server.federation.events import Event, TimerFired
from afl_server.federation.members import Members
from afl_server.federation.snapshot import RunDescription

INLINE_DIM = 1 << 20
"""Up to this dimension the engine's calls are made in place: the longest then takes a few milliseconds, and a
thread hop would cost more than most."""

LOG_PERIOD_S: Final = 1.0
"""Between two log lines of a kind that strangers can bring about."""

MOST_KINDS: Final = 64
"""Told apart at once; what comes besides is one kind: a peer may make up as many as it likes."""

_OTHERS: Final = ""

_R = TypeVar("_R")


class Run:
    """One run, as its parts see it.

    Attributes:
        settings: what workers are told of the configuration.
        now: the time of the event in hand, in seconds of the monotonic clock, as in all of the federation.
        counters: of the whole run; what is sent is counted by whoever sends it.
        incidents: how often each has happened to each worker in this process, ``[m]``. Not part of the
            counters, which are written down with every step.
        out: the effects of the event in hand.
        keys: the exchange of keys; ``None`` without secure aggregation.
        waiting: events that have come while a job is under way.
    """

    def __init__(
        self,
        description: RunDescription,
        *,
        config: Config,
        settings: RunSettings,
        engine: RoundEngine,
        randomness: SharedRandomness,
        now: float,
    ) -> None:
        self.description = description
        self.config = config
        self.settings = settings
        self.engine = engine
        self.randomness = randomness
        self.now = now
        self.counters = Counters()
        self.incidents: dict[str, list[int]] = {incident: [0] * config.workers for incident in Incident}
        is_secure = config.privacy.secure_aggregation
        self.keys = KeyExchange(description.run_id, config.workers) if is_secure else None
        self.members = Members(config.workers, now)
        self.out: list[Effect] = []
        self.waiting: deque[Event] = deque()
        # Where whole payloads are kept, closing a step folds all of them at once.
        at_once = config.workers if engine.policy.leaves_out else 1
        self.is_small = description.dim * at_once <= INLINE_DIM
        self._log_rate = LogRate()

    @property
    def is_durable(self) -> bool:
        """Whether outcomes and checkpoints are written."""
        return self.config.server.state != "off"

    @property
    def open_rounds(self) -> str:
        """The update rounds of the open step, for a message."""
        return self.named(self.engine.step.position.round)

    def named(self, round_: int) -> str:
        """The update rounds of a synchronization round, for a message."""
        return self.engine.algorithm.settings.named(round_)

    def place(self, worker: int, round_: int) -> str:
        """A worker in a synchronization round, for a message."""
        return place(worker, self.named(round_))

    def compute(self, call: Callable[[], _R]) -> Job[_R]:
        """A call of the engine: in place for a small model, else on the engine's thread."""
        if self.is_small:
            return call()
        result: _R = yield Compute(call)
        return result

    def count(self, incident: Incident, workers: Iterable[int]) -> None:
        """It has happened to each of these."""
        for worker in workers:
            self.incidents[incident][worker] += 1

    # Effects.

    def send(self, member: int, frame: Frame) -> None:
        """Queue a frame for a member."""
        self.out.append(Send(member, frame))

    def set_timer(self, name: str, at: float | None, member: int = 0) -> None:
        """Let a timer fire, or not (``None``). One that has fired and waits to be handled is void."""
        self.out.append(Timer(name, at, member))
        fired = TimerFired(name, member)
        while fired in self.waiting:
            self.waiting.remove(fired)

    def log(
        self, level: str, message: str, event: log_events.Event, error: BaseException | None = None
    ) -> None:
        """Log a line."""
        self.out.append(Log(level, message, event, error))

    def log_rarely(self, kind: str, message: str, event: log_events.Refused | log_events.NotReading) -> None:
        """Log a warning that strangers can bring about: one a second of its kind, however many there are."""
        left_out = self._log_rate.left_out(kind, self.now)
        if left_out is not None:
            told = replace(event, left_out=left_out)
            self.out.append(Log("WARNING", message + and_left_out(left_out), told))

    def taken_out(self) -> list[Effect]:
        """The effects so far, which are then forgotten."""
        effects, self.out = self.out, []
        return effects


class LogRate:
    """Which lines are to be written."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, int]] = {}
        """When a line was last written, and how many have been left out since."""

    def left_out(self, kind: str, now: float) -> int | None:
        """How many lines of this kind were left out since the last one; ``None`` if this one is to be too."""
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            self._forget(now)
            if len(self._kinds) >= MOST_KINDS:
                kind = _OTHERS
        written_at, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now - written_at < LOG_PERIOD_S:
            self._kinds[kind] = (written_at, left_out + 1)
            return None
        self._kinds[kind] = (now, 0)
        return left_out

    def _forget(self, now: float) -> None:
        """What was said long ago; what was left out of it is told with the others."""
        others_at, others = self._kinds.pop(_OTHERS, (-math.inf, 0))
        old = [kind for kind, (written_at, _) in self._kinds.items() if now - written_at >= LOG_PERIOD_S]
        others += sum(self._kinds.pop(kind)[1] for kind in old)
        if others or now - others_at < LOG_PERIOD_S:
            self._kinds[_OTHERS] = (others_at, others)


def and_left_out(count: int) -> str:
    """What a message ends with."""
    return f" (and {count} more like it)" if count else ""
