"""Who is connected: one record for each stream, and which of them speaks for which worker."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from afl.core.messages import NOWHERE, Position
from afl.security.identity import Permission, WorkerIds
from afl_server.federation.events import Joined

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
    """It has been said goodbye; its stream is still there."""


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
        owes: workers whose report for a closed step has not come: it is sent no other step.
        is_paused: whether it is not read, because its turn in the sum has not come.
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
    owes: set[int] = field(default_factory=set)
    is_paused: bool = False

    @property
    def label(self) -> str:
        """How logs name it."""
        return f"{WorkerIds.of(self.workers).named} at {self.peer}" if self.workers else f"peer {self.peer}"

    @property
    def incarnation(self) -> bytes:
        """Drawn by its process as it started; empty before the member has joined."""
        return b"" if self.join is None else self.join.incarnation

    @property
    def applied(self) -> Position:
        """The step that its model had when it joined; nowhere for a process without a model of this run."""
        return self.join.applied if self.join is not None and self.join.run_id else NOWHERE


class Members:
    """The streams of a run by their id, and what is remembered of each worker's processes.

    Args:
        workers: m.
        now: when this process began.
    """

    def __init__(self, workers: int, now: float) -> None:
        self._workers = workers
        self._by_id: dict[int, Member] = {}
        self._present: dict[int, Member] = {}
        self._owners: dict[int, Member] = {}
        self._incarnations: dict[int, bytes] = {}
        self._lost_at: dict[int, float] = {}
        self._began = self._alone_since = now

    def __len__(self) -> int:
        """How many take part, or may come to; without those that were turned away as they came."""
        return len(self._present)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._present.values()))

    def __contains__(self, member: Member) -> bool:
        return member.id in self._present

    def get(self, member: int) -> Member | None:
        """The member with this id, while its stream is there."""
        return self._by_id.get(member)

    def add(self, member: Member) -> None:
        """A stream has opened."""
        self._by_id[member.id] = self._present[member.id] = member

    def remove(self, member: Member, now: float) -> list[int]:
        """A member takes part no more; the workers that it spoke for until now."""
        self._present.pop(member.id, None)
        freed = [worker for worker in member.workers if self._owners.get(worker) is member]
        for worker in freed:
            del self._owners[worker]
            if self.was_known(worker):
                self._lost_at.setdefault(worker, now)
        if freed and not self._owners:
            self._alone_since = now
        return freed

    def forget(self, member: Member) -> None:
        """Its stream has ended."""
        self._by_id.pop(member.id, None)

    def alone_since(self) -> float | None:
        """Since when no worker has had a stream, in seconds of the monotonic clock; ``None`` if one has."""
        return None if self._owners else self._alone_since

    def ready(self) -> list[Member]:
        """The members that take steps."""
        return [member for member in self._present.values() if member.state is State.READY]

    def owner(self, worker: int) -> Member | None:
        """The member that speaks for a worker."""
        return self._owners.get(worker)

    def owner_of_any(self, workers: Iterable[int]) -> Member | None:
        """The member that speaks for the first of these workers that has one."""
        return next((owner for worker in workers if (owner := self._owners.get(worker)) is not None), None)

    def owners(self) -> dict[int, Member]:
        """By worker, those that somebody speaks for; a copy."""
        return dict(self._owners)

    def give(self, member: Member) -> None:
        """From now on the member speaks for its workers."""
        self._owners.update(dict.fromkeys(member.workers, member))

    def missing(self) -> list[int]:
        """Workers without a member that is ready."""
        owners = map(self._owners.get, range(self._workers))
        return [
            worker for worker, owner in enumerate(owners) if owner is None or owner.state is not State.READY
        ]

    def lost_at(self) -> dict[int, float]:
        """When each worker that was ready and is not was lost, in seconds of the monotonic clock; a copy."""
        return dict(self._lost_at)

    def returning(self, now: float) -> dict[int, float]:
        """Workers without a stream that may be on their way, and until when they are expected: lost, or not
        seen since this process began, for no longer than :data:`RETURN_S`."""
        found = {
            worker: self._lost_at.get(worker, self._began) + RETURN_S
            for worker in range(self._workers)
            if worker not in self._owners
        }
        return {worker: until for worker, until in found.items() if until > now}

    def newcomers(self, member: Member) -> list[int]:
        """The member's workers that another process, or none, ran before."""
        return [worker for worker in member.workers if self._incarnations.get(worker) != member.incarnation]

    def was_known(self, worker: int) -> bool:
        """Whether some process has been ready as this worker."""
        return worker in self._incarnations

    def known(self) -> frozenset[int]:
        """The workers that some process has been ready as."""
        return frozenset(list(self._incarnations))

    def remember(self, member: Member) -> None:
        """The member's process is ready as its workers."""
        self._incarnations.update(dict.fromkeys(member.workers, member.incarnation))
        for worker in member.workers:
            self._lost_at.pop(worker, None)
