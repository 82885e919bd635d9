"""Who is connected, and which session speaks for which worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from afl.core.messages import GoodbyeStatus
from afl.daemon import events
from afl_server.session import HEARTBEAT_WITH_REPLY, Session, State

LOG = logging.getLogger("afl.server")

PROBE_TIMEOUT_S = 5.0
"""How long a session may take to prove that it is alive when another claims one of its workers."""

RETURN_S = 10.0
"""How long after it was lost a worker is expected back: those that live try again every second or two, and a
supervisor starts another process within a few."""


class Roster:
    """The open sessions of a run.

    Args:
        workers: m.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._sessions: set[Session] = set()
        self._owners: dict[int, Session] = {}
        self._incarnations: dict[int, bytes] = {}
        self._lost_at: dict[int, float] = {}
        self._began = self._alone_since = time.monotonic()

    @property
    def alone_for(self) -> float:
        """Seconds without a session of any worker; 0 while there is one."""
        return 0.0 if self._owners else time.monotonic() - self._alone_since

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions))

    @property
    def processes(self) -> int:
        """How many processes run the workers that have been ready, or last ran them."""
        return len(set(self._incarnations.values()))

    def add(self, session: Session) -> None:
        """A stream has opened."""
        self._sessions.add(session)

    def remove(self, session: Session) -> list[int]:
        """A stream has ended; the workers it spoke for until now."""
        self._sessions.discard(session)
        freed = [worker for worker in session.workers if self._owners.get(worker) is session]
        for worker in freed:
            del self._owners[worker]
            if self.was_known(worker):
                self._lost_at.setdefault(worker, time.monotonic())
        if freed and not self._owners:
            self._alone_since = time.monotonic()
        return freed

    def ready(self) -> list[Session]:
        """The sessions that take steps."""
        return [session for session in self._sessions if session.state is State.READY]

    def owner(self, worker: int) -> Session | None:
        """The session that speaks for a worker."""
        return self._owners.get(worker)

    def give(self, session: Session) -> None:
        """From now on the session speaks for its workers."""
        for worker in session.workers:
            self._owners[worker] = session

    def missing(self) -> list[int]:
        """Workers without a session that is ready."""
        owners = map(self._owners.get, range(self._workers))
        return [
            worker for worker, owner in enumerate(owners) if owner is None or owner.state is not State.READY
        ]

    def absence(self, worker: int) -> float | None:
        """Seconds since a missing worker was lost; ``None`` if it has never been ready."""
        if not self.was_known(worker):
            return None
        now = time.monotonic()
        return now - self._lost_at.get(worker, now)

    def returning(self) -> list[int]:
        """Workers without a session that may be on their way: lost, or not seen since this process began, for
        no longer than :data:`RETURN_S`."""
        since = time.monotonic() - RETURN_S
        return [
            worker
            for worker in range(self._workers)
            if worker not in self._owners and self._lost_at.get(worker, self._began) > since
        ]

    def newcomers(self, session: Session) -> list[int]:
        """The session's workers that another process, or none, ran before."""
        return [worker for worker in session.workers if self._incarnations.get(worker) != session.incarnation]

    def was_known(self, worker: int) -> bool:
        """Whether some process has been ready as this worker."""
        return worker in self._incarnations

    def remember(self, session: Session) -> None:
        """The session's process is ready as its workers."""
        self._incarnations.update(dict.fromkeys(session.workers, session.incarnation))
        for worker in session.workers:
            self._lost_at.pop(worker, None)

    async def rival(self, worker: int, incarnation: bytes) -> Session | None:
        """The session that holds a worker against a newcomer: another process, and alive.

        The same process come back replaces its own session; another must not answer a probe. A session
        that is replaced is told so; its stream then ends.
        """
        owner = self._owners.get(worker)
        if owner is None:
            return None
        if owner.incarnation != incarnation:
            if owner.is_paused:
                # Its answer would not be read, since its turn in the sum has not come; the transport's own
                # keepalive ends it if it is gone.
                return owner
            owner.heard.clear()
            owner.send(HEARTBEAT_WITH_REPLY)
            try:
                await asyncio.wait_for(owner.heard.wait(), PROBE_TIMEOUT_S)
            except TimeoutError:
                LOG.warning(
                    "%s does not answer and is replaced",
                    owner.label,
                    extra=events.Replaced(peer=owner.peer, workers=owner.workers).extra,
                )
            else:
                return self._owners.get(worker)
            if self._owners.get(worker) is not owner:
                # Another newcomer was quicker while this one waited.
                return self._owners.get(worker)
        owner.end(GoodbyeStatus.TRY_LATER, "replaced by a newer session")
        return None
