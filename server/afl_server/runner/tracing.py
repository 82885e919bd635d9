"""The server's part of the traces of rounds: each round, its steps, and how their outcomes became durable."""

from __future__ import annotations

from afl.daemon.tracing import ROUND, Tracing
from afl_server.federation.machine import Federation
from afl_server.federation.snapshot import ClosedStep


class RoundTraces:
    """Made from what the federation says it has closed; looked at after each event."""

    def __init__(self, tracing: Tracing, federation: Federation) -> None:
        self._tracing = tracing
        self._federation = federation
        self._seen: ClosedStep | None = None
        self._round_opened_at = 0.0

    def look(self) -> None:
        """Add what has been closed since the last look: at most one step."""
        closed, last = self._federation.closed_step, self._seen
        if closed is None or closed is last:
            return
        position = closed.step.position
        if last is None or last.step.position.round != position.round:
            self._end_round()
            self._round_opened_at = closed.opened_at
        self._seen = closed
        kind = closed.step.kind.name.lower()
        self._add("step", position.round, closed.opened_at, closed.closed_at, kind=kind)
        if closed.outcome_seconds:
            began = closed.closed_at - closed.outcome_seconds
            self._add("write outcome", position.round, began, closed.closed_at, kind=kind)

    def close(self) -> None:
        """Add the last round, and export what is left."""
        self._end_round()
        self._tracing.close()

    def _end_round(self) -> None:
        if (last := self._seen) is not None:
            self._add(ROUND, last.step.position.round, self._round_opened_at, last.closed_at)

    def _add(self, name: str, round_: int, began: float, ended: float, **attributes: str) -> None:
        run_id = self._federation.description.run_id
        self._tracing.add(name, (began, ended), run_id=run_id, round_=round_, **attributes)
