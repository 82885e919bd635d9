"""Reports whose payloads are still coming, in pieces and in order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from afl.core.messages import PayloadHeader, Report
from afl.errors import ProtocolError


@dataclass
class Incoming:
    """A report whose payloads are coming: ``received`` bytes of payload number ``payload``."""

    report: Report
    payload: int = 0
    received: int = 0

    @property
    def header(self) -> PayloadHeader:
        """Of the payload that the next piece belongs to."""
        return self.report.payloads[self.payload]

    def check_piece(self, payload: int, offset: int, size: int) -> None:
        """A piece of ``size`` bytes must be the next one.

        Raises:
            ProtocolError: if it is not.
        """
        if payload != self.payload:
            raise ProtocolError(
                f"a chunk of payload {payload}; payload {self.payload} of "
                f"{len(self.report.payloads)} comes next (numbered from 0)"
            )
        if offset != self.received:
            raise ProtocolError(f"a chunk at byte {offset}; byte {self.received} comes next")
        total = self.header.total_bytes
        if not size or offset + size > total:
            raise ProtocolError(f"a chunk of {size} bytes at byte {offset} of a payload of {total} bytes")

    def take(self, size: int) -> bool:
        """The next ``size`` bytes have come; whether the report is complete."""
        self.received += size
        if self.received < self.header.total_bytes:
            return False
        if self.payload + 1 == len(self.report.payloads):
            return True
        self.payload, self.received = self.payload + 1, 0
        return False


class IncomingReports:
    """The open step's reports that have begun, by each worker that they stand for."""

    def __init__(self) -> None:
        self._by_worker: dict[int, Incoming] = {}

    def __bool__(self) -> bool:
        return bool(self._by_worker)

    def begin(self, report: Report) -> None:
        """Its first piece comes next."""
        self._by_worker.update(dict.fromkeys(report.workers, Incoming(report)))

    def standing_for(self, worker: int) -> Incoming | None:
        """The report that stands for the worker, whoever sends it."""
        return self._by_worker.get(worker)

    def sent_by(self, worker: int) -> Incoming | None:
        """The worker's own report, or the joint one that it is the first of."""
        incoming = self._by_worker.get(worker)
        return incoming if incoming is not None and incoming.report.worker == worker else None

    def all(self) -> list[Incoming]:
        """Each once, in the order in which they began."""
        return [incoming for worker, incoming in self._by_worker.items() if incoming.report.worker == worker]

    def shared(self, workers: Collection[int]) -> list[Incoming]:
        """Those that stand for some of these workers, and for others too."""
        return [
            incoming
            for incoming in self.all()
            if len(own := set(incoming.report.workers) & set(workers)) > 0
            and len(own) < len(incoming.report.workers)
        ]

    def forget(self, incoming: Incoming) -> None:
        """It is complete, or its rest will never come."""
        for worker in incoming.report.workers:
            del self._by_worker[worker]

    def clear(self) -> None:
        """The step is closed, or begins again."""
        self._by_worker.clear()
