"""Whole reports, kept until a step closes: for steps that may close without some of their workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from afl.core.algorithms.base import Arrays, Collector
from afl.core.codecs.payload import codec_of, unpack
from afl.core.messages import Payload, PayloadHeader, Position, Report

_STAND_INS = "stand_ins"


class HeldReports(Collector):
    """Takes a step's payloads for ``inner``, which sees those of the present workers when the step closes.

    Float addition cannot be undone: what is folded as it comes cannot be left out when the rest does not
    come, or is not finite. Memory: the payloads of one step, at most as long as their headers say. Integers,
    whose order does not matter, are not kept unless the report may yet be left out: ``inner`` has each
    payload as soon as it is whole.

    Args:
        inner: what the payloads are for.
        workers: m.
        keeps_all: whether a report may be left out once it is whole.
    """

    def __init__(self, inner: Collector, workers: int, *, keeps_all: bool = False) -> None:
        self._inner = inner
        self._keeps_all = keeps_all
        self._opened: dict[int, Report] = {}
        self._workers = workers
        self._stood_in: dict[str, NDArray[np.float64]] = {}
        self._payloads: dict[int, list[bytearray]] = {}
        self._bytes = 0

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:
        """The headers that ``inner`` expects."""
        return self._inner.expected_payloads(position)

    def open_report(self, report: Report) -> None:
        """``inner`` says whether the header can be used, while its sender can still be told."""
        self._inner.open_report(report)
        self._opened[report.worker] = report

    @property
    def _streams(self) -> bool:
        return self._inner.is_order_free and not self._keeps_all

    def payloads(self, worker: int) -> Sequence[bytearray]:
        """What is kept of a worker's whole report."""
        return self._payloads[worker]

    def add_loss(self, worker: int, loss: float) -> None:
        """Do nothing: :meth:`fold` gives ``inner`` the losses."""

    def received(self, worker: int, payload: int) -> int:
        """0 where nothing is summed before the step closes."""
        return self._inner.received(worker, payload) if self._streams else 0

    def add_piece(self, worker: int, payload: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        """Keep the next bytes; what is wrong with them is said now, not when the step closes."""
        if self._streams:
            self._inner.add_piece(worker, payload, header, data)
            return
        codec = codec_of(header)
        if codec.in_runs:
            codec.values(data)
        kept = self._payloads.setdefault(worker, [])
        if payload == len(kept):
            kept.append(bytearray())
        kept[payload] += data
        self._bytes += len(data)
        if len(kept[payload]) == header.total_bytes and not codec.in_runs:
            unpack(header, kept[payload])

    def drop(self, worker: int) -> None:
        """Forget an unfinished report."""
        self._inner.drop(worker)
        self._bytes -= sum(map(len, self._payloads.pop(worker, ())))

    def reset(self) -> None:
        """Forget all reports of the open step."""
        self._payloads.clear()
        self._opened.clear()
        self._bytes = 0
        self._inner.reset()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all payloads that are held."""
        return self._bytes + self._inner.waiting_bytes

    def would_wait(self, worker: int) -> bool:  # noqa: ARG002
        """Nobody is held back: whose turn it is, nobody knows before the step closes."""
        return False

    def leave_out(self, absent: Sequence[int]) -> None:  # noqa: ARG002
        """Refused: :meth:`fold` names the absent workers."""
        raise AssertionError("a step that keeps its reports learns of absent workers when it is folded")

    def fold(self, reports: Sequence[Report], stand_ins: Mapping[int, float]) -> None:
        """Hand ``inner`` the step; :meth:`close` follows.

        Args:
            reports: of the present workers, ascending.
            stand_ins: for each participant that is absent, the loss that stands for its own.
        """
        streamed = self._streams
        if stand_ins and not streamed:
            self._inner.leave_out(tuple(stand_ins))
        for report in reports:
            # What a joint report stands for, the accepted one does not say.
            self._inner.open_report(self._opened.get(report.worker, report))
            for index, header in enumerate(() if streamed else report.payloads):
                payload = memoryview(self._payloads[report.worker][index])
                self._inner.add_piece(report.worker, index, header, payload)
            self._inner.add_loss(report.worker, report.loss)
        for worker, loss in stand_ins.items():
            self._inner.add_loss(worker, loss)
        self._payloads.clear()
        self._opened.clear()
        self._bytes = 0
        self._stood_in = {}
        if stand_ins:
            stood_in = np.full(self._workers, np.nan)
            stood_in[list(stand_ins)] = list(stand_ins.values())
            self._stood_in = {_STAND_INS: stood_in}

    def close(self) -> Payload:
        """Close ``inner``, which :meth:`fold` has given the reports."""
        return self._inner.close()

    def unsent(self) -> Arrays:
        """The losses that stood in for those of absent workers too, ``[m]``, NaN elsewhere."""
        return {**self._inner.unsent(), **self._stood_in}

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:
        """Replay the step in ``inner``, which is closed by its own payload and losses."""
        self._inner.replay(losses, payload, unsent)


def with_stand_ins(losses: NDArray[np.float64], unsent: Arrays) -> NDArray[np.float64]:
    """The losses of a closed step, ``[m]``, with those that stood in for absent workers' own."""
    stood_in = unsent.get(_STAND_INS)
    return losses if stood_in is None else np.where(np.isnan(losses), stood_in, losses)
