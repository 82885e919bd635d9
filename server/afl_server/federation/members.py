"""Who is connected: one record for each stream, and which of them speaks for which worker."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from afl.config.address import shown_peer
from afl.core.messages import NOWHERE, Position
from afl.security.identity import Permission, WorkerIds
from afl_server.federation.events import NO_STEP, Joined, PartialStep

RETURN_S = 10.0
"""How long after it was lost a worker is expected back: those that live try again every second or two, and a
supervisor starts another process within a few."""


class State(enum.IntEnum):
    """How far the conversation with a member is."""

    NEW = 0
    JOINING = 1
    """It waits for the answer of another process that speaks for one of its workers."""
    JOINED = 2
    READY = 3
    ENDED = 4
    """It has been said goodbye."""
    GONE = 5
    """It takes part no more, or was turned away as it came; its stream may still be there."""


@dataclass(eq=False)
class Member:
    """One worker process's stream.

    Attributes:
        id: counts up from 1 as streams open.
        peer: its address, for the log.
        join: what it joined with; ``None`` before.
        workers: those that it speaks for, ascending.
        reported: where each of its workers stood when it became ready.
        told_held: workers whose report was held when they were welcomed: they do not send it by themselves.
        partial: the step of which it had a part when it became ready.
        awaits_keys: whether it is ready but for others' keys, which the run needs.
        failures: how many it has told.
        ready_at: when it became ready, in seconds of the monotonic clock; ``None`` before.
        owes: workers whose report for a closed step has not come: it is sent no other step.
        last_seen: when something came of it, or it was read again, in seconds of the monotonic clock.
    """

    id: int
    peer: str
    permission: Permission
    last_seen: float
    state: State = State.NEW
    join: Joined | None = None
    workers: tuple[int, ...] = ()
    reported: dict[int, Position] = field(default_factory=dict)
    told_held: set[int] = field(default_factory=set)
    partial: PartialStep = NO_STEP
    awaits_keys: bool = False
    failures: int = 0
    ready_at: float | None = None
    owes: set[int] = field(default_factory=set)

    @property
    def label(self) -> str:
        """How logs name it."""
        peer = shown_peer(self.peer)
        return f"{WorkerIds.of(self.workers).named} at {peer}" if self.workers else f"a peer at {peer}"

    @property
    def incarnation(self) -> bytes:
        """Drawn by its process as it started; empty before the member has joined."""
        return b"" if self.join is None else self.join.incarnation

    @property
    def applied(self) -> Position:
        """The step that its model had when it joined; nowhere for a process without a model of this run."""
        return self.join.applied if self.join is not None and self.join.run_id else NOWHERE


class Members:
    """The streams of a run, and what is remembered of each worker's processes.

    Attributes:
        by_id: the members whose stream is there.
        owners: by worker, the member that speaks for it.
        incarnations: by worker, of the last process that was ready as it.
        lost_at: of each worker that was ready and is not, when it was lost.
        paused: members that are not read, because their turn in the sum has not come.

    Args:
        workers: m.
        now: when this process began.
    """

    def __init__(self, workers: int, now: float) -> None:
        self.by_id: dict[int, Member] = {}
        self.owners: dict[int, Member] = {}
        self.incarnations: dict[int, bytes] = {}
        self.lost_at: dict[int, float] = {}
        self.paused: set[int] = set()
        self._workers = range(workers)
        self._began = now

    def __iter__(self) -> Iterator[Member]:
        """Those that take part, or may come to."""
        # A copy in one step, since snapshots are taken from other threads.
        return (member for member in list(self.by_id.values()) if member.state is not State.GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def remove(self, member: Member, now: float) -> list[int]:
        """A member takes part no more; the workers that it spoke for until now."""
        member.state = State.GONE
        self.paused.discard(member.id)
        freed = [worker for worker in member.workers if self.owners.get(worker) is member]
        for worker in freed:
            del self.owners[worker]
            if worker in self.incarnations:
                self.lost_at.setdefault(worker, now)
        return freed

    def ready(self) -> list[Member]:
        """The members that take steps."""
        return [member for member in self.by_id.values() if member.state is State.READY]

    def owner_of_any(self, workers: Iterable[int]) -> Member | None:
        """The member that speaks for the first of these workers that has one."""
        return next((owner for worker in workers if (owner := self.owners.get(worker)) is not None), None)

    def returning(self, now: float) -> dict[int, float]:
        """Workers without a stream that may be on their way, and until when they are expected: lost, or not
        seen since this process began, for no longer than :data:`RETURN_S`."""
        away = (worker for worker in self._workers if worker not in self.owners)
        until = {worker: self.lost_at.get(worker, self._began) + RETURN_S for worker in away}
        return {worker: at for worker, at in until.items() if at > now}

    def newcomers(self, member: Member) -> list[int]:
        """The member's workers that another process, or none, ran before."""
        return [worker for worker in member.workers if self.incarnations.get(worker) != member.incarnation]

    def remember(self, member: Member) -> None:
        """The member's process is ready as its workers."""
        self.incarnations.update(dict.fromkeys(member.workers, member.incarnation))
        for worker in member.workers:
            self.lost_at.pop(worker, None)
