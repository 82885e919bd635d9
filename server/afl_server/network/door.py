"""Connections without a session: how long, and how many of them, before they make room for workers.

gRPC closes a connection over which no call is open, and bounds how many there are in all; but whoever keeps
a call open keeps the connection, and of those that there may be, strangers could hold every one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from afl.daemon import events
from afl_server.network.disconnect import Connections, Place, places_of

LOG = logging.getLogger("afl.server")

LOOK_S: Final = 0.05  # between two looks where many are there: a crowd that comes back at once fills the room
SELDOM_S: Final = 1.0  # and where few are; a fourth of the patience if that is less
CROWDED: Final = 0.75  # the share of all connections that there may be, from which on strangers make room
ROOMY: Final = 0.5  # the share at which they have made enough
TOLD_EVERY_S: Final = 10.0  # a line of the log for all that were cut meanwhile
TIMES_PATIENCE: Final = 2  # the handshake, or a call without a session, may take its whole time first


class Strangers(NamedTuple):
    """Connections without a session."""

    now: int = 0
    cut: int = 0
    """Since this process began."""


@dataclass
class Waiting:
    """Since when each connection has had no session, the longest first.

    Args:
        most: connections of all kinds that there may be.
        patience: seconds that one may have no session.
    """

    most: int
    patience: float
    _since: dict[Place, float] = field(default_factory=dict)

    def due(self, there: Collection[Place], known: Collection[Place], now: float) -> list[Place]:
        """Those to cut: all that have had their time and, where it is crowded, the oldest others.

        Args:
            there: every connection.
            known: those with a session.
        """
        strangers = [place for place in there if place not in known]
        kept = self._since
        still = set(strangers)
        self._since = {place: since for place, since in kept.items() if place in still}
        for place in strangers:
            self._since.setdefault(place, now)
        oldest = list(self._since)
        late = sum(since <= now - self.patience for since in self._since.values())
        too_many = len(there) - int(ROOMY * self.most) if len(there) > CROWDED * self.most else 0
        return oldest[: max(late, too_many, 0)]


class Door:
    """Watches the connections of a port of this process.

    Args:
        most: connections that gRPC accepts at once.
        handshake_timeout: as configured; a connection without a session is cut after twice as long.
        known: the peers that have a session, as gRPC names them.
    """

    def __init__(self, most: int, handshake_timeout: float, known: Callable[[], Iterable[str]]) -> None:
        self._most = most
        self._waiting = Waiting(most, TIMES_PATIENCE * handshake_timeout)
        self._seldom = min(SELDOM_S, handshake_timeout / 4)
        self._known = known
        self._untold = 0
        self._told_at = -TOLD_EVERY_S
        self.strangers = Strangers()

    async def watch(self, port: int) -> None:
        """Until cancelled."""
        connections = Connections(port)
        while True:
            began = time.monotonic()
            pause = self._seldom
            try:
                if await self._look(connections) > ROOMY * self._most:
                    pause = LOOK_S
            except (OSError, RuntimeError, MemoryError):
                # No thread or no memory is to be had now; a run does not end for that.
                LOG.debug("connections without a session cannot be looked for now", exc_info=True)
            # At most a fourth of a core.
            await asyncio.sleep(max(pause, 3 * (time.monotonic() - began)))

    async def _look(self, connections: Connections) -> int:
        """Cut those that are due; how many connections there were."""
        # In a thread: of many thousands, it takes some tens of milliseconds.
        there = await asyncio.to_thread(connections.now)
        known = places_of(self._known())
        due = self._waiting.due(there, known, time.monotonic())
        cut = await asyncio.to_thread(connections.cut, due) if due else 0
        self._count(len(set(there) - known) - cut, cut)
        return len(there)

    def _count(self, now: int, cut: int) -> None:
        self.strangers = Strangers(now, self.strangers.cut + cut)
        self._untold += cut
        told = time.monotonic()
        if self._untold and told - self._told_at >= TOLD_EVERY_S:
            LOG.warning(
                "cut %d connections without a session, which had their time or left too little room for"
                " workers; %d are left",
                self._untold,
                now,
                extra=events.StrangersCut(connections=self._untold, left=now).extra,
            )
            self._untold, self._told_at = 0, told
