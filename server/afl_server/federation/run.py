"""What the parts of a federation share: the run, the time of the event in hand, and what is to be done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

from afl.config import Config
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
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
"""Between two log lines of a kind that peers can bring about, once the first have come."""

LOG_BURST: Final = 50
"""Lines of a kind that may come at once."""

MOST_KINDS: Final = 64
"""Told apart at once; what comes besides is one kind."""

KINDS_OF_A_WORKER: Final = 8
"""Besides, for each worker of the run."""

_OTHERS: Final = ""

_R = TypeVar("_R")


class Run:
    """One run, as its parts see it.

    Attributes:
        settings: what workers are told of the configuration.
        names: of sites, by worker: the configuration's, and what workers without one call themselves.
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
        self.names = config.names
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
        self._few = LogRate(MOST_KINDS + KINDS_OF_A_WORKER * config.workers, LOG_BURST)
        self._different = LogRate()

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

    def log_rarely(
        self, level: str, kind: str, message: str, event: log_events.Event, wording: str = ""
    ) -> None:
        """Log a line that peers can bring about: after the first few, one a second of its kind.

        Args:
            kind: with the event's name, which lines count together; nothing that a peer words is in it.
            wording: of lines of a kind that say the same, also the first few come one a second.
        """
        kind = f"{event.name} {kind}"
        left_out = 0 if not wording or not self._few.has_room(kind, self.now) else self._same(kind, wording)
        if left_out is not None:
            others = self._few.left_out(kind, self.now)
            left_out = None if others is None else left_out + others
        if left_out is not None:
            if isinstance(event, log_events.Refused | log_events.NotReading):
                event = replace(event, left_out=left_out)
            first, newline, rest = message.partition("\n")
            self.out.append(Log(level, f"{first}{and_left_out(left_out)}{newline}{rest}", event))

    def _same(self, kind: str, wording: str) -> int | None:
        return self._different.left_out(str(hash((kind, wording))), self.now)

    def log_of_worker(self, level: str, worker: int, message: str, event: log_events.Event) -> None:
        """Log a line that whoever speaks for a worker can bring about, as rarely as others."""
        self.log_rarely(level, f"of worker {worker}", message, event)

    def taken_out(self) -> list[Effect]:
        """The effects so far, which are then forgotten."""
        effects, self.out = self.out, []
        return effects


class LogRate:
    """Which lines are to be written; it keeps ``most`` kinds, however many it is asked for.

    Args:
        burst: how many lines of a kind may come at once.
    """

    def __init__(self, most: int = MOST_KINDS, burst: int = 1) -> None:
        self._most = most
        self._ahead = (burst - 1) * LOG_PERIOD_S
        self._kinds: dict[str, tuple[float, int]] = {}
        """Until when the lines written count as one a second, and how many have been left out since."""

    def left_out(self, kind: str, now: float) -> int | None:
        """How many lines of this kind were left out since the last one; ``None`` if this one is to be too."""
        if kind not in self._kinds and len(self._kinds) >= self._most:
            self._forget(now)
            if len(self._kinds) >= self._most:
                kind = _OTHERS
        until, left_out = self._kinds.get(kind, (-math.inf, 0))
        if until - now > self._ahead:
            self._kinds[kind] = (until, left_out + 1)
            return None
        self._kinds[kind] = (max(until, now) + LOG_PERIOD_S, 0)
        return left_out

    def has_room(self, kind: str, now: float) -> bool:
        """Whether a line of this kind would be written."""
        return self._kinds.get(kind, (-math.inf, 0))[0] - now <= self._ahead

    def _forget(self, now: float) -> None:
        """What was said long ago; what was left out of it is told with the others."""
        others_until, others = self._kinds.pop(_OTHERS, (-math.inf, 0))
        old = [kind for kind, (until, _) in self._kinds.items() if until <= now]
        others += sum(self._kinds.pop(kind)[1] for kind in old)
        if others or others_until > now:
            self._kinds[_OTHERS] = (others_until, others)


def and_left_out(count: int) -> str:
    """What a message ends with."""
    return f" (and {count} more like it)" if count else ""
